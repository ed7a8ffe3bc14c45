"""Incremental tokenizer: token ids of a text in pieces spell that text, for every kind of
vocabulary."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.registry.tokenizers.detokenizer import IncrementalDetokenizer
from millrace.registry.tokenizers.incremental import (
    MAX_HELD_CHARACTERS,
    IncrementalTokenizer,
    UnspelledTextError,
)
from millrace.registry.tokenizers.text_rules import GPT_2, LLAMA_3, QWEN_2
from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.support.engine.tokenizers_made import (
    byte_fallback,
    byte_level,
    metaspace,
    write_tokenizer,
)

_MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
_KINDS = pytest.mark.parametrize("kind", list(_MAKERS))
_WORDS = [
    *(
        "the",
        " mill",
        " stream",
        "'",
        "'re",
        "'ll",
        " ",
        "  ",
        "\n",
        " \n",
        "\r\n",
        "\t",
        "12",
        "7",
    ),
    *(
        "naïve",
        "你好",
        "、",
        "こんにちは",
        "👩‍👩‍👧",
        "\u0301",
        "�",
        "▁",
        "<",
        "|",
        ".",
        "a b",
        "工具",
    ),
    *("<|end|>", "<|user|>", "</s>", "<s>", "<tool>", "<0x41>", "x" * 40, "print('", "():"),
]
_PIECES = st.lists(
    st.one_of(st.sampled_from(_WORDS), st.text(st.characters(exclude_categories=["Cs"]))),
    max_size=20,
)
_LAST = {"byte_level": "<|end|>", "byte_fallback": "</s>"}


@cache
def _made(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(
            write_tokenizer(Path(folder), _MAKERS[kind](), eos=_LAST[kind]),
        )


def _ids_of(tokenizer: Tokenizer, pieces: list[str], before: list[int]) -> list[int]:
    incremental = IncrementalTokenizer(tokenizer, before)
    ids = [token_id for piece in pieces for token_id in incremental.push(piece)]
    return ids + incremental.flush()


@_KINDS
@pytest.mark.parametrize("before", ["", "The stream", "a "])
@settings(max_examples=60, deadline=None)
@given(pieces=_PIECES)
def test_emitted_tokens_spell_the_text(kind: str, before: str, pieces: list[str]) -> None:
    tokenizer = _made(kind)
    prompt = tokenizer.encode(before)
    ids = _ids_of(tokenizer, pieces, prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    text = "".join(detokenizer.push(token_id) for token_id in ids)
    assert text + detokenizer.flush() == "".join(pieces)
    assert tokenizer.silent_token_ids.isdisjoint(ids)


@_KINDS
@settings(max_examples=100, deadline=None)
@given(pieces=_PIECES, at=st.integers(0, 20))
def test_tokenizer_resumes_behind_the_tokens_of_another(
    kind: str, pieces: list[str], at: int
) -> None:
    tokenizer = _made(kind)
    first = IncrementalTokenizer(tokenizer)
    given_ids = [token_id for piece in pieces[:at] for token_id in first.push(piece)]
    start = IncrementalDetokenizer(tokenizer)
    told = "".join(start.push(token_id) for token_id in given_ids)
    rest = "".join(pieces)[len(told) :]
    ids = given_ids + _ids_of(tokenizer, [rest], given_ids)
    assert tokenizer.decode(ids) == "".join(pieces)


@cache
def _with_known_rules(pattern: str) -> Tokenizer:
    """Return a tokenizer that splits by a well-known pattern, without added tokens."""
    trained = byte_level()
    backend = tokenizers.Tokenizer(trained.model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = trained.decoder
    with TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write_tokenizer(Path(folder), backend))
    assert tokenizer.rules.cut is not None
    return tokenizer


@pytest.mark.parametrize("pattern", [GPT_2, LLAMA_3, QWEN_2])
@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [word for word in _WORDS if len(word) < 12 and "|" not in word]
            + ["don", "t ", "I", "ve", " and", "\n\n", " \t", "3.14"]
        ),
        max_size=24,
    )
)
@example(pieces=["  ", "3.14"])
@example(pieces=["  "] * 9 + ["and"])
def test_ids_by_known_rules_are_those_of_the_whole_text(pattern: str, pieces: list[str]) -> None:
    tokenizer = _with_known_rules(pattern)
    text = "".join(pieces)
    assert tokenizer.rules.cut is not None
    cuts = [0, *(found.end() for found in tokenizer.rules.cut.finditer(text)), len(text)]
    longest = max(end - start for start, end in pairwise(cuts))
    ids = _ids_of(tokenizer, pieces, [])
    assert tokenizer.decode(ids) == text
    if longest <= MAX_HELD_CHARACTERS:
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_words_are_given_as_soon_as_they_are_certain() -> None:
    tokenizer = _with_known_rules(LLAMA_3)
    incremental = IncrementalTokenizer(tokenizer)
    said = [
        tokenizer.decode(incremental.push(piece))
        for piece in ("The", " mill", " st", "ands", " by")
    ]
    assert said == ["", "The", " mill", "", " stands"]
    assert tokenizer.decode(incremental.flush()) == " by"


def test_a_long_word_is_not_held_back() -> None:
    incremental = IncrementalTokenizer(_made("byte_level"))
    assert [bool(incremental.push("aaaa")) for _ in range(5)] == [False, False, False, False, True]


@pytest.mark.parametrize("before", [[], [5]])
def test_a_vocabulary_without_bytes_spells_what_it_has_words_for(
    tmp_path: Path, before: list[int]
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, metaspace(), eos="</s>"))
    incremental = IncrementalTokenizer(tokenizer, before)
    ids = [*incremental.push("the mill the"), *incremental.push(" mill"), *incremental.flush()]
    assert tokenizer.decode([*before, *ids]).endswith("the mill the mill")
    for text in ("\N{PILE OF POO}", "the \ufffd", "\x00"):
        incremental = IncrementalTokenizer(tokenizer, before)
        with pytest.raises(UnspelledTextError, match="has no tokens"):
            assert incremental.push(text) + incremental.flush()
