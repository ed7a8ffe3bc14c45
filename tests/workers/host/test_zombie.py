"""Worker that was taken for dead, on a real nats-server: it answers no request of another
worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.bus.running_requests import RunningRequestIndex
from millrace.schemas.config import NatsConfig, RedisConfig
from millrace.schemas.control import Cancel, CancelReason
from tests.support.servers import NatsServer, RedisServer
from tests.support.waiting import eventually
from tests.workers.worker_process import LINE, HandScheduler, WorkerProcess, hand_scheduler

pytestmark = pytest.mark.timeout(120)

_NUM_TOKENS = 200
_NAMES = [f"r{number}" for number in range(4)]
# Longer than what a scheduler takes for a worker's death.
_STOPPED_S = 2.5


@pytest.fixture
def redis_config(redis_server: RedisServer) -> RedisConfig:
    return RedisConfig(url=redis_server.url)


@pytest.fixture
def worker(
    tmp_path: Path, nats_config: NatsConfig, redis_config: RedisConfig
) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path, nats_config.url, redis_config)
    yield process
    process.stop()


async def _begin(scheduler: HandScheduler, worker: WorkerProcess) -> None:
    """Begin requests that make no progress, as their engine is stopped."""
    await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
    for name in _NAMES:
        await scheduler.dispatch(name, _NUM_TOKENS)
    await eventually(lambda: all(scheduler.tokens(name) for name in _NAMES))
    worker.engine().suspend()


def _ended_ids(scheduler: HandScheduler) -> set[str]:
    """Return the requests that the worker reported as gone."""
    return {request_id for ended in scheduler.ended for request_id in ended.request_ids}


async def _num_leased(scheduler: HandScheduler) -> int:
    return (await scheduler.bus.jobs.depth(LINE)).num_leased


async def test_an_ack_for_an_earlier_delivery_ends_the_job(nats_config: NatsConfig) -> None:
    """The server accepts the ack of an earlier delivery, so a worker must not ack a job that may be
    another's."""
    async with hand_scheduler(NatsConfig(url=nats_config.url, ack_wait_s=0.5)) as scheduler:
        await scheduler.publish("r", 1)
        (first,) = await scheduler.bus.jobs.pull(LINE, 1, 5.0)
        (second,) = await scheduler.bus.jobs.pull(LINE, 1, 5.0)
        assert (first.num_deliveries, second.num_deliveries) == (1, 2)
        await scheduler.bus.jobs.ack(first.lease)
        assert not await scheduler.bus.jobs.is_open(second.stream_sequence)


async def test_a_stopped_worker_wakes_up_to_the_last_tokens_and_the_news_at_once(
    worker: WorkerProcess, nats_config: NatsConfig
) -> None:
    """The worker's engine goes on meanwhile, so all of its requests are over when the worker
    wakes."""
    async with hand_scheduler(nats_config) as scheduler:
        await _begin(scheduler, worker)
        os.kill(worker.popen.pid, signal.SIGSTOP)
        worker.engine().resume()
        stopped_s = time.monotonic()
        for name in _NAMES:
            await scheduler.bus.control.cancel(
                Cancel(request_id=name, reason=CancelReason.SUPERSEDED, below_epoch=2)
            )
        await eventually(lambda: time.monotonic() - stopped_s > _STOPPED_S)
        os.kill(worker.popen.pid, signal.SIGCONT)
        await eventually(lambda: _ended_ids(scheduler) == set(_NAMES))
        assert await _num_leased(scheduler) == len(_NAMES), "the jobs are the new runs' to end"
        assert not await scheduler.records()
        assert all(served.completion_tokens for e in scheduler.ended for served in e.served)


async def test_a_worker_that_was_cut_off_learns_from_the_index_what_it_was_not_told(
    worker: WorkerProcess,
    nats_config: NatsConfig,
    nats_server: NatsServer,
    redis_config: RedisConfig,
) -> None:
    index = RunningRequestIndex(redis_config)
    try:
        async with hand_scheduler(nats_config) as scheduler:
            await _begin(scheduler, worker)
            nats_server.stop()
            for name in _NAMES[:2]:
                await index.start(name, "another", 2)
            nats_server.start()
            worker.engine().resume()
            await eventually(lambda: _ended_ids(scheduler) == set(_NAMES), 20.0, "the ends")
            records = await scheduler.records()
            assert sorted(record.request_id for record in records) == _NAMES[2:]
            assert await _num_leased(scheduler) == 2
    finally:
        await index.close()
