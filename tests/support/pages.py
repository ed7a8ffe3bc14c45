"""Examples of documents, as their readers copy them."""

from __future__ import annotations

import re

from tests.support.repository import ROOT


def example_of(page: str, heading: str, language: str) -> str:
    """The first block of ``language`` below a heading of a page in docs."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, found, below = text.partition(f"\n## {heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    block = re.search(rf"^```{language}\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)
    assert block is not None, f"{page} has no {language} below {heading!r}"
    return block[1]
