"""Requests whose gateway is gone: their holder, and the answer for a late client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from millrace.schemas.frames import Cancelled
from tests.gateway.resuming.clients import (
    TAKES_EVENTS,
    Pair,
    Reading,
    begin_and_cut,
    opened,
    receive,
    send,
    until,
)
from tests.support.running_gateway import MODEL, RunningGateway

_MESSAGES = [{"role": "user", "content": "mill race"}]
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES},
    "/v1/completions": {"prompt": "mill race"},
    "/v1/responses": {"input": "mill race"},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 64},
}


async def _drip(front: RunningGateway) -> None:
    while True:
        front.worker.gate.set()
        await asyncio.sleep(0.005)
        front.worker.gate.clear()
        await asyncio.sleep(0.005)


async def test_a_request_is_held_by_the_gateway_that_has_its_client(pair: Pair) -> None:
    """The first gateway holds the request while its client may return, then the second does."""
    ask = pair.second.gateway.bus.control.held_requests
    reading = Reading()
    await begin_and_cut(pair.first, reading, asyncio.create_task(_drip(pair.first)))
    request_id = reading.request_id
    assert await ask("gw-1", [request_id, "other"], 0.1) == {request_id}
    await pair.kill_first()
    assert await ask("gw-1", [request_id], 0.1) == frozenset()
    async with opened(pair.second) as socket:
        fields = {"request_id": request_id, "next_index": reading.next_index}
        await send(socket, "resume", id="b", **fields)
        reading.take(await until(socket, "accepted"))
        assert await ask("gw-1", [request_id, "other"], 0.1) == {request_id}
        pair.worker.gate.set()
        reading.take(await until(socket, "done"))
    assert await ask("gw-1", [request_id], 0.1) == frozenset()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", _BODIES)
async def test_an_orphaned_end_has_its_own_error(pair: Pair, path: str, *, stream: bool) -> None:
    pair.worker.stop_before = 3
    pair.worker.end_with = Cancelled(num_tokens=3, reason="orphaned")
    body = {"model": MODEL, "stream": stream} | _BODIES[path]
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        answer = await http.post(path, json=body, headers=TAKES_EVENTS if stream else {})
    assert answer.status_code == (200 if stream else 410)
    assert "orphaned" in answer.text or path == "/v1/messages"
    assert "gateway.orphan_grace_s" in answer.text
    assert "Send the request again" in answer.text


async def test_an_orphaned_end_has_its_own_error_on_a_socket(pair: Pair) -> None:
    pair.worker.stop_before = 3
    pair.worker.end_with = Cancelled(num_tokens=3, reason="orphaned")
    async with opened(pair.first) as socket:
        await send(socket, "generate", id="a", model=MODEL, prompt="mill race")
        message = await receive(socket)
        while message["type"] not in ("done", "error"):
            message = await receive(socket)
    assert (message["type"], message["code"]) == ("error", "orphaned")
