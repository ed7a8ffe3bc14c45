"""Device time over the bus: the times of requests add up to the busy time of the worker's
device."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.bus.codec import RECORD
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.records import Record, RequestRecord, WorkerSample
from tests.support.waiting import eventually
from tests.workers.worker_process import HandScheduler, WorkerProcess, hand_scheduler

pytestmark = pytest.mark.timeout(120)

_NUM_REQUESTS = 24


@pytest.fixture
def worker(tmp_path: Path, nats_config: NatsConfig) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path, nats_config.url, drain_timeout_s=0.2, sample_interval_s=0.5)
    yield process
    process.stop()


async def _everything(scheduler: HandScheduler) -> list[Record]:
    """Pull all records of the outbox."""
    pulled = await scheduler.bus.outbox.pull(1000, 1.0)
    await scheduler.bus.outbox.ack(pulled)
    return [RECORD.decode(message.payload) for message in pulled]


async def test_records_and_notices_add_up_to_the_samples(
    worker: WorkerProcess, nats_config: NatsConfig
) -> None:
    """The requests end, are cancelled or superseded, and one is given back when the worker ends."""
    draw = random.Random(7)
    async with hand_scheduler(nats_config) as scheduler:
        await eventually(lambda: bool(scheduler.statuses), 60.0, "the first heartbeat")
        for number in range(_NUM_REQUESTS):
            await scheduler.dispatch(f"r{number}", draw.randint(5, 120))
            if number % 3 == 1:
                name = f"r{number - draw.randint(0, 1)}"
                await scheduler.bus.control.cancel(Cancel(request_id=name))
            elif number % 6 == 2:
                reason = CancelReason.SUPERSEDED
                cancel = Cancel(request_id=f"r{number}", reason=reason, below_epoch=2)
                await scheduler.bus.control.cancel(cancel)
        await scheduler.dispatch("rest", 900)
        await eventually(lambda: len(scheduler.tokens("rest")) > 5, 30.0)
        worker.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.popen.wait, 20.0) == 0, worker.log.read_text()
        stored = await _everything(scheduler)
        records = {one.request_id: one for one in stored if isinstance(one, RequestRecord)}
        samples = [one for one in stored if isinstance(one, WorkerSample)]
        notices = [served for notice in scheduler.ended for served in notice.served]
        elsewhere_us = sum(one.device_us for one in notices if one.request_id not in records)
        for served in notices:
            if served.request_id in records:
                assert served.device_us == records[served.request_id].device_us
        assert {"cancelled", "done"} <= {record.status.value for record in records.values()}
        assert "rest" not in records
        assert elsewhere_us > 0
        busy_us = sum(sample.busy_us for sample in samples)
        took_us = sum(record.device_us for record in records.values()) + elsewhere_us
        assert took_us == pytest.approx(busy_us, rel=0.01)
        assert sum(sample.charged_us for sample in samples) == pytest.approx(busy_us, rel=1e-6)
