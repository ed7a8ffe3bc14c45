"""``python -m millrace.gateway`` as a process, on a real nats-server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from millrace.bus import nats
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from tests.support.echo_worker import EchoWorker
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.servers import free_port
from tests.support.waiting import eventually

_START_TIMEOUT_S = 30.0
Start = Callable[[int], Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def bus(nats_config: NatsConfig) -> AsyncIterator[NatsBus]:
    connected = await nats.connect(nats_config, "test", part=Part.SCHEDULER)
    yield connected
    await connected.close()


@pytest.fixture
async def worker(bus: NatsBus) -> AsyncIterator[EchoWorker]:
    made = EchoWorker(bus, "tiny", script=lambda _job: "an answer")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def start(nats_config: NatsConfig, tmp_path: Path) -> AsyncIterator[Start]:
    """Yield a function that starts gateways on a port; running ones are killed at the end."""
    write_checkpoint(tmp_path / "tiny")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text("models:\n  tiny:\n    source: ./tiny\n")
    processes: list[asyncio.subprocess.Process] = []

    async def start_one(port: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway",
            env=os.environ
            | {
                "MILLRACE_NATS__URL": nats_config.url,
                # No server: the default port may have another Redis of this machine.
                "MILLRACE_REDIS__URL": "redis://127.0.0.1:1/0",
                "MILLRACE_CATALOGUE": str(catalogue),
                "MILLRACE_GATEWAY__PORT": str(port),
            },
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process: asyncio.subprocess.Process) -> None:
    """Return when the process says so."""
    assert process.stderr is not None
    seen = b""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while line := await process.stderr.readline():
            seen += line
            if line.startswith(b"{") and json.loads(line)["message"] == "ready":
                return
    raise AssertionError(f"the gateway did not start:\n{seen.decode()}")


async def test_a_gateway_process_serves_drains_and_ends(start: Start, worker: EchoWorker) -> None:
    port = free_port()
    process = await start(port)
    await ready(process)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        await eventually_healthy(http)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "an answer"
        assert answer.json()["usage"]["completion_tokens"] == 9
        worker.gate.clear()
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await eventually(lambda: len(worker.jobs) == 2)
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: not accepts(port))
        worker.gate.set()
        assert (await asking).json()["choices"][0]["message"]["content"] == "an answer"
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def eventually_healthy(http: httpx.AsyncClient) -> None:
    async def healthy() -> bool:
        return bool((await http.get("/healthz")).json()["status"] == "ok")

    await eventually(healthy)


def accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


async def test_two_share_a_port(start: Start, worker: EchoWorker) -> None:
    port = free_port()
    both = [await start(port), await start(port)]
    await asyncio.gather(*map(ready, both))
    gateways = set()
    for _ in range(64):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            gateways.add((await http.get("/healthz")).json()["gateway_id"])
    assert len(gateways) == 2
    both[0].kill()
    await both[0].wait()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert answer.json()["choices"][0]["text"] == "an answer"


async def test_a_port_that_another_program_has_is_one_sentence(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start(port)
        _, errors = await asyncio.wait_for(process.communicate(), _START_TIMEOUT_S)
    assert process.returncode == 2
    assert errors.decode() == (
        f"gateway: 127.0.0.1:{port} is taken by another program; set gateway.port to a free port\n"
    )
