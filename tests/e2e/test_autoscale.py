"""``millrace up --autoscale``: workers follow the load, and streams survive their removal."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from tests.e2e.clients import chat_body
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="workers of a whole system come and go; the scheduler's tests decide by a clock"
    ),
]

NUM_SLOTS = 4
SETTINGS = {
    "worker": {
        "max_num_waiting": 0,
        "engine": {"max_num_sequences": NUM_SLOTS, "simulation": {"step_ms": 20.0}},
    },
    "scheduler": {
        "autoscale": {
            "target_wait_s": 0.2,
            "cold_start_s": 1.0,
            "scale_down_after_s": 1.0,
            "idle_s": 2.0,
        }
    },
}
# Longer than the test: streams that are not cancelled still run at its end.
NUM_TOKENS = 1_900


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[System]:
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(SETTINGS))
    arguments = (
        *("--port", "0", "--engine", "simulated", "--autoscale", "0:3"),
        *("--config", str(settings)),
    )
    running = System(tmp_path / "data", arguments=arguments).start()
    yield running
    assert running.stop() == 0


class Streams:
    """Generations on one WebSocket, by their ids; a token that is missing or repeated fails."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket
        self._reading = asyncio.create_task(self._read())
        self.num_tokens: dict[str, int] = {}  # in the order of their first tokens
        self.num_starts: dict[str, int] = {}
        self.cancelled: set[str] = set()

    async def ask(self, name: str) -> None:
        body = chat_body(f"Question {name}", max_tokens=NUM_TOKENS)
        await self._socket.send(json.dumps({"type": "generate", "id": name, **body}))

    async def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        await self._socket.send(json.dumps({"type": "cancel", "id": name}))

    async def _read(self) -> None:
        async for raw in self._socket:
            message: dict[str, Any] = json.loads(raw)
            name = message.get("id", "")
            match message["type"]:
                case "started":
                    self.num_starts[name] = self.num_starts.get(name, 0) + 1
                case "delta":
                    assert message["index"] == self.num_tokens.get(name, 0), "a gap"
                    self.num_tokens[name] = message["index"] + message["num_tokens"]
                case "done" | "error":
                    assert name in self.cancelled, message

    async def eventually_have(self, counts: dict[str, int]) -> None:
        """Wait until each of these streams has so many tokens. Raises a stream's error."""

        def enough() -> bool:
            if self._reading.done():
                self._reading.result()
                raise AssertionError("the socket was closed")
            return all(self.num_tokens.get(name, 0) >= count for name, count in counts.items())

        await eventually(enough, timeout_s=40.0, what="tokens of all streams")

    async def close(self) -> None:
        await self._socket.close()
        await self._reading


@asynccontextmanager
async def streams_of(system: System) -> AsyncIterator[Streams]:
    subprotocols = [websockets.Subprotocol("millrace.v1")]
    async with websockets.connect(system.websocket, subprotocols=subprotocols) as socket:
        streams = Streams(socket)
        yield streams
        await streams.close()


def _workers(system: System) -> set[str]:
    return {file.stem for file in (system.data / "run").glob("worker-*.pid")}


def _found_by_prometheus(system: System) -> set[str]:
    targets = json.loads((system.data / "run" / "metrics-targets.json").read_text())
    names = (target["labels"]["name"] for target in targets)
    return {name for name in names if name.startswith("worker-")}


async def test_workers_come_and_go_under_streams_that_go_on(scaled: System) -> None:
    assert _workers(scaled) == {"worker-1"}
    async with streams_of(scaled) as streams, httpx.AsyncClient(base_url=scaled.http) as http:
        names = [str(number) for number in range(2 * NUM_SLOTS + 1)]
        for name in names:
            await streams.ask(name)
        await streams.eventually_have(dict.fromkeys(names, 1))
        assert _workers(scaled) == {"worker-1", "worker-2", "worker-3"}
        assert _found_by_prometheus(scaled) == _workers(scaled)
        metrics = (await http.get("/metrics")).text
        assert 'millrace_desired_workers{model="demo"} 3.0' in metrics

        # One of each worker stays: they came in the order of the workers' starts.
        kept = list(streams.num_tokens)[::NUM_SLOTS]
        for name in names:
            if name not in kept:
                await streams.cancel(name)
        await eventually(lambda: len(_workers(scaled)) == 1, timeout_s=30.0)
        await streams.eventually_have({name: streams.num_tokens[name] + 20 for name in kept})
        assert sum(streams.num_starts[name] - 1 for name in kept) >= 2, "none was moved"
        for name in kept:
            await streams.cancel(name)
        await eventually(lambda: not _workers(scaled), timeout_s=30.0)
        await eventually(lambda: not _found_by_prometheus(scaled))
        # The first request wakes the model.
        await streams.ask("late")
        await streams.eventually_have({"late": 1})
        assert len(_workers(scaled)) == 1
        await streams.cancel("late")
    output = scaled.output()
    # Two may be wanted before it shows that three are.
    assert re.search("worker-2 is starting: [23] are wanted for demo", output)
    assert "is stopping: 1 is wanted for demo" in output
    assert "worker-1 is starting: 1 is wanted for demo" in output
    assert "starting it again" not in output
