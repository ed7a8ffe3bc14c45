"""The random checkpoint runs in the engine, and every token of its answers is text."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LLAMA_100M, LlamaShape, write_llama
from benchmarks.support.closed_loop import run_closed_loop
from benchmarks.support.prompts import distinct_prompts
from millrace.engine.models.loader import num_parameters
from millrace.engine.step.engine import Engine
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.config import EngineConfig

SMALL = LlamaShape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    vocab_size=1024,
    context_window_tokens=512,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), SMALL)


def test_one_seed_makes_one_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    again, other = write_llama(tmp_path / "a", SMALL), write_llama(tmp_path / "b", SMALL, seed=1)
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_the_default_is_the_model_of_the_comparisons(tmp_path: Path) -> None:
    config = read_model_config(write_llama(tmp_path, LLAMA_100M._replace(num_layers=1)))
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (768, 2048, 8192)
    assert (config.num_attention_heads, config.num_key_value_heads) == (12, 4)
    assert num_parameters(config) == 2 * 8192 * 768 + 2 * 768 * 1024 + 3 * 768 * 2048


def test_a_vocabulary_that_the_tokenizer_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        write_llama(tmp_path, SMALL._replace(vocab_size=FIRST_TEXT_TOKEN))


def test_tokens_of_text_are_two_printable_characters(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    texts = [tokenizer.decode([token]) for token in range(FIRST_TEXT_TOKEN, SMALL.vocab_size)]
    assert all(len(text) == 2 and text.isprintable() for text in texts)
    assert len(set(texts)) == len(texts)
    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.parametrize("tied", [False, True])
def test_a_closed_loop_times_every_token_of_every_request(tmp_path: Path, tied: bool) -> None:
    path = write_llama(tmp_path, SMALL._replace(tied=tied))
    engine = Engine.load(path, EngineConfig(device="cpu", num_blocks=128, max_num_sequences=3))
    prompts = distinct_prompts(7, 20, SMALL.vocab_size, 1)
    lengths = [1, 2, 3, 4, 5, 6, 7]
    running: list[int] = []
    times = run_closed_loop(
        engine, prompts, lengths, 3, lambda engine: running.append(engine.stats().num_running)
    )
    assert [request.num_tokens for request in times] == lengths
    assert all(list(r.parts_s) == sorted(r.parts_s) and r.sent_s < r.parts_s[0] for r in times)
    assert max(running) <= 3
    assert not engine.has_work
    engine.check_integrity()
