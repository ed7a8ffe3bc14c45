"""Tokenizers from files, and their ends of a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import decoders

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import CheckpointError, ParameterError
from millrace.schemas.jobs import ChatMessage
from tests.support.engine.tokenizers_made import CHAT_TEMPLATE, byte_level, write_tokenizer


def test_special_tokens_around_a_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level()))
    bare = tokenizer.encode("mill", add_special_tokens=False)
    assert tokenizer.encode("mill") == [0, *bare]
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    assert tokenizer.special_token_ids >= {0, 1}


def test_a_chat_is_encoded_with_the_template_s_own_special_tokens(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, byte_level(), chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode_chat([ChatMessage("user", "mill")])
    bare = tokenizer.encode("mill", add_special_tokens=False)
    assert ids == [3, *bare, 1, 4]
    told = tokenizer.encode_chat([ChatMessage("user", "mill")], add_generation_prompt=False)
    assert told == [3, *bare, 1]


def test_tokens_are_spelled_as_the_file_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level()))
    ids = tokenizer.encode(" mill", add_special_tokens=False)
    assert "".join(map(tokenizer.spelling, ids)) == "Ġmill"
    assert tokenizer.spelling(tokenizer.vocab_size) == ""


def test_without_a_template_prompts_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level()))
    with pytest.raises(ParameterError, match="prompts only") as caught:
        tokenizer.encode_chat([ChatMessage("user", "mill")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("generation", "config", "eos", "expected"),
    [
        (None, None, "<|end|>", (1,)),
        (None, 3, "<|end|>", (3, 1)),
        ([4, 1], 3, "<|end|>", (4, 1)),
        (4, 3, "no such token", (4,)),
    ],
)
def test_eos_from_each_file(
    tmp_path: Path,
    generation: int | list[int] | None,
    config: int | None,
    eos: str,
    expected: tuple[int, ...],
) -> None:
    write_tokenizer(tmp_path, byte_level(), eos=eos)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_special_tokens_of_older_checkpoints(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").unlink()
    tokens = {"eos_token": {"content": "<|end|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert Tokenizer.load(tmp_path).eos_token_ids == (1,)


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_needs_more_than_each_token_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="decoder CTC is not supported; supported are Byte"):
        Tokenizer.load(write_tokenizer(tmp_path, backend))


def test_text_that_is_no_unicode_is_the_caller_s_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level()))
    with pytest.raises(ParameterError, match="Unicode"):
        tokenizer.encode("\ud800")


def test_truncation_that_was_saved_by_training_is_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend))
    assert len(tokenizer.encode("the stream onto a mill wheel " * 5)) > 8
    assert len(tokenizer.encode("a")) < 4
