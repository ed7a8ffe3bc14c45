"""Device time: all of the busy time is charged to requests, even if they fail or are cancelled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.step.device_work import (
    FLOP_PER_BYTE,
    Chunk,
    DeviceWork,
    num_token_parameters,
)
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.families import ExpertsConfig
from millrace.schemas.pooling import Pooling
from tests.engine.overlap_loads import ARRIVALS, CONFIGS, Arrival, World
from tests.engine.support import SteppingClock, last_by_request, prompt, request, resolved

# Explaining traces every line, which takes minutes here.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


class Ledger:
    """Ledger of the device time that an engine reports at each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.told_us = 0.0
        self.num_owed = 0
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[EngineOutput]:
        outputs = self._step()
        for output in outputs:
            assert output.finished or not (output.device_us or output.owes)
            self.num_owed += output.owes
            if not output.owes:
                self.told_us += output.device_us
        self.check()
        return outputs

    def check(self) -> None:
        """Assert that reported and outstanding device time add up to the busy time."""
        times = self.engine.pop_device_times()
        assert all(time.over for time in times)
        self.told_us += sum(time.device_us for time in times)
        to_come = (*self.engine._live.charged(), *self.engine._device_times._owing)
        told_s = self.told_us / 1e6 + sum((one.fork_group or one).device_s for one in to_come)
        stats = self.engine.stats()
        assert told_s == pytest.approx(stats.busy_s, rel=1e-9)
        assert stats.charged_s == pytest.approx(stats.busy_s, rel=1e-9)

    def check_all_told(self) -> None:
        """Assert that all device time has been reported."""
        self.check()
        assert not self.engine.has_work
        assert not self.engine._device_times._owing
        assert self.told_us / 1e6 == pytest.approx(self.engine.stats().busy_s, rel=1e-9)


@settings(max_examples=40, deadline=None, phases=_PHASES, suppress_health_check=list(HealthCheck))
@given(
    arrivals=ARRIVALS,
    config=CONFIGS,
    num_blocks=st.sampled_from([11, 14, 20, 64]),
    overlap=st.sampled_from([True, True, False]),
    chooses=st.booleans(),
    disturbed=st.booleans(),
    broken=st.sampled_from([0.0, 0.0, 0.08]),
)
def test_any_load_is_charged_all_of_the_time(
    arrivals: list[Arrival],
    config: dict[str, Any],
    num_blocks: int,
    overlap: bool,
    chooses: bool,
    disturbed: bool,
    broken: float,
) -> None:
    faults = random.Random(len(arrivals))
    options = {"breaks": lambda: faults.random() < broken} if broken else {}
    world = World(
        arrivals,
        {"num_blocks": num_blocks, "chooses": chooses, **options},
        overlap=overlap and chooses,
        **config,
    )
    ledger = Ledger(world.engine)
    world.run(disturbed=disturbed)
    ledger.check_all_told()


def _engine(llama: tuple[Path, Any], **config: Any) -> Engine:
    settings = resolved(llama[0], num_blocks=64, device="cpu", **config)
    runner = ModelRunner.load(llama[0], settings)
    return Engine(runner, settings, monotonic=SteppingClock())


