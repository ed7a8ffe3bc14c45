"""Retired terms: none is used again.

``banned_words.txt`` has a line for each: the term, a tab, and its replacement.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.repository import ROOT, text_files

_LIST = Path(__file__).with_name("banned_words.txt")
# What tells of the past, what others wrote, and what was measured.
_EXEMPT = ("CHANGELOG.md", "docs/decisions/", "gateway/web/vendor/", "benchmarks/results/")


def banned() -> dict[str, str]:
    lines = _LIST.read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\w+\t\S.*", line) for line in lines), lines
    return dict(line.split("\t", 1) for line in lines)


def test_no_banned_word_is_used() -> None:
    instead = banned()
    found = []
    for path in text_files():
        name = path.relative_to(ROOT).as_posix()
        if path == _LIST or name.startswith(_EXEMPT):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            words = instead.keys() & set(re.findall(r"\w+", line))
            found += [f"{name}:{number}: {word}: {instead[word]}" for word in sorted(words)]
    assert not found, "\n".join(found)


def test_no_word_is_banned_and_given_as_the_better_one() -> None:
    instead = banned()
    assert not instead.keys() & set(instead.values())
