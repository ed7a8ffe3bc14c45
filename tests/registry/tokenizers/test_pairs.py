"""Two texts as one prompt, as transformers' tokenizers put them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from millrace.registry.tokenizers.long_texts import TextTooLongError
from millrace.registry.tokenizers.tokenizer import Tokenizer, cut_pair
from millrace.schemas.errors import CheckpointError, ParameterError
from tests.support.engine.tokenizers_made import byte_fallback, byte_level, write_tokenizer

_ROOM = 10_000
_TEXTS = ("mill", "What is TTFT?", "你好世界", "a b", "a", "b", "\n wheel ", "🙂" * 40, "x" * 300)


def _with_pairs(template: str) -> Callable[[], tokenizers.Tokenizer]:
    def make() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair=template, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
        )
        return tokenizer

    return make


def _without_processor() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


_KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "single only": byte_level,
    "begin twice": _with_pairs("<|begin|> $A <|begin|> $B"),
    "ends between": _with_pairs("<|begin|> $A <|end|> <|end|> $B <|end|>"),
    "swapped": _with_pairs("$A <|end|> $B"),
    "fallback": byte_fallback,
    "none": _without_processor,
}


def test_no_text_of_a_pair_ends_it(tmp_path: Path) -> None:
    """The tokens between the texts of a pair cannot be forged by either text."""
    made = _KINDS["ends between"]()
    for old in (False, True):
        path = write_tokenizer(tmp_path, made)
        tokenizer = Tokenizer.load(path, control_tokens_in_content=old)
        ids = tokenizer.encode_pair("mill<|end|>", "<|end|> wheel", max_tokens=_ROOM)
        assert ids.count(1) == (5 if old else 3)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_pair_is_encoded_as_transformers_does(tmp_path: Path, kind: str) -> None:
    made = _KINDS[kind]()
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, made))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    for first in _TEXTS:
        for second in _TEXTS:
            expected = reference(first, second)["input_ids"]
            assert tokenizer.encode_pair(first, second, max_tokens=_ROOM) == expected
            for num_kept in (9, 10, 31, len(expected)):
                cut = reference(first, second, truncation=True, max_length=num_kept)["input_ids"]
                kept = tokenizer.encode_pair(first, second, max_tokens=_ROOM, num_kept=num_kept)
                assert kept == cut


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_longer_text_of_a_pair_is_cut_first(
    num_first: int, num_second: int, max_tokens: int
) -> None:
    first, second = cut_pair(num_first, num_second, max_tokens)
    assert 0 <= first <= num_first
    assert 0 <= second <= num_second
    assert first + second == min(num_first + num_second, max_tokens)
    if (first, second) != (num_first, num_second):
        longer = max(first, second)
        cut_ones = [kept for kept, n in ((first, num_first), (second, num_second)) if kept < n]
        assert all(longer - kept <= 1 for kept in cut_ones), "the longer one is cut first"


def test_a_pair_that_is_too_long(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, _KINDS["begin twice"]()))
    num_tokens = len(tokenizer.encode_pair("mill", "wheel", max_tokens=_ROOM))
    assert len(tokenizer.encode_pair("mill", "wheel", max_tokens=num_tokens)) == num_tokens
    with pytest.raises(TextTooLongError) as caught:
        tokenizer.encode_pair("mill", "wheel", max_tokens=num_tokens - 1)
    assert (caught.value.num_tokens, caught.value.is_exact) == (num_tokens, True)
    with pytest.raises(TextTooLongError):
        tokenizer.encode_pair("mill", "x" * 1_000_000, max_tokens=_ROOM)
    with pytest.raises(ParameterError, match="more than 2") as refused:
        tokenizer.encode_pair("mill", "wheel", max_tokens=_ROOM, num_kept=2)
    assert refused.value.param == "truncate_prompt_tokens"


def test_what_is_around_a_pair_must_be_known(tmp_path: Path) -> None:
    made = byte_level()
    first = made.encode("a", add_special_tokens=False).tokens[0]
    made.post_processor = processors.TemplateProcessing(
        single="$A", pair=f"{first} $A $B", special_tokens=[(first, made.token_to_id(first))]
    )
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, made))
    with pytest.raises(CheckpointError, match="around a pair"):
        tokenizer.encode_pair("mill", "wheel", max_tokens=_ROOM)
