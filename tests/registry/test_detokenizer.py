"""Streaming text equals decoding at once, for every kind of vocabulary, text and garbage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.registry.tokenizers.detokenizer import IncrementalDetokenizer
from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.support.engine.tokenizers_made import (
    byte_fallback,
    byte_level,
    metaspace,
    write_tokenizer,
)

MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
KINDS = pytest.mark.parametrize("kind", list(MAKERS))
EXOTIC = ["👩‍👩‍👧", "👍🏽", "é", "你好", "ก็", "\u200d", "�", "🇩🇪", " ", "\n", "à́"]
# Lone surrogates are no text: no UTF-8 holds them.
TEXTS = st.lists(
    st.one_of(st.sampled_from(EXOTIC), st.text(st.characters(exclude_categories=["Cs"]))),
    max_size=12,
).map("".join)
IDS = st.lists(st.integers(0, 720), max_size=40)


@cache
def made(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    backend = MAKERS[kind]()
    with TemporaryDirectory() as folder:
        path = write_tokenizer(Path(folder), backend, eos="</s>")
        return Tokenizer.load(path), backend


def streamed(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = ()
) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [detokenizer.push(i) for i in token_ids], detokenizer.flush()


@KINDS
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_text_streams_as_it_decodes(kind: str, text: str) -> None:
    tokenizer, backend = made(kind)
    ids = tokenizer.encode(text)
    parts, rest = streamed(tokenizer, ids)
    assert "".join(parts) + rest == tokenizer.decode(ids) == backend.decode(ids)
    # Valid text never shows a replacement character that is not in it.
    assert sum(part.count("�") for part in parts) == tokenizer.decode(ids).count("�")
    assert rest == ""


@KINDS
@settings(max_examples=100, deadline=None)
@given(ids=IDS)
def test_garbage_streams_as_it_decodes(kind: str, ids: list[int]) -> None:
    tokenizer, _ = made(kind)
    parts, rest = streamed(tokenizer, ids)
    assert "".join(parts) + rest == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100, deadline=None)
@given(ids=IDS)
def test_decoding_is_the_library_s(kind: str, skip: bool, ids: list[int]) -> None:
    tokenizer, backend = made(kind)
    assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(3, 258), st.integers(0, 720)), max_size=40))
def test_broken_bytes_never_spoil_their_neighbours(ids: list[int]) -> None:
    """The library turns a whole run of byte tokens into U+FFFD if one of them is broken, which a
    stream cannot know in advance; elsewhere the two agree to the character."""
    tokenizer, backend = made("byte_fallback")
    text, theirs = tokenizer.decode(ids), backend.decode(ids)
    if "�" not in theirs:
        assert text == theirs
    kept = iter(text)
    assert all(char in kept for char in theirs if char != "�")


@KINDS
@settings(max_examples=100, deadline=None)
@given(prompt=IDS, ids=IDS)
def test_after_a_prompt_the_text_goes_on(kind: str, prompt: list[int], ids: list[int]) -> None:
    tokenizer, _ = made(kind)
    before = IncrementalDetokenizer(tokenizer)
    certain = "".join(before.push(i) for i in prompt)
    parts, rest = streamed(tokenizer, ids, prompt)
    assert certain + "".join(parts) + rest == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_comes_with_its_last_byte(kind: str) -> None:
    tokenizer, _ = made(kind)
    ids = tokenizer.encode("🧿", add_special_tokens=False)
    assert len(ids) >= 3
    parts, rest = streamed(tokenizer, ids)
    assert [part for part in parts if part] == ["🧿"]
    assert parts[-1] == "🧿"
    assert rest == ""


def test_a_character_cut_off_is_shown_at_the_end() -> None:
    tokenizer, _ = made("byte_level")
    ids = tokenizer.encode("🧿", add_special_tokens=False)[:-1]
    assert streamed(tokenizer, ids) == ([""] * len(ids), "�")


def test_first_word_has_no_space_but_after_a_prompt_it_has() -> None:
    tokenizer, _ = made("byte_fallback")
    mill = tokenizer.encode("mill", add_special_tokens=False)
    bos = tokenizer.encode("")
    assert len(bos) == 1
    assert "".join(streamed(tokenizer, mill)[0]) == "mill"
    assert "".join(streamed(tokenizer, mill, bos)[0]) == "mill"
    assert "".join(streamed(tokenizer, mill, [*bos, *mill])[0]) == " mill"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer, _ = made("byte_level")
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(1) == ""
    assert shown.push(1) == "<|end|>"
    assert tokenizer.token_bytes(1) == b"<|end|>"


def test_ids_beyond_the_vocabulary_add_nothing() -> None:
    tokenizer, _ = made("byte_level")
    assert IncrementalDetokenizer(tokenizer).push(tokenizer.vocab_size) == ""
    assert IncrementalDetokenizer(tokenizer).push(-1) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_a_push_costs_the_same_after_any_history() -> None:
    """The test counts instead of timing: no push looks at more than the bytes of an unfinished
    character."""
    tokenizer, _ = made("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in tokenizer.encode("mill wheel 你好 " * 500):
        detokenizer.push(token_id)
        assert len(detokenizer._decoder.getstate()[0]) <= 3
