"""Simulated engine, as its worker sees it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from millrace.engine.types import DeviceTime, EngineOutput, EngineRequest, PrefixChanges
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig, SimulationConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling
from millrace.schemas.prefix import REPORTED_BYTES
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
from millrace.workers.simulated.engine import SimulatedEngine
from millrace.workers.simulated.tokens import readable_token_ids
from tests.support.manual_clock import ManualClock
from tests.workers.scripted import served_model

_SIMULATION = SimulationConfig(
    prefill_tokens_per_s=1_000.0, step_ms=10.0, step_ms_per_sequence=0.0, step_ms_per_kv_token=0.0
)
_CONFIG = EngineConfig(
    kind=EngineKind.SIMULATED,
    simulation=_SIMULATION,
    max_num_sequences=2,
    num_blocks=32,
    block_size_tokens=4,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(tmp_path_factory.mktemp("model"))


class _Heard:
    def __init__(self, engine: SimulatedEngine) -> None:
        self.outputs: list[EngineOutput] = []
        self.changes: list[PrefixChanges] = []
        self.times: list[DeviceTime] = []
        engine.on_outputs = lambda outputs, _stats: self.outputs.extend(outputs)
        engine.on_prefixes = self.changes.append
        engine.on_device_times = self.times.extend

    def of(self, request_id: str) -> list[EngineOutput]:
        return [output for output in self.outputs if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.of(request_id) for token in output.token_ids]

    def ended(self, request_id: str) -> bool:
        return any(output.finished for output in self.of(request_id))


@asynccontextmanager
async def _engine(
    model: ServedModel, config: EngineConfig = _CONFIG
) -> AsyncIterator[tuple[SimulatedEngine, _Heard, ManualClock]]:
    clock = ManualClock()
    engine = await SimulatedEngine.start(model, config, clock)
    try:
        yield engine, _Heard(engine), clock
        engine.check_integrity()
    finally:
        await engine.close()


def _request(
    request_id: str,
    prompt: tuple[int, ...] = tuple(range(40, 50)),
    output_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    **sampling: object,
) -> EngineRequest:
    fields: dict[str, object] = {"max_tokens": 4, "seed": 5} | sampling
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        output_token_ids=output_token_ids,
        priority=priority,
    )


async def test_a_request_takes_the_time_of_its_steps(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        engine.add(_request("a"))
        await clock.advance(0.009)
        assert not heard.outputs
        await clock.advance(0.002)
        first = heard.of("a")[0]
        assert (first.started, len(first.token_ids), first.queued_s) == (True, 1, 0.0)
        await clock.advance(0.028)
        assert not heard.ended("a")
        await clock.advance(0.002)
        last = heard.of("a")[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert len(heard.tokens("a")) == 4
        stats = engine.stats
        assert (stats.num_steps, stats.prefill_tokens, stats.decode_tokens) == (4, 10, 3)
        assert stats.busy_s == pytest.approx(0.040)
        assert (stats.prefill_tokens_per_s, stats.decode_step_ms) == (1_000.0, 10.0)
        assert stats.num_free_blocks == stats.num_blocks == 32
        assert stats.max_tokens_per_request == 128


async def test_a_group_shares_the_work_of_its_steps(model: ServedModel) -> None:
    """Device time is reported for one device; the worker counts the others."""
    simulation = msgspec.structs.replace(_SIMULATION, collective_ms=1.0)
    config = msgspec.structs.replace(_CONFIG, tensor_parallel=4, simulation=simulation)
    async with _engine(model, config) as (engine, heard, clock):
        assert engine.num_devices == 4
        engine.add(_request("a"))
        await clock.advance(1.0)
        assert heard.ended("a")
        # A prompt of 10 ms and three steps of 10, and four exchanges of 1.
        assert engine.stats.busy_s == pytest.approx(0.040 / 4 + 4 * 0.001)


async def test_time_lost_by_the_loop_is_made_up_for(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        engine.add(_request("a", max_tokens=20))
        await clock.advance(0.010)
        await clock.advance(0.100)
        assert len(heard.tokens("a")) == 11


async def test_request_that_moves_goes_on_with_the_same_tokens(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        engine.add(_request("whole", max_tokens=6))
        await clock.advance(1.0)
        whole = heard.tokens("whole")
        assert len(whole) == 6
        assert all(0 <= token < model.vocab_size for token in whole)
        for split in range(1, 6):
            engine.add(_request(f"{split}", output_token_ids=tuple(whole[:split]), max_tokens=6))
            await clock.advance(1.0)
            assert heard.tokens(f"{split}") == whole[split:]
        engine.add(_request("nothing left", output_token_ids=tuple(whole), max_tokens=6))
        await clock.advance(1.0)
        assert heard.of("nothing left")[-1].finish_reason is FinishReason.LENGTH
        assert not heard.tokens("nothing left")


async def test_a_stop_token_stops(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        engine.add(_request("a"))
        await clock.advance(1.0)
        engine.add(_request("b", stop_token_ids=(heard.tokens("a")[1],)))
        await clock.advance(1.0)
        assert heard.of("b")[-1].finish_reason is FinishReason.STOP
        assert heard.tokens("b") == heard.tokens("a")[:2]


async def test_the_cache_is_told_and_used(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        engine.add(_request("a"))
        await clock.advance(1.0)
        assert sum(len(changes.added) for changes in heard.changes) == 3 * REPORTED_BYTES
        engine.add(_request("b"))
        await clock.advance(1.0)
        assert [output.num_cached_tokens for output in heard.of("b") if output.started] == [8]
        assert engine.stats.prefix_hit_tokens == 8
        assert engine.stats.num_idle_blocks == 3


async def test_a_cancel_frees_at_once_and_nothing_more_comes(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        for name in ("a", "b", "c"):
            engine.add(_request(name, max_tokens=50))
        await clock.advance(0.055)
        assert (engine.stats.num_running, engine.stats.num_waiting) == (2, 1)
        assert engine.stats.outstanding_prompt_tokens == 10
        heard.outputs.clear()
        engine.cancel("a")
        engine.cancel("c")
        assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 0)
        await clock.advance(0.050)
        assert {output.request_id for output in heard.outputs} == {"b"}
        engine.cancel("b")
        assert engine.stats.num_free_blocks == 32


@pytest.mark.parametrize("seed", range(5))
async def test_all_of_the_steps_time_is_some_request_s(model: ServedModel, seed: int) -> None:
    draw = random.Random(seed)
    config = msgspec.structs.replace(_CONFIG, max_num_sequences=4, max_batch_tokens=16)
    async with _engine(model, config) as (engine, heard, clock):
        for number in range(20):
            prompt = tuple(draw.randrange(40, 60) for _ in range(draw.randint(1, 40)))
            priority = draw.randint(-1, 2)
            engine.add(
                _request(f"r{number}", prompt, priority=priority, max_tokens=draw.randint(1, 40))
            )
            await clock.advance(draw.random() / 5)
            if draw.random() < 0.3:
                engine.cancel(f"r{draw.randint(0, number)}")
        await clock.advance(30.0)
        told_us = [one.device_us for one in heard.outputs if one.finished]
        told_us += [one.device_us for one in heard.times]
        assert all(one.over for one in heard.times)
        assert engine.stats.num_preemptions > 0
        assert sum(told_us) == pytest.approx(engine.stats.busy_s * 1e6, rel=1e-9)
        assert engine.stats.charged_s == pytest.approx(engine.stats.busy_s, rel=1e-9)


async def test_a_higher_tier_goes_first(model: ServedModel) -> None:
    async with _engine(model) as (engine, heard, clock):
        for name in ("a", "b"):
            engine.add(_request(name, max_tokens=50))
        await clock.advance(0.055)
        engine.add(_request("urgent", prompt=(1, 2, 3), max_tokens=1, priority=3))
        await clock.advance(0.030)
        assert heard.ended("urgent")
        await clock.advance(2.0)
        assert len(heard.tokens("a")) == len(heard.tokens("b")) == 50
        assert heard.of("b")[-1].num_preemptions == 1


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("logprobs", _request("r", logprobs=1)),
        ("prompt_logprobs", _request("r", prompt_logprobs=0)),
        ("grammar", _request("r", grammar=Grammar(kind=GrammarKind.JSON_OBJECT))),
        ("logit_bias", _request("r", logit_bias={3: 1.0})),
        ("bad_words", _request("r", bad_words=("x",))),
        ("n must|one completion", _request("r", n=2)),
        ("embeddings", EngineRequest(request_id="r", prompt_token_ids=(1,), pooling=Pooling.MEAN)),
        ("vocabulary", _request("r", prompt=(1_000_000,))),
        ("context window|context length", _request("r", max_tokens=500)),
        ("no tokens", _request("r", prompt=())),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    model: ServedModel, field: str, request_: EngineRequest
) -> None:
    async with _engine(model) as (engine, heard, clock):
        engine.add(request_)
        await clock.advance(0.0)
        (answer,) = heard.outputs
        assert answer.error is not None
        assert any(word in answer.error[1] for word in field.split("|"))
        engine.add(_request("next"))
        await clock.advance(1.0)
        assert heard.ended("next")


async def test_engine_is_ready_after_its_start_time(model: ServedModel) -> None:
    clock = ManualClock()
    config = EngineConfig(kind=EngineKind.SIMULATED, simulation=SimulationConfig(start_s=30.0))
    starting = asyncio.create_task(SimulatedEngine.start(model, config, clock))
    await clock.advance(29.9)
    assert not starting.done()
    await clock.advance(0.2)
    engine = await starting
    await engine.close()
    assert "closed" in await engine.wait_closed()


async def test_a_listener_that_fails_ends_it_with_why(model: ServedModel) -> None:
    async with _engine(model) as (engine, _heard, clock):

        def fail(*_: object) -> None:
            raise RuntimeError("no")

        engine.on_outputs = fail
        engine.add(_request("a"))
        await clock.advance(1.0)
        assert "RuntimeError: no" in await engine.wait_closed()


async def test_bad_settings_are_named(model: ServedModel) -> None:
    config = EngineConfig(
        kind=EngineKind.SIMULATED, simulation=SimulationConfig(prefill_tokens_per_s=0)
    )
    with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
        await SimulatedEngine.start(model, config, ManualClock())


def test_words_are_words_where_there_are_any(model: ServedModel) -> None:
    texts = [model.tokenizer.decode([token_id]) for token_id in readable_token_ids(model.tokenizer)]
    assert texts
    assert all(text.isascii() and text.isprintable() for text in texts)
