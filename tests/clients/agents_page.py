"""Entries of docs/agents.md, so that tests run the commands of the page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "agents.md"
_HEADING = re.compile(r"^### (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"(?:^`~/([^`]+)`\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXPORTED = re.compile(r"([A-Z_]+)=(\S+)")


@dataclass
class Entry:
    """The configuration of a client: files of the home folder, variables, and the program's lines
    if the client is a library."""

    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    code: str = ""
    num_lines: int = 0

    def write(self, home: Path) -> None:
        """Put the files where the client looks for them."""
        for name, text in self.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)


def entries(url: str = "", model: str = "", window_tokens: int = 0) -> dict[str, Entry]:
    """All entries by their headings, for this gateway and model."""
    values = {
        "http://localhost:8000": url,
        "MODEL": model,
        "KEY": "none",
        "WINDOW": str(window_tokens),
    }
    text = PAGE.read_text()
    for name, value in values.items():
        text = re.sub(rf"\b{re.escape(name)}\b", value, text) if value else text
    _, *parts = _HEADING.split(text)
    return {heading: _entry(part) for heading, part in zip(parts[::2], parts[1::2], strict=True)}


def _entry(text: str) -> Entry:
    entry = Entry()
    for file, language, block in _BLOCK.findall(text):
        entry.num_lines += sum(bool(line) for line in block.splitlines())
        if file:
            entry.files[file] = block
        elif language == "sh":
            for line in block.splitlines():
                if line.startswith("export "):
                    entry.environment |= dict(_EXPORTED.findall(line))
        else:
            entry.code = block
    return entry
