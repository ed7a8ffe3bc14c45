"""The first tokens of a text, by tokenizers of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from millrace.gateway.request.embedding_jobs import first_tokens
from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.support.engine.tokenizers_made import byte_level, metaspace, write_tokenizer


def lowercase() -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens do not spell the original text."""
    made = byte_level()
    made.normalizer = normalizers.Lowercase()
    return made


@cache
def tokenizer_of(make: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_tokenizer(Path(folder), make()))


@pytest.mark.parametrize("make", [byte_level, metaspace, lowercase])
@given(text=st.text(max_size=40), num_tokens=st.integers(1, 20))
def test_a_beginning_of_as_many_tokens(
    make: Callable[[], tokenizers.Tokenizer], text: str, num_tokens: int
) -> None:
    tokenizer = tokenizer_of(make)

    def length(part: str) -> int:
        return len(tokenizer.encode(part, False))

    cut = first_tokens(tokenizer, text, num_tokens)
    assert text.startswith(cut)
    assert length(cut) <= num_tokens
    if length(text) <= num_tokens:
        assert cut == text
    else:
        # At most the pieces of one character are missing.
        assert length(text[: len(cut) + 1]) >= min(num_tokens, length(cut) + 1)


def test_whole_tokens_are_kept() -> None:
    tokenizer = tokenizer_of(byte_level)
    text = "The mill stands by the river. " * 50
    token_ids = tokenizer.encode(text, False)
    cut = first_tokens(tokenizer, text, 40)
    assert tokenizer.encode(cut, False) == token_ids[:40]
