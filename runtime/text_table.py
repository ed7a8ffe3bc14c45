"""Plain text tables for terminals, pipes and pages, laid out by rich without colours."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
_UNLIMITED = 10**9

Cells = Sequence[str]


def text_table(
    names: Cells, rows: Sequence[Cells], is_right: Sequence[bool], foot: Sequence[Cells] = ()
) -> str:
    """Return columns below a rule, each as wide as its widest cell.

    Columns in ``is_right`` are right aligned. ``foot`` follows below another rule. Ends with a line
    break.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, right in zip(names, is_right, strict=True):
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for block in (rows, foot):
        if block or block is rows:
            table.add_row(*(Rule(characters="-", style="") for _ in names))
        if block:  # one cell holds the lines of a column: rich is slow where cells are many
            columns = zip(*block, strict=True)
            table.add_row(*(Text("\n".join(map(one_line, column))) for column in columns))
    return plain_text(table)


def plain_text(*shown: RenderableType, width: int = _UNLIMITED) -> str:
    """Return rich's rendering on a page of ``width`` columns, without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Group(*shown), crop=False)
    lines = captured.get().removesuffix("\n").split("\n")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def one_line(text: str) -> str:
    """Escape control characters in a text.

    They would break the table or control the terminal. Bidirectional controls would reorder
    figures.
    """
    return "".join(ascii(char)[1:-1] if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    return unicodedata.category(char) == "Cc" or unicodedata.bidirectional(char) in _DIRECTIONS
