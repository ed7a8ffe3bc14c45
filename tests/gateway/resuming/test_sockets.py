"""Generations resumed over another socket, at the same gateway or at another."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.schemas.config import GatewayConfig, RedisConfig
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
from tests.support.running_gateway import MODEL, running_gateway
from tests.support.waiting import eventually


async def test_a_lost_socket_goes_on_at_another_gateway(pair: Pair) -> None:
    reading = Reading()
    dripping = await slow(pair.worker)
    await begin_and_cut(pair.first, reading, dripping)
    async with opened(pair.second) as socket:
        await send(
            socket, "resume", id="b", request_id=reading.request_id, next_index=reading.next_index
        )
        reading.take(await until(socket, "accepted"))
        # The first has let go of it, and does not cancel it when its patience is over.
        assert len(pair.first.gateway.streams) == 0
        pair.worker.gate.set()
        reading.take(await until(socket, "done"))
    assert reading.text == TEXT
    assert not pair.worker.cancelled
    await eventually(lambda: len(pair.second.gateway.streams) == 0)


async def test_a_request_queued_at_a_dead_gateway_is_served_by_another(pair: Pair) -> None:
    """Not even its first frame came: the other gateway listens in the dead one's place."""
    reading = Reading()
    pair.worker.lose = lambda _frame: True
    pair.worker.gate.clear()
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=TEXT)
        reading.take(await until(socket, "accepted"))
        await pair.kill_first()
        socket.transport.abort()
    pair.worker.lose = lambda _frame: False
    await go_on(pair, pair.second, reading)
    assert reading.text == TEXT


async def test_a_client_that_says_goodbye_is_not_waited_for(pair: Pair) -> None:
    dripping = await slow(pair.worker)
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=TEXT)
        await until(socket, "delta")
    await eventually(lambda: len(pair.worker.cancelled) == 1)
    dripping.cancel()


async def test_a_client_that_stays_away_loses_its_request(redis: RedisConfig) -> None:
    config = GatewayConfig(resume_grace_s=0.05)
    async with running_gateway(config, redis=redis) as front:
        front.worker.stop_before = 3
        async with opened(front) as socket:
            await send(socket, "generate", id="a", model=MODEL, prompt=TEXT)
            await until(socket, "delta")
            socket.transport.abort()
        await eventually(lambda: len(front.worker.cancelled) == 1)
        await eventually(lambda: len(front.gateway.streams) == 0)


async def test_the_newest_connection_has_the_stream(pair: Pair) -> None:
    """The older connection is told when another one takes over its generation."""
    dripping = await slow(pair.worker)
    reading, late = Reading(), Reading()
    async with opened(pair.first) as one, opened(pair.second) as other:
        await send(one, "generate", id="a", model=MODEL, prompt=TEXT)
        reading.take(await until(one, "delta"))
        await send(other, "resume", id="b", request_id=reading.request_id)
        late.take(await until(other, "done"))
        messages = await until(one, "error")
    dripping.cancel()
    assert late.text == TEXT
    assert (messages[-1]["code"], messages[-1]["id"]) == ("taken_over", "a")


@pytest.mark.parametrize("next_index", [3, [3]])
async def test_only_the_owner_may_resume_and_what_is_unknown_is_said(
    pair: Pair, next_index: object
) -> None:
    async with opened(pair.first) as socket:
        await send(socket, "resume", id="b", request_id="chatcmpl-0", next_index=next_index)
        error = (await until(socket, "error"))[-1]
    assert (error["code"], error["param"], error["id"]) == ("request_not_found", "request_id", "b")


@pytest.mark.parametrize("next_index", [[1], [], [0, 0, 0], 0, [0, -1]])
async def test_an_index_of_each_choice_must_be_given(pair: Pair, next_index: Any) -> None:
    reading = Reading()
    pair.worker.gate.clear()
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt=TEXT, n=2)
        reading.take(await until(socket, "accepted"))
        await send(socket, "resume", id="b", request_id=reading.request_id, next_index=next_index)
        error = (await until(socket, "error"))[-1]
        assert (error["code"], error["param"]) == ("invalid_parameter", "next_index")
        pair.worker.gate.set()
        await until(socket, "done")
