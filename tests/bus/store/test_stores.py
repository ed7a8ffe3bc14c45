"""Results and outbox, on memory and on nats-server alike."""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal

import pytest

from millrace.bus import codec
from millrace.bus.api import Bus
from millrace.schemas.errors import PayloadTooLargeError
from millrace.schemas.frames import FinishReason, TokenLogprob, Usage
from millrace.schemas.jobs import JobResult, Source
from millrace.schemas.records import DeliveryRecord, Record, RequestRecord, WorkerSample
from tests.bus.conftest import Broker


def request_record(request_id: str) -> RequestRecord:
    return RequestRecord(request_id=request_id, tenant="t", cost=Decimal("0.000125"))


class TestResults:
    async def test_kept_until_fetched_the_first_one_wins(self, bus: Bus, broker: Broker) -> None:
        result = JobResult(
            request_id="r.1",
            tenant="acme corp",
            model="demo",
            status="done",
            text="né",
            finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=1, completion_tokens=2),
        )
        assert await bus.results.fetch("acme corp", "r.1") is None
        await bus.results.store(result)
        await bus.results.store(
            JobResult(request_id="r.1", tenant="acme corp", model="", status="")
        )
        other = await broker.connect("client")
        assert await other.results.fetch("acme corp", "r.1") == result
        assert await other.results.fetch("other", "r.1") is None

    async def test_a_result_comes_back_unchanged(self, bus: Bus) -> None:
        score = TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.5)))
        result = JobResult(
            request_id="r",
            tenant="t",
            model="m",
            status="done",
            text="né",
            token_ids=(7, 8),
            text_ends=(1, 2),
            logprobs=(score, TokenLogprob(8, -3e-7)),
            prompt_logprobs=(None, score),
            embedding=bytes(range(256)),
        )
        await bus.results.store(result)
        assert await bus.results.fetch("t", "r") == result

    async def test_too_large(self, bus: Bus) -> None:
        text = "x" * bus.max_payload_bytes
        with pytest.raises(PayloadTooLargeError):
            await bus.results.store(
                JobResult(request_id="r", tenant="t", model="m", status="done", text=text)
            )


class TestOutbox:
    async def test_records_come_out_in_order_once(self, bus: Bus, broker: Broker) -> None:
        assert await bus.outbox.last_sequence() == 0
        records: list[Record] = [
            request_record("r1"),
            DeliveryRecord(request_id="r1", gateway_id="g", tenant="t", source=Source.HTTP),
            WorkerSample(worker_id="w", name="w", model="m", sampled_ns=1, period_ms=1.0),
            WorkerSample(worker_id="w", name="w", model="m", sampled_ns=2, period_ms=1.0),
            request_record("r2"),
        ]
        for record in (*records, records[0], records[1], records[2]):
            await bus.outbox.publish(record)
        assert await bus.outbox.last_sequence() == 5
        assert await bus.outbox.num_waiting() == 5
        bridge = await broker.connect("bridge")
        first = await bridge.outbox.pull(3, 1.0)
        assert await bus.outbox.num_waiting() == 5, "held is not taken yet"
        second = await bridge.outbox.pull(9, 1.0)
        messages = [*first, *second]
        assert [codec.RECORD.decode(message.payload) for message in messages] == records
        assert [message.sequence for message in messages] == [1, 2, 3, 4, 5]
        assert [message.subject for message in messages] == [
            "rec.request",
            "rec.delivery",
            "rec.worker",
            "rec.worker",
            "rec.request",
        ]
        await bridge.outbox.ack(messages)
        assert await bridge.outbox.pull(9, 0.05) == []
        assert await bus.outbox.num_waiting() == 0

    async def test_a_waiting_pull_ends_with_the_first_record(self, bus: Bus) -> None:
        waiting = asyncio.ensure_future(bus.outbox.pull(100, 10.0))
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
        await bus.outbox.publish(request_record("r1"))
        assert len(await waiting) == 1
        assert time.monotonic() - started_s < 1.0

    async def test_the_place_is_kept_over_a_restart_of_the_bridge(
        self, bus: Bus, broker: Broker
    ) -> None:
        for number in range(4):
            await bus.outbox.publish(request_record(f"r{number}"))
        bridge = await broker.connect("bridge")
        await bridge.outbox.ack(await bridge.outbox.pull(2, 1.0))
        await bridge.close()
        again = await broker.connect("bridge")
        assert [message.sequence for message in await again.outbox.pull(9, 1.0)] == [3, 4]

    async def test_rewind(self, bus: Bus, broker: Broker) -> None:
        for number in range(5):
            await bus.outbox.publish(request_record(f"r{number}"))
        await bus.outbox.ack(await bus.outbox.pull(5, 1.0))
        other = await broker.connect("bridge")
        for after, expected in ((2, [3, 4, 5]), (0, [1, 2, 3, 4, 5]), (5, [])):
            for bridge in (bus, other):
                await bridge.outbox.rewind(after)
                pulled = await bridge.outbox.pull(9, 1.0 if expected else 0.05)
                assert [message.sequence for message in pulled] == expected
        await bus.outbox.publish(request_record("r9"))
        assert [message.sequence for message in await bus.outbox.pull(9, 1.0)] == [6]

    async def test_rewound_past_its_end_it_starts_at_its_beginning(self, bus: Bus) -> None:
        await bus.outbox.publish(request_record("r1"))
        await bus.outbox.rewind(900)
        assert [message.sequence for message in await bus.outbox.pull(9, 1.0)] == [1]

    async def test_records_that_wait_for_each_other_are_each_stored_once(self, bus: Bus) -> None:
        ids = [f"r{number}" for number in range(50)]
        twice = [request_record(request_id) for request_id in (*ids, *ids)]
        await asyncio.gather(*(bus.outbox.publish(record, 0.02) for record in twice))
        await bus.outbox.publish(request_record("alone"), 0.001)
        pulled = await bus.outbox.pull(99, 1.0)
        stored = [codec.RECORD.decode(message.payload) for message in pulled]
        assert stored == [request_record(request_id) for request_id in (*ids, "alone")]

    async def test_a_too_large_record_fails_alone(self, bus: Bus) -> None:
        large = RequestRecord(request_id="x" * bus.max_payload_bytes, tenant="t", cost=Decimal(0))
        records = (request_record("r1"), large, request_record("r2"))
        outcomes = await asyncio.gather(
            *(bus.outbox.publish(record, 0.01) for record in records), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [
            type(None),
            PayloadTooLargeError,
            type(None),
        ]
        assert await bus.outbox.last_sequence() == 2

    async def test_a_cancelled_publisher_does_not_delay_others(self, bus: Bus) -> None:
        publishing = [
            asyncio.ensure_future(bus.outbox.publish(request_record(f"r{number}"), 0.05))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        publishing[0].cancel()
        await asyncio.wait(publishing)
        assert [publish.cancelled() for publish in publishing[1:]] == [False, False]
        assert await bus.outbox.last_sequence() >= 2

    async def test_ack_of_nothing(self, bus: Bus) -> None:
        await bus.outbox.ack([])
