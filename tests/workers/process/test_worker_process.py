"""``python -m millrace.workers`` on a real nats-server, the real engine on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from millrace.schemas.config import NatsConfig
from millrace.schemas.control import Cancel, Replay
from millrace.schemas.frames import Cancelled, Delta, Done, FinishReason, Usage
from millrace.schemas.records import RequestRecord, Status
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.support.waiting import eventually
from tests.workers.worker_process import (
    LINE,
    NUM_BLOCKS,
    ROOT,
    HandScheduler,
    WorkerProcess,
    hand_scheduler,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def worker(tmp_path: Path, nats_config: NatsConfig) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path, nats_config.url, drain_timeout_s=1.0)
    yield process
    process.stop()


async def test_a_worker_from_its_first_heartbeat_to_its_last(
    worker: WorkerProcess, nats_config: NatsConfig
) -> None:
    async with hand_scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        assert scheduler.worker.num_free_blocks == NUM_BLOCKS
        await _serves(scheduler)
        await _cancel_frees_the_pool(scheduler)
        await _drains(scheduler, worker)


async def _serves(scheduler: HandScheduler) -> None:
    names = [f"r{i}" for i in range(8)]
    await asyncio.gather(*(scheduler.dispatch(name, 40) for name in names))
    await eventually(lambda: all(scheduler.end(name) for name in names))
    for name in names:
        done = Done(epoch=1, finish_reason=FinishReason.LENGTH, num_tokens=40)
        assert scheduler.end(name) == done
        assert len(scheduler.tokens(name)) == 40
        usage = scheduler.frames[name][-2]
        assert isinstance(usage, Usage)
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 40)
    records: list[RequestRecord] = []

    async def all_recorded() -> bool:
        records.extend(await scheduler.records())
        depth = await scheduler.bus.jobs.depth(LINE)
        return len(records) == 8 and depth.num_leased == depth.num_queued == 0

    await eventually(all_recorded, what="a record each, and an empty queue")
    assert {record.completion_tokens for record in records} == {40}
    assert all(record.ttft_ms > 0 for record in records)
    # A late reader has it all again.
    before = scheduler.tokens("r0")
    scheduler.frames.clear()
    reply = await scheduler.command(Replay(request_id="r0", from_index=0, reply="gw"))
    assert reply.ok
    await eventually(lambda: scheduler.end("r0") is not None)
    assert scheduler.tokens("r0") == before


async def _cancel_frees_the_pool(scheduler: HandScheduler) -> None:
    await scheduler.dispatch("long", 900)
    await eventually(lambda: len(scheduler.tokens("long")) > 20)
    await scheduler.bus.control.cancel(Cancel(request_id="long"))
    await eventually(lambda: scheduler.end("long") is not None)
    terminal = scheduler.end("long")
    assert isinstance(terminal, Cancelled)
    assert terminal.num_tokens == len(scheduler.tokens("long")) < 900
    cancelled_ns = scheduler.worker.sent_ns
    await eventually(
        lambda: (
            scheduler.worker.sent_ns > cancelled_ns
            and scheduler.worker.num_free_blocks == NUM_BLOCKS
            and scheduler.worker.num_running == 0
        ),
        what="the pool at its baseline",
    )
    (record,) = await scheduler.records()
    assert (record.status, record.completion_tokens) == (Status.CANCELLED, terminal.num_tokens)


async def _drains(scheduler: HandScheduler, worker: WorkerProcess) -> None:
    await scheduler.dispatch("rest", 900)
    await eventually(lambda: len(scheduler.tokens("rest")) > 5)
    engine = worker.engine()
    worker.popen.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(worker.popen.wait, 10.0)
    assert code == 0, worker.log.read_text()
    assert scheduler.worker.retired
    assert not engine.is_running()
    if scheduler.end("rest") is None:
        (leased,) = await scheduler.bus.jobs.pull(LINE, 1, 2.0)
        assert leased.job.request_id == "rest"
        assert leased.num_deliveries == 2


async def test_kill_9_leaves_no_engine_behind(
    worker: WorkerProcess, nats_config: NatsConfig
) -> None:
    async with hand_scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        await scheduler.dispatch("r", 900)
        await eventually(lambda: len(scheduler.tokens("r")) > 5)
        engine = worker.engine()
        os.kill(worker.popen.pid, signal.SIGKILL)
        worker.popen.wait()
        await eventually(lambda: not engine.is_running(), 5.0, "the engine's end")


async def test_a_dead_engine_is_replaced_under_its_streams(
    worker: WorkerProcess, nats_config: NatsConfig
) -> None:
    """The engine dies twice; then its checkpoint is gone, no other can start, and the worker ends
    with an error."""
    formed = {
        "grammar": Grammar(kind=GrammarKind.REGEX, text="([a-z]{3} )+"),
        "frequency_penalty": 1.0,
        "bad_words": ("e",),
    }
    plain, by_form = [f"s{i}" for i in range(16)], [f"f{i}" for i in range(4)]
    names = [*plain, *by_form]
    async with hand_scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        await scheduler.dispatch("plain", 200)
        await scheduler.dispatch("formed", 200, **formed)
        await eventually(lambda: all(map(scheduler.end, ("plain", "formed"))), 20.0)
        await asyncio.gather(*(scheduler.dispatch(name, 200) for name in plain))
        await asyncio.gather(*(scheduler.dispatch(name, 200, **formed) for name in by_form))
        worker_id = scheduler.worker.worker_id
        for least in (5, 50):
            await eventually(lambda n=least: all(len(scheduler.tokens(s)) > n for s in names), 30.0)
            engine = worker.engine()
            engine.kill()
            await eventually(lambda old=engine.pid: worker.engine_pid() not in (None, old), 30.0)
        await eventually(lambda: all(scheduler.end(name) for name in names), 30.0)
        for name in names:
            end = scheduler.end(name)
            assert end == Done(epoch=1, finish_reason=FinishReason.LENGTH, num_tokens=200)
            undisturbed = "plain" if name in plain else "formed"
            assert scheduler.tokens(name) == scheduler.tokens(undisturbed)
            deltas = [frame for frame in scheduler.frames[name] if isinstance(frame, Delta)]
            starts = [0, *accumulate(len(delta.token_ids) for delta in deltas)]
            assert [delta.index for delta in deltas] == starts[:-1]
        records: list[RequestRecord] = []

        async def all_recorded() -> bool:
            records.extend(await scheduler.records())
            return len(records) == 22

        await eventually(all_recorded, what="a record each")
        assert {record.worker_id for record in records} == {worker_id}
        worker.checkpoint.rename(worker.checkpoint.with_name("gone"))
        worker.engine().kill()
        assert await asyncio.to_thread(worker.popen.wait, 40.0) == 1
        assert "config.json" in worker.log.read_text().splitlines()[-1]
        await eventually(lambda: scheduler.worker.retired)


def test_a_bad_configuration_is_told_in_a_sentence(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("worker: {nmae: w1}")
    ended = subprocess.run(
        [sys.executable, "-m", "millrace.workers", "--config", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("workers: ")
    assert "nmae" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


async def test_a_group_is_one_worker_that_takes_the_time_of_all_its_devices(
    tmp_path: Path, nats_config: NatsConfig
) -> None:
    """A single device would take 3 ms for the prompt and 40 ms for each token after the first."""
    simulation = {
        "prefill_tokens_per_s": 1_000.0,
        "step_ms": 40.0,
        "step_ms_per_sequence": 0.0,
        "step_ms_per_kv_token": 0.0,
    }
    engine = {"kind": "simulated", "tensor_parallel": 4, "simulation": simulation}
    worker = WorkerProcess(tmp_path, nats_config.url, engine=engine)
    try:
        async with hand_scheduler(nats_config) as scheduler:
            await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
            assert scheduler.worker.num_devices == 4
            await scheduler.dispatch("r", 10)
            records: list[RequestRecord] = []

            async def is_recorded() -> bool:
                records.extend(await scheduler.records())
                return bool(records)

            await eventually(is_recorded, what="the record")
            (record,) = records
            assert (record.num_devices, record.completion_tokens) == (4, 10)
            assert record.device_us == pytest.approx(4 * (3_000 / 4 + 9 * 40_000 / 4), abs=4)
    finally:
        worker.stop()
