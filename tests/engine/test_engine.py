"""Engine as its callers see it: answers, equality of answers, errors, cancellation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.frames import FinishReason
from tests.engine.checkpoints import reference_greedy, reference_logits
from tests.engine.conftest import MakeEngine
from tests.engine.support import (
    drain,
    embedding_of,
    last_by_request,
    prompt,
    request,
    tokens_by_request,
)

RUNNERS = ("host", "device")

MIXED: list[EngineRequest] = [
    request(
        f"r{i}",
        prompt(i, 5 + 17 * i % 90),
        max_tokens=8 + i,
        temperature=(0.0, 0.8, 1.0, 1.3)[i % 4],
        top_p=(1.0, 0.9)[i % 2],
        top_k=(0, 0, 20)[i % 3],
        min_p=(0.0, 0.0, 0.0, 0.0, 0.02)[i % 5],
        seed=1000 + i,
        ignore_eos=True,
    )
    for i in range(12)
]


@pytest.fixture(scope="module")
def alone(llama: tuple[Path, Any]) -> dict[str, list[int]]:
    """Return the tokens of each request of ``MIXED``, run by itself."""
    tokens: dict[str, list[int]] = {}
    engine = Engine.load(llama[0], EngineConfig(num_blocks=128, device="cpu"))
    for item in MIXED:
        engine.add(item)
        tokens |= tokens_by_request(drain(engine))
    return tokens


@pytest.mark.parametrize("max_batch_tokens", [7, 64, 512])
@pytest.mark.parametrize("num_blocks", [128, 13])
def test_tokens_depend_on_neither_company_nor_chunks_nor_preemption(
    make_engine: MakeEngine,
    alone: dict[str, list[int]],
    max_batch_tokens: int,
    num_blocks: int,
) -> None:
    engine = make_engine(max_batch_tokens=max_batch_tokens, num_blocks=num_blocks)
    for item in MIXED:
        engine.add(item)
    assert tokens_by_request(drain(engine)) == alone
    stats = engine.stats()
    assert stats.num_free_blocks == num_blocks
    assert stats.outstanding_tokens == 0
    if num_blocks == 13 and max_batch_tokens > 7:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("num_delivered", [1, 5])
def test_a_resumed_request_goes_on_with_the_same_tokens(
    make_engine: MakeEngine, alone: dict[str, list[int]], index: int, num_delivered: int
) -> None:
    item = MIXED[index]
    tokens = alone[item.request_id]
    engine = make_engine(max_batch_tokens=64)
    engine.add(
        EngineRequest(
            request_id=item.request_id,
            prompt_token_ids=item.prompt_token_ids,
            sampling=item.sampling,
            output_token_ids=tuple(tokens[:num_delivered]),
        )
    )
    outputs = drain(engine)
    assert tokens_by_request(outputs)[item.request_id] == tokens[num_delivered:]
    assert last_by_request(outputs)[item.request_id].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "params", "finish_reason"),
    [
        ((5, 6, 7), {"max_tokens": 3}, FinishReason.LENGTH),
        ((5, 9), {"stop_token_ids": (9,)}, FinishReason.STOP),
        ((5, 2), {"eos_token_ids": (2,)}, FinishReason.STOP),
    ],
)
def test_a_resumed_request_with_nothing_left_ends_at_once(
    make_engine: MakeEngine,
    output: tuple[int, ...],
    params: dict[str, Any],
    finish_reason: FinishReason,
) -> None:
    engine = make_engine()
    engine.add(request("r", [3, 4], output_token_ids=output, **params))
    (last,) = engine.step()
    assert last.finish_reason is finish_reason
    assert last.token_ids == ()
    assert not engine.has_work


def test_stop_tokens_and_eos_end_a_request_and_are_reported(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    token_ids = prompt(40, 20)
    expected = reference_greedy(llama[1], token_ids, 12)
    stop = expected[4]
    upto = expected[: expected.index(stop) + 1]
    engine = make_engine()
    engine.add(request("stop", token_ids, stop_token_ids=(stop,)))
    engine.add(request("eos", token_ids, eos_token_ids=(stop,)))
    engine.add(request("ignored", token_ids, eos_token_ids=(stop,), ignore_eos=True))
    outputs = drain(engine)
    tokens, last = tokens_by_request(outputs), last_by_request(outputs)
    assert tokens == {"stop": upto, "eos": upto, "ignored": expected}
    assert last["stop"].finish_reason is FinishReason.STOP
    assert last["eos"].finish_reason is FinishReason.STOP
    assert last["ignored"].finish_reason is FinishReason.LENGTH


def test_each_request_starts_once_and_comes_token_by_token(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.add(request("long", prompt(1, 40), max_tokens=4))
    engine.add(request("short", prompt(2, 4), max_tokens=4))
    outputs = drain(engine)
    for name in ("long", "short"):
        own = [o for o in outputs if o.request_id == name]
        assert [o.started for o in own] == [True] + [False] * (len(own) - 1)
        assert all(len(o.token_ids) <= 1 for o in own)
    assert outputs[0].request_id == "long"
    assert outputs[0].token_ids == ()


def test_logprobs_are_the_models_own(make_engine: MakeEngine, llama: tuple[Path, Any]) -> None:
    token_ids = prompt(9, 12)
    engine = make_engine()
    engine.add(request("r", token_ids, max_tokens=3, temperature=0.7, seed=4, logprobs=5))
    engine.add(request("chosen", token_ids, max_tokens=1, logprobs=0))
    engine.add(request("none", token_ids, max_tokens=1))
    by_request = {o.request_id: o for o in engine.step()}
    table = reference_logits(llama[1], token_ids)[-1].log_softmax(-1)
    (entry,) = by_request["r"].logprobs
    assert entry.token_id == by_request["r"].token_ids[0]
    assert entry.logprob == pytest.approx(float(table[entry.token_id]), abs=1e-4)
    assert [i for i, _ in entry.top] == table.topk(5).indices.tolist()
    assert by_request["chosen"].logprobs[0].top == ()
    assert by_request["none"].logprobs == ()


def test_request_that_can_never_fit_is_refused_with_numbers(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_blocks=8)
    engine.add(request("pool", prompt(1, 100), max_tokens=60))
    engine.add(request("context", prompt(1, 500), max_tokens=60))
    engine.add(request("vocabulary", [3, 199]))
    engine.add(request("empty", []))
    engine.add(request("fine", prompt(1, 10)))
    outputs = drain(engine)
    last = last_by_request(outputs)
    expected = {
        "pool": ("kv_capacity_exceeded", ("100", "60", "128")),
        "context": ("context_length_exceeded", ("500", "60", "512")),
        "vocabulary": ("invalid_parameter", ("199",)),
        "empty": ("invalid_parameter", ("no tokens",)),
    }
    for name, (code, words) in expected.items():
        error = last[name].error
        assert error is not None
        assert error[0] == code
        assert all(word in error[1] for word in words), error[1]
    assert last["fine"].finish_reason is FinishReason.LENGTH


def test_no_max_tokens_fills_what_there_is(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4)
    engine.add(request("r", prompt(1, 10), max_tokens=None))
    assert len(tokens_by_request(drain(engine))["r"]) == 64 - 10


def test_cancel_in_each_state_frees_its_blocks_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=32, max_num_sequences=1)
    baseline = engine.stats()

    def at_baseline() -> bool:
        engine.check_integrity()
        stats = engine.stats()
        return not engine.has_work and (stats.num_free_blocks, stats.outstanding_tokens) == (
            baseline.num_free_blocks,
            0,
        )

    engine.add(request("waiting", prompt(1, 20)))
    engine.cancel("waiting")
    assert at_baseline()
    engine.add(request("prefilling", prompt(1, 100)))
    engine.step()
    assert engine.stats().num_free_blocks < baseline.num_free_blocks
    engine.cancel("prefilling")
    assert at_baseline()
    engine.add(request("second-chunk", prompt(1, 100)))
    engine.step()
    engine.step()
    engine.cancel("second-chunk")
    assert at_baseline()
    engine.add(request("decoding", prompt(1, 10)))
    engine.step()
    engine.step()
    engine.cancel("decoding")
    assert at_baseline()
    engine.add(request("refused", []))
    engine.cancel("refused")
    assert at_baseline()
    engine.add(request("finished", prompt(1, 10), max_tokens=1))
    engine.step()
    engine.cancel("finished")
    engine.cancel("unknown")
    assert at_baseline()
    assert engine.step() == []


def test_a_cancelled_neighbour_changes_nothing(
    make_engine: MakeEngine, alone: dict[str, list[int]]
) -> None:
    engine = make_engine(max_batch_tokens=64)
    for item in MIXED[:4]:
        engine.add(item)
    outputs = engine.step() + engine.step() + engine.step()
    engine.cancel("r1")
    outputs += drain(engine)
    tokens = tokens_by_request(outputs)
    assert all(tokens[name] == alone[name] for name in ("r0", "r2", "r3"))
    assert "r1" not in last_by_request(outputs)


def test_a_request_with_a_live_id_takes_its_place(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("r", prompt(1, 10)))
    engine.step()
    engine.add(request("r", prompt(2, 10), max_tokens=2))
    outputs = drain(engine)
    assert len(tokens_by_request(outputs)["r"]) == 2
    assert last_by_request(outputs).keys() == {"r"}


def poison(engine: Engine, token: int) -> None:
    """Make the embedding of one token NaN."""
    embedding_of(engine)[token] = float("nan")


@pytest.mark.parametrize("max_batch_tokens", [8, 512])
def test_nan_logits_end_only_their_own_sequence(
    make_engine: MakeEngine, max_batch_tokens: int
) -> None:
    # A token that the others' greedy continuations do not meet.
    clean = make_engine(num_blocks=16)
    good = [request(f"good{i}", [5 + i, 6, 7, 8, 9, 10, 11], max_tokens=20) for i in range(3)]
    for item in good:
        clean.add(item)
    expected = tokens_by_request(drain(clean))
    seen = {token for tokens in expected.values() for token in tokens} | set(range(20))
    bad_token = next(token for token in range(199) if token not in seen)

    engine = make_engine(num_blocks=16, max_batch_tokens=max_batch_tokens)
    poison(engine, bad_token)
    outputs = []
    for round_ in range(2):  # the second round gets the blocks of the first
        engine.add(request(f"bad{round_}", [5, bad_token, 6] * 6))
        engine.add(request(f"cancelled{round_}", [bad_token] * 20))
        outputs += engine.step()
        engine.cancel(f"cancelled{round_}")
    for item in good:
        engine.add(item)
    outputs += drain(engine)
    tokens, last = tokens_by_request(outputs), last_by_request(outputs)
    assert {name: tokens[name] for name in expected} == expected
    for round_ in range(2):
        error = last[f"bad{round_}"].error
        assert error is not None
        assert error[0] == "non_finite_logits"
        assert f"bad{round_}" not in tokens or tokens[f"bad{round_}"] == []
    assert bool(torch.isfinite(engine._runner.cache.data).all())
    assert engine.stats().num_free_blocks == 16


def test_a_model_failure_ends_only_the_sequence_at_fault(
    make_engine: MakeEngine, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    launch = engine._runner.launch

    def fail_on_r2(plan: Any) -> Any:
        if any(item.sequence.request_id == "r2" and item.num_tokens == 1 for item in plan):
            raise RuntimeError("broken")
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", fail_on_r2)
    for item in MIXED:
        engine.add(item)
    outputs = drain(engine)
    tokens, last = tokens_by_request(outputs), last_by_request(outputs)
    assert last["r2"].error is not None
    assert last["r2"].error[0] == "internal_error"
    assert tokens["r2"] == alone["r2"][:1]
    assert {k: v for k, v in tokens.items() if k != "r2"} == {
        k: v for k, v in alone.items() if k != "r2"
    }


def test_priority_is_admitted_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_sequences=1)
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 5)):
        engine.add(request(name, prompt(1, 4), max_tokens=1, priority=priority))
    assert [o.request_id for o in drain(engine)] == ["high", "first", "second", "low"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_num_sequences", -1),
        ("max_batch_tokens", -1),
        ("block_size_tokens", 0),
        ("num_blocks", -1),
        ("num_blocks", 10**12),
        ("kv_cache_bytes", -1),
        ("dtype", "int3"),
        ("device", "abacus"),
        ("device", "cuda"),
        ("kernels", "wheat"),
        ("load_format", "guess"),
        ("kv_cache_dtype", "int4"),
        ("gpu_memory_fraction", 0.0),
        ("gpu_memory_fraction", 1.5),
    ],
)
def test_a_bad_setting_is_named(make_engine: MakeEngine, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"engine.{setting}"):
        make_engine(**{setting: value})


def test_what_only_a_gpus_kernels_can_do_is_refused(llama: tuple[Path, Any]) -> None:
    for settings in (EngineConfig(kv_cache_dtype="fp8"), EngineConfig(deterministic=True)):
        with pytest.raises(ConfigError, match=r"engine.kernels to 'triton'"):
            Engine.load(llama[0], msgspec.structs.replace(settings, device="cpu"))


def test_the_cache_is_sized_by_bytes_but_no_larger_than_of_use(make_engine: MakeEngine) -> None:
    block_bytes = 3 * 16 * 2 * 2 * 16 * 4
    engine = make_engine(num_blocks=0, kv_cache_bytes=10 * block_bytes + 1)
    assert engine.stats().num_blocks == 10
    engine = make_engine(num_blocks=0, max_num_sequences=2)
    assert engine.stats().num_blocks == 2 * 512 // 16
    with pytest.raises(ConfigError, match=f"takes {block_bytes} bytes"):
        make_engine(num_blocks=0, kv_cache_bytes=block_bytes - 1)


def test_stats_count_the_work(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("r", prompt(1, 10), max_tokens=5))
    assert engine.stats().outstanding_tokens == 15
    engine.step()
    assert engine.stats().outstanding_tokens == 5
    assert engine.stats().num_running == 1
    drain(engine)
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.num_steps) == (10, 4, 5)
    assert stats.max_tokens_per_request == 512
    assert stats.busy_s > 0
