"""Long texts: in pieces with the same tokens, and refused before they are tokenised."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.long_texts import TextTooLongError
from millrace.registry.tokenizers.text_rules import TextRules
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import ContextLengthError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.sampling import SamplingParams
from tests.support.engine.tokenizers_made import (
    TEXTS,
    byte_fallback,
    byte_level,
    metaspace,
    write_tokenizer,
)

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
_ODDITIES = (
    "'s",
    "  ",
    "\n\n",
    "\r\n",
    " \t",
    "1234567",
    "...",
    "e\u0301",
    "。",
    "\uff0c",
    "<|end|>",
    "▁",
    "",
)


def split(pattern: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits words as Llama 3 and Qwen do, with a special token that ends
    in letters."""
    made = plain()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.normalizer = normalizers.NFC()
    return made


def plain() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer without tokens that contain a space."""
    made = byte_level()
    spec = made.to_str().replace('"content":"a b"', '"content":"a_b"').replace('"a b"', '"a_b"')
    return tokenizers.Tokenizer.from_str(spec)


def long_text(seed: int, num_characters: int = 60_000) -> str:
    """Draw words of all kinds, and separators."""
    draw = random.Random(seed)
    words = [word for text in TEXTS for word in text.split()]
    parts: list[str] = []
    while sum(map(len, parts[-50:])) == 0 or sum(map(len, parts)) < num_characters:
        parts += [
            draw.choice(words) + draw.choice(("", " ", " ", "\n", draw.choice(_ODDITIES)))
            for _ in range(500)
        ]
    return "".join(parts)


@pytest.mark.parametrize("made", [plain(), split(LLAMA_3), split(QWEN)])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_have_the_tokens_of_the_whole(
    tmp_path: Path, made: tokenizers.Tokenizer, seed: int
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, made))
    text = long_text(seed)
    assert len(list(tokenizer.rules.pieces(text, 64))) > 100, "it was not cut"
    for adds in (True, False):
        assert tokenizer.encode(text, adds) == made.encode(text, add_special_tokens=adds).ids
    small = [
        token_id
        for piece in tokenizer.rules.pieces(text, 64)
        for token_id in tokenizer.encode(piece, add_special_tokens=False)
    ]
    assert small == made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("made", [byte_level(), byte_fallback(), metaspace()])
def test_what_may_join_tokens_across_words_is_not_cut(
    tmp_path: Path, made: tokenizers.Tokenizer
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, made))
    text = long_text(1, 20_000)
    assert list(tokenizer.rules.pieces(text, 64)) == [text]
    assert tokenizer.encode(text) == made.encode(text).ids


@pytest.mark.parametrize("made", [plain(), split(QWEN), byte_level(), byte_fallback()])
@pytest.mark.parametrize("text", [long_text(3), " " * 5_000, "▁" * 5_000, "e\u0301" * 999, "\x00"])
def test_a_text_has_at_least_as_many_tokens_as_the_rule_says(
    tmp_path: Path, made: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, made))
    assert tokenizer.rules.longest_token_bytes is not None
    assert 0 < tokenizer.rules.least_tokens(text) <= len(tokenizer.encode(text))


def test_nothing_is_said_of_tokenizers_that_drop_text(tmp_path: Path) -> None:
    stripped, spaced = plain(), plain()
    stripped.normalizer = normalizers.Strip()
    spaced.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    removing = plain()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for made in (stripped, spaced, removing, metaspace()):
        assert Tokenizer.load(write_tokenizer(tmp_path, made)).rules == TextRules()


def test_composition_makes_three_bytes_into_one_at_most() -> None:
    for number in range(0x110000):
        if not unicodedata.decomposition(chr(number)):
            continue
        composed = unicodedata.normalize("NFC", chr(number))
        for form in (chr(number), unicodedata.normalize("NFD", chr(number))):
            assert len(form.encode()) <= 3 * len(composed.encode())


class _Counted:
    """Backend that counts the length of its input text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.num_characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> list[tokenizers.Encoding]:
        self.num_characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


def counted(tokenizer: Tokenizer) -> _Counted:
    backend = _Counted(tokenizer._backend)
    tokenizer._backend = backend  # type: ignore[assignment]
    return backend


@pytest.fixture(scope="module")
def demo() -> ServedModel:
    return ServedModel.load(load_catalogue(""), "demo")


@pytest.mark.parametrize(
    "fields", [{"prompt": "a " * 500_000}, {"messages": (ChatMessage("user", "a " * 500_000),)}]
)
def test_what_cannot_fit_is_refused_without_tokenising_it(
    demo: ServedModel, fields: dict[str, Any]
) -> None:
    backend = counted(demo.tokenizer)
    job = Job(request_id="r", model="demo", sampling=SamplingParams(max_tokens=5), **fields)
    noun = "messages" if "messages" in fields else "prompt"
    with pytest.raises(
        ContextLengthError, match=rf"\(at least [0-9]+ in the {noun}, 5 in the completion\)"
    ):
        demo.prepare(job, random.Random(1))
    assert backend.num_characters == 0


def test_what_does_not_fit_is_refused_at_the_window(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, plain()))
    text = long_text(5, 400_000)
    backend = counted(tokenizer)
    most = tokenizer.rules.least_tokens(text) + 1
    with pytest.raises(TextTooLongError) as refused:
        tokenizer.encode(text, max_tokens=most)
    assert most < refused.value.num_tokens < len(text)
    assert not refused.value.is_exact
    assert backend.num_characters < len(text) / 2


@pytest.mark.parametrize("num_words", [3_000, 100_000])
def test_a_text_of_some_length_is_counted_to_its_end(demo: ServedModel, num_words: int) -> None:
    text = "a " * num_words
    with pytest.raises(TextTooLongError) as refused:
        demo.tokenizer.encode_content(text, max_tokens=9)
    found = refused.value
    assert (found.num_tokens, found.is_exact) == (len(demo.tokenizer.encode_content(text)), True)


def test_token_ids_that_do_not_fit_are_refused_by_their_number(demo: ServedModel) -> None:
    window_tokens = demo.context_window_tokens
    job = Job(request_id="r", model="demo", prompt_token_ids=(5,) * (window_tokens + 1))
    with pytest.raises(ContextLengthError, match=f"resulted in {window_tokens + 1} tokens"):
        demo.prepare(job, random.Random(1))
