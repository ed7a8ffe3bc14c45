"""Self-contained HTML page, without network or scripts, and its parts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources


def document(title: str, lead: str, content: str, footer: str) -> str:
    """Return the whole page; ``lead``, below its heading, and ``content`` are HTML."""
    style = resources.files("millrace.bench.report").joinpath("page.css").read_text()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{lead}
</header>
{content}
<footer>{escape(footer)}</footer>
</body>
</html>
"""


def escape(text: str) -> str:
    return html.escape(text)


def card(name: str, value: str, *more: str) -> str:
    """Return a card: a name, a large value, and further lines."""
    small = "".join(f"<small>{escape(line)}</small>" for line in more)
    return (
        f"<div class=card><span>{escape(name)}</span><strong>{escape(value)}</strong>{small}</div>"
    )


def figure(title: str, drawn: str) -> str:
    """Return a chart below its title."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def table(
    rows: Sequence[tuple[str, Sequence[str]]], head: Sequence[str] = (), kind: str = ""
) -> str:
    """Return a table with rows of a name and cells; ``head`` names all columns; ``kind`` is a CSS
    class of the cells."""
    opening = f"<td class={kind}>" if kind else "<td>"
    named = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f"{opening}{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    top = f"<thead><tr>{named}</tr></thead>" if head else ""
    return f"<div class=wide><table>{top}<tbody>{body}</tbody></table></div>"
