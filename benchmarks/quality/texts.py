"""Texts of this repository as windows of token ids: half prose, half code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from millrace.registry.tokenizers.tokenizer import Tokenizer

_ROOT = Path(__file__).parents[2]
# As llama.cpp's llama-perplexity counts: windows of 512 tokens, and in each of them the tokens of
# the second half, which have at least 256 tokens before them.
WINDOW_TOKENS = 512
FIRST_COUNTED = WINDOW_TOKENS // 2 + 1
NUM_COUNTED = WINDOW_TOKENS - FIRST_COUNTED

Window = list[int]


def windows(tokenizer: Tokenizer, number: int) -> list[Window]:
    """Return ``number`` windows of WINDOW_TOKENS token ids, prose of docs/ and code of engine/ in
    turns.
    """
    prose = _windows(tokenizer, sorted((_ROOT / "docs").glob("*.md")))
    code = _windows(tokenizer, sorted((_ROOT / "engine").rglob("*.py")))
    return [next(prose if index % 2 == 0 else code) for index in range(number)]


def _windows(tokenizer: Tokenizer, files: Iterable[Path]) -> Iterator[Window]:
    """Yield whole windows of each file, at most one of a file, so that the subjects vary."""
    for file in files:
        token_ids = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
        if len(token_ids) >= WINDOW_TOKENS:
            yield token_ids[:WINDOW_TOKENS]
