"""Life cycle of a batch: cancellation, expiry, files in use."""

from __future__ import annotations

import asyncio

import openai
import pytest
from msgspec.structs import replace

from millrace.gateway.batches.runner import in_turn
from millrace.gateway.batches.store import BatchRecord, BatchStore
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.control import QueueStatus
from tests.support.batches.batch_system import (
    BatchGateway,
    batch_gateway,
    batch_worker,
    by_id,
    chat_line,
    in_memory,
)
from tests.support.batches.batch_worker import BatchWorker
from tests.support.running_gateway import MODEL
from tests.support.waiting import eventually


async def test_listed_newest_first_in_pages(redis: RedisConfig) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis) as front, batch_worker(connect):
        made = [await front.begin([chat_line("a", "x")]) for _ in range(5)]
        newest_first = [batch.id for batch in reversed(made)]
        page = await front.client.batches.list(limit=2)
        assert [batch.id for batch in page.data] == newest_first[:2]
        assert page.has_more
        found = [batch.id async for batch in front.client.batches.list(limit=2)]
        assert found == newest_first
        await front.end(made[-1])


async def test_a_batch_is_begun_at_once_where_it_was_created(
    front: BatchGateway, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = front.gateway
    monkeypatch.setattr(gateway, "config", replace(gateway.config, batch_scan_s=3_600.0))
    for _ in range(2):
        batch = await front.end(await front.begin([chat_line("a", "hi")]))
        assert batch.status == "completed"


async def test_cancelled_in_the_middle(front: BatchGateway, worker: BatchWorker) -> None:
    batch = await front.begin([chat_line(f"c{number}", "hi") for number in range(300)])
    worker.hold_after = 20
    await eventually(lambda: worker.num_running >= 100)
    cancelling = await front.client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert (await front.client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await front.end(batch)
    assert batch.status == "cancelled"
    counts = batch.request_counts
    assert counts is not None
    assert counts.completed == 20
    assert counts.failed == 280
    answered = by_id(await front.lines(batch.output_file_id))
    not_run = by_id(await front.lines(batch.error_file_id))
    assert len(answered) == 20
    assert not answered.keys() & not_run.keys()
    assert {line["error"]["code"] for line in not_run.values()} == {"batch_cancelled"}
    assert {line["response"] is None for line in not_run.values()} == {True}
    await eventually(lambda: worker.num_running == 0)


async def test_cancelled_before_anybody_has_looked_at_it(redis: RedisConfig) -> None:
    connect = in_memory()
    config = GatewayConfig(max_batches_at_once=0)
    async with batch_gateway(connect, redis, config) as idle:
        good = await idle.begin([chat_line("a", "x"), chat_line("b", "x")])
        bad = await idle.begin([{"nothing": "good"}])
        for batch in (good, bad):
            assert (await idle.client.batches.cancel(batch.id)).status == "cancelling"
        async with batch_gateway(connect, redis) as front:
            good, bad = await front.end(good), await front.end(bad)
            assert (good.status, bad.status) == ("cancelled", "failed")
            not_run = await front.lines(good.error_file_id)
            assert [line["custom_id"] for line in not_run] == ["a", "b"]


async def test_the_window_ends(front: BatchGateway, worker: BatchWorker) -> None:
    worker.hold_after = 2
    batch = await front.begin([chat_line(f"c{number}", "hi") for number in range(5)])
    await eventually(lambda: worker.num_running == 3)
    store = BatchStore(front.gateway.bus.journal)

    def over(record: BatchRecord) -> BatchRecord:
        return replace(record, batch=replace(record.batch, expires_at=1))

    await store.change("local", batch.id, over)
    batch = await front.end(batch)
    assert batch.status == "expired"
    assert len(await front.lines(batch.output_file_id)) == 2
    not_run = await front.lines(batch.error_file_id)
    assert [line["error"]["code"] for line in not_run] == ["batch_expired"] * 3


async def test_a_file_in_use_stays(front: BatchGateway, worker: BatchWorker) -> None:
    worker.gate.clear()
    batch = await front.begin([chat_line("a", "x")])
    with pytest.raises(openai.ConflictError, match=batch.id):
        await front.client.files.delete(batch.input_file_id)
    worker.gate.set()
    await front.end(batch)
    assert (await front.client.files.delete(batch.input_file_id)).deleted


async def test_a_file_is_free_as_soon_as_its_batch_says_that_it_has_ended(
    front: BatchGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = asyncio.Event()

    async def close(_store: BatchStore, _tenant: str, _batch_id: str) -> None:
        await closing.wait()

    monkeypatch.setattr(BatchStore, "close", close)
    batch = await front.end(await front.begin([{"nothing": "good"}]))
    assert (await front.client.files.delete(batch.input_file_id)).deleted
    closing.set()


async def test_a_queue_is_never_filled_by_batches(redis: RedisConfig) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis) as front, batch_worker(connect) as worker:
        crowd = QueueStatus(model=MODEL, num_queued=50, bound=100, retry_after_s=0.1)
        front.gateway.fleet.on_queue(crowd)
        batch = await front.begin([chat_line("a", "x")])

        async def is_in_progress() -> bool:
            return (await front.client.batches.retrieve(batch.id)).status == "in_progress"

        await eventually(is_in_progress)
        assert worker.jobs == []
        front.gateway.fleet.on_queue(replace(crowd, num_queued=49))
        assert (await front.end(batch)).status == "completed"


async def test_a_file_that_goes_away_under_its_batch(redis: RedisConfig) -> None:
    connect = in_memory()
    config = GatewayConfig(batch_lines_at_once=2)
    async with batch_gateway(connect, redis, config) as front, batch_worker(connect) as worker:
        worker.gate.clear()
        lines = [chat_line(f"c{number}", "x" * 2_000) for number in range(400)]
        batch = await front.begin(lines)
        await eventually(lambda: worker.num_running == 2)
        assert await front.gateway.bus.objects.delete("local", batch.input_file_id)
        worker.gate.set()
        batch = await front.end(batch)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["file_lost"]
        answers = by_id(await front.lines(batch.output_file_id))
        assert 2 <= len(answers) < 400


async def test_one_tenants_batches_wait_behind_anothers_first() -> None:
    waiting = [("acme", "b1"), ("acme", "b2"), ("acme", "b3"), ("other", "b4")]
    assert [batch_id for _, batch_id in in_turn(waiting, [])] == ["b1", "b4", "b2", "b3"]
    assert [batch_id for _, batch_id in in_turn(waiting, ["other"])] == ["b1", "b2", "b4", "b3"]
