"""Reader of ``docs/security.md``: its statements, and its retention times."""

from __future__ import annotations

import re

from tests.support.repository import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
KEPT_HEADING = "Stored data and retention"
_UNITS_S = {"second": 1.0, "minute": 60.0, "hour": 3_600.0, "day": 86_400.0}


def statements() -> list[str]:
    """Return the items of all lists, each on one line."""
    items = re.findall(r"^- (.+?)(?=^- |^\n|^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return [" ".join(item.split()) for item in items]


def references(statement: str) -> list[tuple[str, str]]:
    """Return the tests that a statement names: file and function."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", statement)


def kept_s() -> dict[tuple[str, str], float]:
    """Return retention times in seconds by source: a (kind, name) of a ``setting``, a ``stream`` or
    a ``table``."""
    section = TEXT.split(f"\n## {KEPT_HEADING}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    found = {}
    for _what, _where, words, by in rows[2:]:
        kind, name = re.fullmatch(r"(setting|stream|table) `([\w.]+)`", by.strip()).groups()  # type: ignore[union-attr]
        found[kind, name] = _seconds(words.strip())
    return found


def _seconds(words: str) -> float:
    found = re.match(r"([\d,]+) (second|minute|hour|day)s?\b", words)
    assert found, words
    return float(found[1].replace(",", "")) * _UNITS_S[found[2]]
