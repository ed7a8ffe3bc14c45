"""Requests of one tenant at a busy worker: the lowest ``priority`` is served first."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.e2e.clients import chat_body
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts a system for one order of requests that the scheduler's tests check"
    ),
]

_SETTINGS = {
    "worker": {
        "max_num_waiting": 0,
        "engine": {"max_num_sequences": 1, "simulation": {"step_ms": 20.0}},
    }
}
# The order in which they are asked.
_PRIORITIES = {"late": 9, "usual": 0, "urgent": -5, "early": -1}


@pytest.fixture
def saturated(tmp_path: Path) -> Iterator[System]:
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(_SETTINGS))
    arguments = ("--port", "0", "--engine", "simulated", "--config", str(settings))
    running = System(tmp_path / "data", arguments=arguments).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
async def socket(saturated: System) -> AsyncIterator[websockets.ClientConnection]:
    subprotocols = [websockets.Subprotocol("millrace.v1")]
    async with websockets.connect(saturated.websocket, subprotocols=subprotocols) as connected:
        yield connected


async def _ask(socket: websockets.ClientConnection, name: str, **options: Any) -> None:
    body = chat_body(f"Question {name}", **options)
    await socket.send(json.dumps({"type": "generate", "id": name, **body}))


async def _names_of(socket: websockets.ClientConnection, kind: str, count: int) -> list[str]:
    """Return the ids of the next ``count`` requests with a message of this kind, in order."""
    names: list[str] = []
    while len(names) < count:
        message = json.loads(await socket.recv())
        assert message["type"] != "error", message
        if message["type"] == kind and message["id"] not in names:
            names.append(message["id"])
    return names


@pytest.mark.slow(reason="starts a system; tests/scheduler/queues holds the order")
async def test_the_lowest_priority_is_served_first(socket: websockets.ClientConnection) -> None:
    await _ask(socket, "running", max_tokens=1_900)
    assert await _names_of(socket, "started", 1) == ["running"]
    for name, priority in _PRIORITIES.items():
        await _ask(socket, name, max_tokens=4, priority=priority)
        # It waits in the scheduler: its place is known there.
        assert await _names_of(socket, "queued", 1) == [name]
    await socket.send(json.dumps({"type": "cancel", "id": "running"}))
    assert await _names_of(socket, "started", 4) == sorted(_PRIORITIES, key=_PRIORITIES.__getitem__)
