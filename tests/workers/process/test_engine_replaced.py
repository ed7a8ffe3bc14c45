"""Replacement of an engine under running requests; the engines are scripted."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from millrace.engine.types import EngineOutput, EngineStats
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel
from millrace.schemas.frames import Cancelled, Done, Failed, FinishReason, Usage
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.schemas.transfer import TransferEndpoint
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.process.keeper import COUNTERS, MAX_RESTARTS, RESTART_WINDOW_S, EngineKeeper
from tests.support.manual_clock import ManualClock
from tests.workers.scripted import Bench, ScriptedEngine, bench, served_model


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(tmp_path_factory.mktemp("demo"))


_GAUGES = {
    "max_num_sequences",
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_free_blocks",
    "num_idle_blocks",
    "num_host_blocks",
    "num_used_host_blocks",
    "num_disk_blocks",
    "num_used_disk_blocks",
    "is_object_store_left_alone",
    "outstanding_tokens",
    "outstanding_prompt_tokens",
    "outstanding_pull_tokens",
    "prefill_tokens_per_s",
    "decode_step_ms",
    "max_tokens_per_request",
    "max_adapters",
    "adapters",
    "adapter_load_ms",
}


async def _kill(b: Bench) -> None:
    """Kill the engine, and wait until the next one runs."""
    before = b.engine
    before.fail("exit code -9")
    await b.settle(1.0)
    assert b.engine is not before


def _ids(text: str, b: Bench) -> list[int]:
    return b.model.tokenizer.encode(text, add_special_tokens=False)


async def test_a_stream_goes_on_at_the_next_token(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"logprobs": 0}))
        b.engine.emit("r1:1", [20, 21, 22])
        await b.settle(0.1)
        await _kill(b)
        again = b.engine.added["r1:1"]
        assert again.prompt_token_ids == (10, 11, 12)
        assert again.output_token_ids == (20, 21, 22)
        assert again.sampling.seed == 7
        b.engine.step(
            EngineOutput(request_id="r1:1", token_ids=(23,), started=True, num_cached_tokens=2)
        )
        await b.settle(0.1)
        b.engine.emit("r1:1", [24], FinishReason.LENGTH)
        assert await b.ended() == Done(epoch=1, finish_reason=FinishReason.LENGTH, num_tokens=5)
        assert b.kinds() == ["Started", "Delta", "Delta", "Delta", "Usage", "Done"]
        assert [(d.index, d.token_ids) for d in b.deltas()] == [
            (0, (20, 21, 22)),
            (3, (23,)),
            (4, (24,)),
        ]
        usage = b.of()[-2]
        assert isinstance(usage, Usage)
        assert usage.cached_tokens == 0, "as it was told when it started"
        (record,) = await b.records()
        assert record.completion_tokens == 5


async def test_text_that_was_held_back_is_not_lost(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"stop": ("STOP",)}))
        head, tail = _ids("ab ST", b), _ids("OP", b)
        b.engine.emit("r1:1", head)
        await _kill(b)
        b.engine.emit("r1:1", tail)
        end = await b.ended()
        assert isinstance(end, Done)
        assert end.finish_reason is FinishReason.STOP
        assert b.text() == "ab "
        assert b.engine.cancelled == ["r1:1"]


async def test_requests_that_come_and_go_during_a_replacement(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job("old"))
        await b.dispatch(b.job("left"))
        before = b.engine
        b.no_restart = "not yet"
        before.fail("exit code -9")
        await b.settle(0.05)
        await b.dispatch(b.job("new"))
        assert "new:1" not in before.added
        await b.peer.control.cancel(Cancel(request_id="left"))
        assert isinstance(await b.ended("left"), Cancelled)
        assert b.worker.requests.num_running == 2
        b.no_restart = ""
        await b.settle(1.0)
        # What the dead engine had is tried first.
        assert list(b.engine.added) == ["old:1"]
        b.engine.emit("old:1", [20])
        assert list(b.engine.added) == ["old:1", "new:1"]
        await b.dispatch(b.job("newer"))
        assert list(b.engine.added) == ["old:1", "new:1", "newer:1"]


async def test_a_request_that_kills_engines_ends_with_the_second(demo: ServedModel) -> None:
    async with bench(demo) as b:
        for name, prompt in (("long", 9), ("deadly", 5), ("short", 2)):
            await b.dispatch(b.job(name, prompt_token_ids=tuple(range(10, 10 + prompt))))
            b.engine.emit(f"{name}:1", [20])
        await b.dispatch(b.job("urgent", tier=Tier.ENTERPRISE))
        await _kill(b)
        # One at a time: the higher priority first, then the shorter.
        assert list(b.engine.added) == ["urgent:1"]
        b.engine.emit("urgent:1", [20])
        assert list(b.engine.added) == ["urgent:1", "short:1"]
        b.engine.emit("short:1", [21])
        assert list(b.engine.added) == ["urgent:1", "short:1", "deadly:1"]
        b.engine.emit("urgent:1", [21])
        await _kill(b)
        failed = await b.ended("deadly")
        assert isinstance(failed, Failed)
        assert (failed.code, failed.retryable) == ("engine_killed", False)
        for name in ("urgent", "short", "long"):
            assert list(b.engine.added)[-1] == f"{name}:1"
            b.engine.emit(f"{name}:1", [30], FinishReason.LENGTH)
            assert isinstance(await b.ended(name), Done)
        assert list(b.engine.added) == ["urgent:1", "short:1", "long:1"]
        records = {record.request_id: record for record in await b.records()}
        assert records.keys() == {"long", "deadly", "short", "urgent"}
        assert records["deadly"].status is Status.FAILED
        assert await b.num_queued() == 0


async def test_trials_go_on_when_the_one_on_trial_is_cancelled(demo: ServedModel) -> None:
    async with bench(demo) as b:
        for name in ("a", "b"):
            await b.dispatch(b.job(name))
            b.engine.emit(f"{name}:1", [20])
        await _kill(b)
        await b.peer.control.cancel(Cancel(request_id="a"))
        await b.settle()
        assert list(b.engine.added) == ["a:1", "b:1"]
        assert b.engine.cancelled == ["a:1"]


async def test_schedulers_hear_that_there_is_no_room_and_when_there_is(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.settle(0.5)
        b.no_restart = "not yet"
        b.engine.fail("exit code -9")
        await b.settle(0.6)
        assert (b.statuses[-1].num_free_blocks, b.statuses[-1].num_blocks) == (0, 100)
        b.no_restart = ""
        await b.settle(1.0)
        assert b.statuses[-1].num_free_blocks == 100


async def _keep(clock: ManualClock, engine: ScriptedEngine) -> tuple[EngineKeeper, list[float]]:
    """Return a keeper whose every restart fails at once, and the times of the attempts."""
    attempts_s: list[float] = []

    async def restart() -> ScriptedEngine:
        attempts_s.append(clock.monotonic())
        raise EngineFailedError("no memory")

    return EngineKeeper(engine, restart, clock), attempts_s


async def test_restarts_are_bounded_and_spaced() -> None:
    clock, engine = ManualClock(), ScriptedEngine()
    keeper, attempts_s = await _keep(clock, engine)
    engine.fail("exit code -9")

    run = asyncio.create_task(keeper.run())
    for _ in range(40):
        await clock.advance(0.1)
    with pytest.raises(EngineFailedError, match=rf"{MAX_RESTARTS + 1} times .* no memory"):
        await run
    assert attempts_s == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5])


async def test_an_engine_that_ends_now_and_then_is_always_replaced() -> None:

    clock = ManualClock()
    engines = [ScriptedEngine()]

    async def restart() -> ScriptedEngine:
        engines.append(ScriptedEngine())
        return engines[-1]

    keeper = EngineKeeper(engines[0], restart, clock)
    run = asyncio.create_task(keeper.run())
    for i in range(3 * MAX_RESTARTS):
        engines[-1].fail("exit code -9")
        await clock.advance(RESTART_WINDOW_S / 2)
        assert len(engines) == i + 2
    run.cancel()


async def test_counters_run_on_over_all_engines() -> None:
    known = {*COUNTERS, *_GAUGES, "expert_choices"}
    assert known == set(EngineStats.__struct_fields__)
    clock = ManualClock()
    engines = [ScriptedEngine()]

    async def restart() -> ScriptedEngine:
        engines.append(ScriptedEngine())
        return engines[-1]

    keeper = EngineKeeper(engines[0], restart, clock)
    run = asyncio.create_task(keeper.run())
    for number in (1, 2):
        counted = {**dict.fromkeys(COUNTERS, 10 * number), "expert_choices": (number, 0, 4)}
        engines[-1].stats = msgspec.structs.replace(engines[-1].stats, num_running=3, **counted)
        engines[-1].fail("exit code -9")
        await clock.advance(1.0)
    engines[-1].stats = msgspec.structs.replace(engines[-1].stats, decode_tokens=5, num_running=1)
    assert keeper.stats.decode_tokens == 35
    assert keeper.stats.num_steps == 30
    assert keeper.stats.expert_choices == (3, 0, 8)
    assert keeper.stats.num_running == 1
    run.cancel()


async def test_blocks_are_served_where_the_engine_that_runs_serves_them() -> None:
    clock = ManualClock()
    engines = [ScriptedEngine()]
    engines[0].transfer_endpoint = TransferEndpoint(layout="l", token="first")

    async def restart() -> ScriptedEngine:
        assert keeper.transfer_endpoint is None
        engines.append(ScriptedEngine())
        engines[-1].transfer_endpoint = TransferEndpoint(layout="l", token="second")
        return engines[-1]

    keeper = EngineKeeper(engines[0], restart, clock)
    run = asyncio.create_task(keeper.run())
    assert keeper.transfer_endpoint == engines[0].transfer_endpoint
    engines[0].fail("exit code -9")
    await clock.advance(1.0)
    assert keeper.transfer_endpoint == engines[1].transfer_endpoint
    run.cancel()


async def test_a_group_has_its_devices_while_its_engine_is_replaced() -> None:
    clock = ManualClock()
    engine = ScriptedEngine(num_devices=2)

    async def restart() -> ScriptedEngine:
        assert (keeper.is_down, keeper.num_devices) == (True, 2)
        return ScriptedEngine(num_devices=4)

    keeper = EngineKeeper(engine, restart, clock)
    run = asyncio.create_task(keeper.run())
    engine.fail("exit code -9")
    await clock.advance(1.0)
    assert (keeper.is_down, keeper.num_devices) == (False, 4)
    run.cancel()


async def test_heartbeat_reports_at_once_that_the_engine_is_down_and_up_again(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.settle(0.05)
        num_up = len(b.statuses)
        b.no_restart = "not yet"
        b.engine.fail("exit code -9")
        await b.settle(0.06)
        b.no_restart = ""
        await b.settle(0.3)
        told = [status.engine_down for status in b.statuses]
        assert not any(told[:num_up])
        assert any(told[num_up:])
        assert not told[-1]