def _drain(engine: Engine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_alike_requests_are_charged_alike_and_longer_ones_more(llama: tuple[Path, Any]) -> None:
    engine = _engine(llama, prefix_cache=False)
    ledger = Ledger(engine)
    for name, num_prompt, max_tokens in (
        *(("a", 20, 8), ("b", 20, 8)),
        *(("deep", 90, 8), ("long", 20, 30)),
    ):
        item = request(name, prompt(len(name), num_prompt), max_tokens=max_tokens, ignore_eos=True)
        engine.add(item)
    last = last_by_request(_drain(engine))
    us = {name: output.device_us for name, output in last.items()}
    assert us["a"] == pytest.approx(us["b"])
    assert us["a"] < us["deep"]
    assert us["a"] < us["long"]
    ledger.check_all_told()


def test_preempted_request_is_charged_for_its_recomputation(llama: tuple[Path, Any]) -> None:
    settings = resolved(
        llama[0], num_blocks=8, device="cpu", prefix_cache=False, host_cache_bytes=0
    )
    runner = ModelRunner.load(llama[0], settings)
    engine = Engine(runner, settings, monotonic=SteppingClock())
    ledger = Ledger(engine)
    for name in ("first", "second"):
        engine.add(request(name, prompt(1, 40), max_tokens=50, ignore_eos=True))
    last = last_by_request(_drain(engine))
    assert last["first"].num_preemptions == 0 < last["second"].num_preemptions
    ledger.check_all_told()


def test_choices_and_embeddings_have_their_share(llama: tuple[Path, Any]) -> None:
    engine = _engine(llama)
    ledger = Ledger(engine)
    engine.add(request("three", prompt(1, 40), n=3, temperature=0.8, seed=1, max_tokens=5))
    embed = EngineRequest(
        request_id="e", prompt_token_ids=tuple(prompt(2, 30)), pooling=Pooling.MEAN
    )
    engine.add(embed)
    outputs = [output for output in _drain(engine) if output.finished]
    assert len(outputs) == 4
    assert all(output.device_us > 0 for output in outputs)
    by_choice = {o.choice: o.device_us for o in outputs if o.request_id == "three"}
    assert by_choice[0] > max(by_choice[1], by_choice[2]), "it computed the prompt for all"
    ledger.check_all_told()


def test_a_cancel_is_answered_with_what_the_request_took(llama: tuple[Path, Any]) -> None:
    engine = _engine(llama)
    for name in ("a", "b"):
        engine.add(request(name, prompt(1, 20), max_tokens=30, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    engine.cancel("unknown")
    took, unknown = sorted(engine.pop_device_times(), key=lambda time: time.request_id)
    assert (took.request_id, took.choice, took.over) == ("a", 0, True)
    assert took.device_us > 0
    assert (unknown.request_id, unknown.device_us, unknown.over) == ("unknown", 0.0, True)
    (live,) = engine.pop_device_times(live=True)
    assert (live.request_id, live.over) == ("b", False)
    assert live.device_us + took.device_us == pytest.approx(engine.stats().busy_s * 1e6)
    assert not engine.pop_device_times()


def test_last_request_is_charged_for_the_step_in_flight() -> None:
    arrival = Arrival(1, 0, 10, 30, 0, "greedy", 1, 60, False, 0, None, False, None)
    world = World([arrival], {"num_blocks": 64}, overlap=True)
    ledger = Ledger(world.engine)
    world.run(disturbed=False)
    ((told),) = world.told.values()
    assert told.ending[0] == "stop"
    assert ledger.num_owed == 1
    ledger.check_all_told()


# --- the weights ------------------------------------------------------------------------------

_SHAPE: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
# Of one layer: q and o [64, 64], k and v [64, 32], gate, up and down [64, 128].
_LAYER_PARAMETERS = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
_KV_BYTES = 2 * 2 * 16 * 2


def _work(**changes: Any) -> DeviceWork:
    config = ModelConfig(**(_SHAPE | changes))
    return DeviceWork(config, kv_token_bytes=_KV_BYTES, flop_per_byte=10.0)


def test_the_work_of_a_step_by_hand() -> None:
    """The step has a chunk of 197 tokens and three decodes: computing takes longer than reading the
    weights."""
    chunks = [Chunk(197, 10, 1), *[Chunk(1, 50, 1)] * 3]
    attention = [
        2 * ((197 * 10 + 197 * 198 // 2) * 4 * 4 * 16 + 207 * _KV_BYTES * 10),
        *[2 * 51 * (4 * 4 * 16 + _KV_BYTES * 10)] * 3,
    ]
    token, row = 2 * 2 * _LAYER_PARAMETERS, 100 * 64 * 4 * 10 / 4
    products = [197 * token + row, *[token + row] * 3]
    expected = [a + b for a, b in zip(attention, products, strict=True)]
    assert _work().of_chunks(chunks) == expected
    headless = [total - row for total in expected]
    assert _work(has_head=False).of_chunks(chunks) == headless


def test_a_small_step_is_shared_by_tokens() -> None:
    """The step has two decodes: most of its time goes into the weights, which are read for both."""
    reading = (2 * _LAYER_PARAMETERS + 100 * 64) * 4 * 10 / 2
    near, far = _work().of_chunks([Chunk(1, 0, 1), Chunk(1, 99, 1)])
    per_token = 2 * (4 * 4 * 16 + _KV_BYTES * 10)
    assert (near, far) == (reading + per_token, reading + 100 * per_token)


def test_a_decode_is_a_chunk_of_one_token(llama: tuple[Path, Any]) -> None:
    engine = _engine(llama, overlap=False)
    engine.add(request("r", prompt(1, 40), max_tokens=9))
    engine.add(request("s", prompt(2, 20), max_tokens=9))
    for _ in range(3):
        engine.step()
    sequences = engine._planner.running
    assert len(sequences) == 2
    for work in (_work(), _work(sliding_window=20, sliding_layers=(1,))):
        expected = work.of_chunks([Chunk(1, one.num_computed_tokens, 1) for one in sequences])
        assert work.of_decodes(sequences) == pytest.approx(expected)
        assert work.of([(one, 1) for one in sequences]) == expected


@pytest.mark.parametrize("window", [1, 4, 16, 100])
def test_a_window_bounds_what_is_attended_to_and_read(window: int) -> None:
    sliding = _work(sliding_window=window, sliding_layers=(1,))
    num_tokens, context = 5, 12
    seen = [min(context + i, window) for i in range(1, num_tokens + 1)]
    all_of_it = [context + i for i in range(1, num_tokens + 1)]
    less_pairs = (sum(all_of_it) - sum(seen)) * 4 * 4 * 16
    less_read = max(0, context - window + 1) * _KV_BYTES * 10
    (whole,), (bounded,) = (
        one.of_chunks([Chunk(num_tokens, context, 1)]) for one in (_work(), sliding)
    )
    assert whole - bounded == less_pairs + less_read


def test_a_mixture_counts_the_experts_that_compute_a_token() -> None:
    experts = ExpertsConfig(
        layers=(1,), num_experts=8, num_chosen=2, intermediate_size=32, normalized=True
    )
    dense = ModelConfig(**_SHAPE)
    mixed = ModelConfig(**_SHAPE, experts=experts)
    assert num_token_parameters(dense) == 2 * _LAYER_PARAMETERS
    mlp, mixture = 3 * 64 * 128, 2 * 3 * 64 * 32 + 64 * 8
    assert num_token_parameters(mixed) == 2 * _LAYER_PARAMETERS - mlp + mixture
    reads = [DeviceWork(m, kv_token_bytes=0, flop_per_byte=1e9) for m in (dense, mixed)]
    few, many = ([one.of_chunks([Chunk(n, 0, 0)])[0] for n in (1, 4)] for one in reads)
    assert few[0] == pytest.approx(few[1], rel=1e-6), "all weights are read once"
    assert many[1] - many[0] == pytest.approx(6 * 3 * 64 * 32 * 4 * 1e9, rel=1e-3), "6 more experts"


def test_the_example_of_the_cost_page() -> None:
    page = (Path(__file__).parents[4] / "docs" / "cost.md").read_text()
    llama = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=4_096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    )
    kv_token_bytes = 2 * 8 * 128 * 2
    work = DeviceWork(llama, kv_token_bytes=kv_token_bytes, flop_per_byte=FLOP_PER_BYTE["cuda"])
    decodes = [Chunk(1, 499, 1), Chunk(1, 7_999, 1)]
    mixed, alone = work.of_chunks([*decodes, Chunk(512, 0, 1)]), work.of_chunks(decodes)
    for weight in mixed:
        assert f"| {weight / 1e9:,.1f} | {12_000 * weight / sum(mixed):,.0f} µs |" in page
    first, second = (4_000 * weight / sum(alone) for weight in alone)
    assert f"charged {first:,.0f} and {second:,.0f} µs" in page
