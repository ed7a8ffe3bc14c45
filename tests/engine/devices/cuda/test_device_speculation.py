"""Proposed tokens on a device: no proposal and no recorded step changes a token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.step.engine import Engine, checkpoint_tokenizer
from millrace.engine.step.executor import Executor
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.engine.checkpoints import save_llama
from tests.engine.devices.cuda.late_device import LateDevice
from tests.engine.devices.cuda.test_device_runner import make_runner
from tests.engine.speculation.worlds import VOCAB_SIZE, Answers, Guesses, run
from tests.engine.support import drain, prompt, request, resolved
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["big", "small"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_FEW = tuple(range(20, 26))
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"n": 3, "temperature": 1.2},
    {"stop_token_ids": tuple(range(100, 160)), "temperature": 1.0},
    {"presence_penalty": 0.5, "logit_bias": {7: 4.0}, "min_tokens": 5},
    {"grammar": Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_SCHEMA))},
    {"temperature": 0.7, "allowed_token_ids": _FEW, "n": 2},
    {"prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device")
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    save_llama(path, num_hidden_layers=2, bos_token_id=0, eos_token_id=1, **shape, **heads)
    return write_tokenizer(path, byte_level())


def load(path: Path, speculation: str | None, **settings: Any) -> Engine:
    given: dict[str, Any] = {"deterministic": True, "block_size_tokens": 4}
    given |= {"speculation": speculation} | settings
    runner = make_runner(path, LateDevice(), **given)
    config = resolved(path, **{"kernels": "reference"} | given)
    engine = Engine(runner, config, tokenizer=checkpoint_tokenizer(path))
    engine._grammars.prepare()
    return engine


def _load(number: int) -> list[EngineRequest]:
    """Return one request of each kind; some prompts have the same beginning."""
    return [
        request(
            f"r{index}",
            [*prompt(number + index % 2, 9, 400), *prompt(index, 5 + index, 400)],
            max_tokens=14,
            seed=index,
            **({"temperature": 0.0} | options),
        )
        for index, options in enumerate(_OPTIONS)
    ]


@pytest.fixture(scope="module")
def known(checkpoint: Path) -> Answers:
    return run(load(checkpoint, "off"), _load(0))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"cuda_graphs": False, "max_num_sequences": 5},
        {"num_blocks": 28, "max_batch_tokens": 24},
        {"num_blocks": 24, "prefix_cache": False, "host_cache_bytes": 0},
    ],
)
def test_no_token_changes(
    checkpoint: Path, known: Answers, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    Guesses(known, 2, 0.8, most=3).into(monkeypatch)
    # A launch that fails is tried again in parts, without proposals: the tokens would be the same.
    monkeypatch.setattr(Executor, "_bisect", lambda *_: pytest.fail("a step with proposals failed"))
    gaps = [random.Random(3).randrange(3) for _ in _OPTIONS]
    engine = load(checkpoint, "ngram", **settings)
    assert run(engine, _load(0), gaps) == known
    stats = engine.stats()
    assert stats.accepted_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("logprobs", [None, 2])
def test_repeated_tokens_are_proposed_while_steps_overlap(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """The speculator itself proposes tokens, except for requests with log-probabilities, which
    device and host compute differently."""
    # A small model's steps take as long as Python does: nothing would ever be worth its row.
    monkeypatch.setattr(CostModel, "is_warm", property(lambda _: False))
    asked = [
        request(
            f"r{i}",
            [*prompt(i, 8, 400)] * 4,
            max_tokens=60,
            temperature=0.0,
            logprobs=logprobs,
        )
        for i in range(2)
    ]
    engine = load(checkpoint, "ngram")
    assert run(engine, asked) == run(load(checkpoint, "off"), asked)
    assert (engine.stats().proposed_tokens > 0) == (logprobs is None)


def test_request_cancelled_among_proposals_leaves_nothing(
    checkpoint: Path, known: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    Guesses(known, 5, 0.9, most=3).into(monkeypatch)
    engine = load(checkpoint, "ngram")
    for one in _load(0)[:4]:
        engine.add(one)
    for _ in range(4):
        engine.step()
    engine.cancel("r0")
    drain(engine)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"deterministic": False, "speculation": "ngram"}, "with engine.deterministic"),
        ({"speculation": "draft=/tmp/none"}, "choose ngram on a GPU"),
        ({"speculation": "eagle3=/tmp/none"}, "choose ngram on a GPU"),
    ],
)
def test_unsupported_speculation_on_a_device_is_refused(
    checkpoint: Path, settings: dict[str, Any], says: str
) -> None:
    given: dict[str, Any] = {"deterministic": True, "kernels": "reference", "num_blocks": 32}
    given |= settings
    with pytest.raises(ConfigError, match=says):
        Engine.load(checkpoint, EngineConfig(**given))


def test_speculation_on_a_device_is_off_by_default(checkpoint: Path) -> None:
    asked = [request("r", [*prompt(1, 8, 400)] * 4, max_tokens=40, temperature=0.0)]
    engine = load(checkpoint, None)
    run(engine, asked)
    assert engine.stats().proposed_tokens == 0
