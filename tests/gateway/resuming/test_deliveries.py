"""Delivery records of resumed sockets: one record for each client."""

from __future__ import annotations

import asyncio
import time

from millrace.bus import codec
from millrace.gateway.streams.stream import StreamPhase
from millrace.runtime.metrics_server import render
from millrace.schemas.records import DeliveryRecord
from tests.gateway.resuming.clients import (
    TEXT,
    Pair,
    Reading,
    begin_and_cut,
    go_on,
    opened,
    send,
    slow,
    until,
)
from tests.support.running_gateway import MODEL
from tests.support.waiting import eventually


async def records(pair: Pair) -> list[DeliveryRecord]:
    """All that are in the outbox, the oldest first."""
    await eventually(
        lambda: not (len(pair.first.gateway.streams) + len(pair.second.gateway.streams))
    )
    found: list[DeliveryRecord] = []
    while messages := await pair.worker.bus.outbox.pull(16, 0.2):
        for message in messages:
            record = codec.RECORD.decode(message.payload, codec.MSGPACK)
            assert isinstance(record, DeliveryRecord)
            found.append(record)
    return found


async def test_a_return_to_the_same_gateway(pair: Pair) -> None:
    reading = Reading()
    dripping = await slow(pair.worker)
    await begin_and_cut(pair.first, reading, dripping)
    assert reading.next_index < len(TEXT)
    await go_on(pair, pair.first, reading)
    assert reading.text == TEXT
    assert not pair.worker.cancelled
    assert len(pair.worker.jobs) == 1
    [record] = await records(pair)
    assert (record.outcome, record.num_resumes, record.num_epochs) == ("done", 1, 1)
    assert record.tokens_delivered == len(TEXT)
    assert 0 < record.first_byte_ms < record.total_ms
    assert 0 < record.longest_gap_ms < record.total_ms


async def test_a_move_to_another_gateway(pair: Pair) -> None:
    begun_s = time.monotonic()
    reading = Reading()
    dripping = await slow(pair.worker)
    await begin_and_cut(pair.first, reading, dripping)
    cut_s = time.monotonic()
    await asyncio.sleep(1.05)  # what is measured here is time
    away_ms = (time.monotonic() - cut_s) * 1e3
    await go_on(pair, pair.second, reading)
    [record] = await records(pair)
    assert (record.gateway_id, record.outcome, record.num_resumes) == ("gw-2", "done", 1)
    assert record.tokens_delivered == len(TEXT)
    assert (record.num_stalls, record.num_epochs) == (1, 1)
    assert away_ms <= record.stalled_ms == record.longest_gap_ms < record.total_ms
    assert 0 < record.first_byte_ms < away_ms
    assert record.total_ms <= (time.monotonic() - begun_s) * 1e3


async def test_a_death_of_the_gateway_that_began(pair: Pair) -> None:
    reading = Reading()
    dripping = await slow(pair.worker)
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=TEXT)
        while reading.next_index < 5:
            reading.take(await until(socket, "delta"))
        begun_s = time.monotonic()  # no sooner than the gateway received the request
        pair.worker.gate.clear()
        dripping.cancel()
        await pair.kill_first()
        pair.worker.gate.clear()
        socket.transport.abort()
    killed_ms = (time.monotonic() - begun_s) * 1e3
    await go_on(pair, pair.second, reading)
    assert reading.text == TEXT
    assert len(pair.worker.jobs) == 1
    await eventually(lambda: not len(pair.second.gateway.streams))
    found = [
        codec.RECORD.decode(message.payload, codec.MSGPACK)
        for message in await pair.worker.bus.outbox.pull(16, 5)
    ]
    [record] = [r for r in found if isinstance(r, DeliveryRecord) and r.gateway_id == "gw-2"]
    assert (record.outcome, record.num_resumes) == ("done", 1)
    assert record.tokens_delivered == len(TEXT)
    assert record.first_byte_ms == 0  # unknown after the death
    assert record.total_ms > killed_ms


async def test_an_end_that_came_while_the_client_was_away(pair: Pair) -> None:
    """The gateway that held the stream has left a record by then; the last one says it all."""
    reading = Reading()
    dripping = await slow(pair.worker)
    await begin_and_cut(pair.first, reading, dripping)
    await eventually(
        lambda: all(s.phase is StreamPhase.DETACHED for s in pair.first.gateway.streams)
    )
    num_seen = [stream.num_seen for stream in pair.first.gateway.streams]
    pair.worker.gate.set()
    [early] = await records(pair)
    assert early.outcome == "disconnected"
    assert early.tokens_delivered == num_seen[0] < len(TEXT)
    assert generations_and_returns(pair) == (1, 0)
    await go_on(pair, pair.second, reading)
    [late] = await records(pair)
    assert late.request_id == early.request_id
    assert (late.outcome, late.num_resumes) == ("done", 1)
    assert late.tokens_delivered == len(TEXT)
    assert late.first_byte_ms - early.first_byte_ms < 1
    assert late.total_ms > early.total_ms
    assert generations_and_returns(pair) == (1, 1)


def generations_and_returns(pair: Pair) -> tuple[float, float]:
    names = ("millrace_generations_total", "millrace_resumes_total")
    texts = [render(front.gateway.metrics.registry).decode() for front in (pair.first, pair.second)]
    lines = [line for text in texts for line in text.splitlines()]
    first, second = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
        for name in names
    )
    return first, second
