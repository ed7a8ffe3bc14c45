"""Sampling options through the engine: in a batch, preempted, resumed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import save_llama
from tests.engine.conftest import MakeEngine
from tests.engine.support import drain, last_by_request, prompt, request, tokens_by_request

OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.4, "temperature": 0.9, "typical_p": 0.7},
    {"logit_bias": {5: 6.0, 17: -100.0}, "temperature": 1.0, "top_p": 0.8},
    {"min_tokens": 20, "eos_token_ids": tuple(range(0, 199, 2))},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "presence_penalty": -0.5},
    {"temperature": 1.0},
    {},
]


def options_requests() -> list[EngineRequest]:
    return [
        request(f"r{i}", prompt(i, 20 + 3 * i), max_tokens=30, seed=i, **options)
        for i, options in enumerate(OPTIONS)
    ]


@pytest.fixture
def alone(make_engine: MakeEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    engine = make_engine()
    for item in options_requests():
        engine.add(item)
        tokens |= tokens_by_request(drain(engine))
    return tokens


def test_company_and_preemption_change_nothing(
    make_engine: MakeEngine, alone: dict[str, list[int]]
) -> None:
    engine = make_engine(num_blocks=14, max_batch_tokens=40)
    for item in options_requests():
        engine.add(item)
    assert tokens_by_request(drain(engine)) == alone
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("num_delivered", [1, 4])
def test_a_resumed_request_is_penalised_as_an_undisturbed_one(
    make_engine: MakeEngine, alone: dict[str, list[int]], num_delivered: int
) -> None:
    engine = make_engine()
    for item in options_requests():
        delivered = tuple(alone[item.request_id][:num_delivered])
        engine.add(msgspec.structs.replace(item, output_token_ids=delivered))
    tokens = tokens_by_request(drain(engine))
    assert tokens == {name: all_of[num_delivered:] for name, all_of in alone.items()}


def test_nothing_ends_before_min_tokens(alone: dict[str, list[int]]) -> None:
    tokens = alone["r5"]
    assert len(tokens) >= 20
    assert all(token % 2 for token in tokens[:20])


def test_a_frequency_penalty_ends_a_loop(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("loops", [1, 2, 3], max_tokens=60, logit_bias={7: 100.0}))
    engine.add(
        request("varies", [1, 2, 3], max_tokens=60, logit_bias={7: 9.0}, frequency_penalty=2.0)
    )
    tokens = tokens_by_request(drain(engine))
    assert tokens["loops"] == [7] * 60
    assert 0 < tokens["varies"].count(7) < 60


def test_choices_of_a_request_are_penalised_each_for_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    item = request("r", prompt(1, 20), temperature=1.0, seed=3, n=3, presence_penalty=2.0)
    engine.add(item)
    outputs = drain(engine)
    first = [t for o in outputs if o.choice == 0 for t in o.token_ids]
    engine.add(msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, n=1)))
    assert tokens_by_request(drain(engine))["r"] == first


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5}, {"logprobs": 3}])
def test_nothing_but_allowed_tokens_comes(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine()
    allowed = (150, 7, 31)
    ends = {"eos_token_ids": (2,), "allowed_token_ids": allowed}
    engine.add(request("few", prompt(1, 20), max_tokens=40, seed=1, **ends, **options))
    engine.add(request("one", prompt(2, 9), max_tokens=5, allowed_token_ids=(9,), **options))
    engine.add(
        request("stop", prompt(3, 9), max_tokens=5, stop_token_ids=(9,), allowed_token_ids=(9,))
    )
    engine.add(
        request("none", prompt(4, 9), min_tokens=2, stop_token_ids=(9,), allowed_token_ids=(9,))
    )
    outputs = drain(engine)
    tokens = tokens_by_request(outputs)
    assert len(tokens["few"]) == 40
    assert set(tokens["few"]) <= set(allowed)
    assert (tokens["one"], tokens["stop"]) == ([9] * 5, [9])
    refused = last_by_request(outputs)["none"].error
    assert refused is not None
    assert refused[0] == "no_token_allowed"


def test_options_that_cannot_be_honoured_are_answered(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("bias", [1], logit_bias={199: 1.0}))
    engine.add(request("allowed", [1], allowed_token_ids=(3, 199)))
    engine.add(request("words", [1], bad_words=("x",)))
    engine.add(request("good", [1], max_tokens=2))
    last = last_by_request(drain(engine))
    assert {name: output.error and output.error[0] for name, output in last.items()} == {
        "bias": "invalid_parameter",
        "allowed": "invalid_parameter",
        "words": "invalid_parameter",
        "good": None,
    }


def test_bad_words_use_the_tokenizer_of_the_checkpoint(tmp_path: Path) -> None:
    save_llama(tmp_path)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(199)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    engine = Engine.load(tmp_path, EngineConfig(num_blocks=64, device="cpu"))
    token_ids = prompt(3, 20)
    engine.add(request("free", token_ids))
    free = tokens_by_request(drain(engine))["free"]
    pair = f"w{free[4]} w{free[5]}"
    engine.add(request("pair", token_ids, bad_words=(pair,)))
    engine.add(request("one", token_ids, bad_words=(f"w{free[2]}",)))
    tokens = tokens_by_request(drain(engine))
    assert tokens["pair"][:5] == free[:5]
    assert tokens["pair"][5] != free[5]
    assert tokens["one"][:2] == free[:2]
    assert free[2] not in tokens["one"]
