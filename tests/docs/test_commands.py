"""Commands in documents: every ``millrace`` command parses."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from millrace.cli.main import build_parser
from tests.docs.test_readme import DOCUMENTS
from tests.support.repository import PACKAGES, ROOT, python_files

_BLOCK = re.compile(r"^ *```(?:sh|bash|console)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(millrace [^`]+)`")
# What a shell does with the rest of a line.
_SHELL = frozenset({">", ">>", "|", "&&", "||", ";", "&", "2>", "<"})
_TROUBLE = ROOT / "docs" / "troubleshooting.md"


def commands_in(text: str) -> list[list[str]]:
    """Return the arguments of each command, from blocks of shell and from the text."""
    found = []
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if words.startswith("millrace "):
                found.append(_arguments(words))
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    for shown in _INLINE.findall(prose):
        words = _arguments(shown.replace("\n", " ").replace("\\|", "|"))
        # A name alone stands for the command.
        if any(word.startswith("-") for word in words):
            found.append(words)
    return found


def _arguments(line: str) -> list[str]:
    words = shlex.split(line, comments=True)[1:]
    end = next((place for place, word in enumerate(words) if word in _SHELL), len(words))
    return words[:end]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_parse(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    for words in commands_in(document.read_text(encoding="utf-8")):
        try:
            assert callable(parser.parse_args(words).handler)
        except SystemExit as ended:
            if ended.code:
                pytest.fail(f"millrace {shlex.join(words)}: {capsys.readouterr().err}")


def test_commands_are_found_where_they_stand() -> None:
    text = (
        "```sh\nmillrace up --port 9000   # all\n$ .venv/bin/millrace top --once | less\n```\n"
        "So `millrace keys list --json` is not `millrace embed`.\n"
    )
    assert commands_in(text) == [
        ["up", "--port", "9000"],
        ["top", "--once"],
        ["keys", "list", "--json"],
    ]


def test_every_command_is_shown_somewhere() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    parser = build_parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert not [name for name in commands.choices if f"millrace {name}" not in text]


# --- error messages ---


def _said_in_code() -> list[str]:
    """Return all texts of the code, with … in place of interpolated values."""
    texts = []
    for path in python_files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def _is_said(message: str, texts: list[str]) -> bool:
    wanted = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    return any(wanted.search(text) for text in texts)


def test_the_messages_that_are_quoted_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([^`]+)`", _TROUBLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 30
    texts = _said_in_code()
    assert not [message for message in rows if not _is_said(message, texts)]
    assert not _is_said("a message that no code … has", texts)
    longest = [max(map(len, message.split("…"))) for message in rows]
    assert min(longest) >= 8  # a quotation, not a word
