"""Text offsets of tokens, for every kind of vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.gateway.rendering.tokens import TextOffsets
from tests.registry.test_detokenizer import KINDS, TEXTS, made


def character_at(text: str, num_bytes: int) -> int:
    """The character that has the byte behind so many, or the text's length."""
    length = 0
    for at, character in enumerate(text):
        length += len(character.encode())
        if length > num_bytes:
            return at
    return len(text)


@KINDS
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_each_token_begins_at_the_character_of_its_first_byte(kind: str, text: str) -> None:
    tokenizer, _ = made(kind)
    ids = tokenizer.encode(text)
    whole, num_bytes, expected, is_first = tokenizer.decode(ids), 0, [], True
    for token_id in ids:
        expected.append(character_at(whole, num_bytes))
        if token_id not in tokenizer.special_token_ids:
            # The first word of a text may lose the space before it.
            raw = tokenizer.token_bytes(token_id)
            num_bytes += len(tokenizer.first_token_bytes(token_id) if is_first else raw)
            is_first = is_first and not raw
    assert list(TextOffsets(tokenizer).push_all(ids)) == expected


@KINDS
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, num_prompt=st.integers(1, 6))
def test_an_answer_goes_on_where_its_prompt_ends(kind: str, text: str, num_prompt: int) -> None:
    tokenizer, _ = made(kind)
    ids = tokenizer.encode(text)
    prompt = tokenizer.decode(ids[:num_prompt])
    if prompt.endswith("\ufffd"):
        return  # it ends within a character
    offsets = TextOffsets(tokenizer, ids[:num_prompt], start=len(prompt))
    whole = TextOffsets(tokenizer).push_all(ids)
    assert offsets.push_all(ids[num_prompt:]) == whole[num_prompt:]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("prompt", ["", "Say it", "\u4f60\u597d", "a "])
def test_a_prompt_in_text_is_one_in_tokens(kind: str, prompt: str) -> None:
    tokenizer, _ = made(kind)
    answer = tokenizer.encode("so it is", add_special_tokens=False)
    ids = tokenizer.encode(prompt)
    expected = TextOffsets(tokenizer, ids).push_all(answer)
    assert TextOffsets(tokenizer, prompt).push_all(answer) == expected


def test_tokens_without_text_begin_where_the_next_text_does() -> None:
    tokenizer, _ = made("byte_level")
    (special, *_) = tokenizer.special_token_ids
    a, b = (tokenizer.encode(one, add_special_tokens=False)[0] for one in "ab")
    ids = [a, special, b, special, a]
    assert TextOffsets(tokenizer).push_all(ids) == (0, 1, 1, 2, 2)
    size = len(tokenizer.token_bytes(special).decode())
    shown = TextOffsets(tokenizer, skip_special_tokens=False).push_all(ids)
    assert shown == (0, 1, 1 + size, 2 + size, 2 + 2 * size)
    assert TextOffsets(tokenizer, silent=frozenset({b})).push_all([a, b, a]) == (0, 1, 1)
