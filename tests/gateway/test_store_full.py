"""Full store: new requests are refused with its name, and no accepted request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from millrace.schemas.config import RedisConfig, StorageConfig
from tests.gateway.api.test_websocket import opened
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.waiting import eventually

_PATH = "/v1/chat/completions"
_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Rain?"}]}
_SOON = StorageConfig(check_interval_s=0.02)
_WITHIN_S = 20.0


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway(storage=_SOON) as running:
        yield running


async def _is(http: httpx.AsyncClient, status: str) -> None:
    async def it_is() -> bool:
        return bool((await http.get("/healthz")).json()["status"] == status)

    await eventually(it_is, _WITHIN_S, f"health says {status}")


async def test_every_door_refuses_while_a_stream_is_given_up_and_opens_again(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    front.broker.failed_streams["OUTBOX"] = "no space left on device"
    await _is(http, "storage_full")
    requests = (
        http.post(_PATH, json=_CHAT),
        http.post(_PATH, json={**_CHAT, "stream": True}),
        http.post("/v1/completions", json={"model": MODEL, "prompt": "Rain?"}),
        http.post("/v1/embeddings", json={"model": MODEL, "input": "Rain?"}),
        http.post("/v1/responses", json={"model": MODEL, "input": "Rain?", "store": False}),
        http.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"}),
        http.post("/v1/batches", json={"input_file_id": "a", "endpoint": _PATH}),
    )
    for answer in await asyncio.gather(*requests):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "storage_full"), answer.url
        assert "nats has given its streams OUTBOX up (no space left on device)" in error["message"]
        assert answer.headers["retry-after"] == "5"
    async with opened(front) as socket:
        await socket.send("generate", id="a", model=MODEL, prompt="Rain?")
        told = await socket.receive()
        assert (told["type"], told["code"]) == ("error", "storage_full")
    assert front.worker.jobs == []
    health = await http.get("/healthz")
    assert health.status_code == 503
    assert list(health.json()["stores"]) == ["nats"]
    assert 'millrace_store_healthy{store="nats"} 0.0' in (await http.get("/metrics")).text
    front.broker.stop()
    front.broker.start()  # as a supervisor or an operator does
    await _is(http, "ok")
    assert (await http.post(_PATH, json=_CHAT)).status_code == 200


async def test_what_was_accepted_ends_though_nothing_new_is(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    front.worker.gate.clear()
    accepted = asyncio.create_task(http.post(_PATH, json=_CHAT))
    await eventually(lambda: len(front.worker.jobs) == 1)
    front.broker.failed_streams["OUTBOX"] = "no space left on device"
    await _is(http, "storage_full")
    assert (await http.post(_PATH, json=_CHAT)).status_code == 503
    front.worker.gate.set()
    assert (await accepted).status_code == 200


async def _write_on(client: Redis) -> None:
    """Write until Redis refuses: the last page may have some room."""
    while True:
        await client.set("key", "x" * 1_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_mib=16) as mounted:
        yield mounted


async def test_redis_cannot_write_its_log_and_can_again(disk: SmallDisk) -> None:
    """Requests that need Redis are refused with the reason; others are served as without Redis."""
    server = RedisServer(disk.path, appends=True)
    server.start()
    config = RedisConfig(url=f"{server.url}/0")
    try:
        async with (
            running_gateway(redis=config, storage=_SOON) as front,
            httpx.AsyncClient(base_url=front.url, timeout=10) as http,
            Redis.from_url(server.url) as client,
        ):
            disk.fill()
            with pytest.raises(ResponseError, match="MISCONF"):
                await _write_on(client)
            with_key = await http.post(_PATH, json=_CHAT, headers={"Idempotency-Key": "k"})
            error = with_key.json()["error"]
            assert (with_key.status_code, error["code"]) == (503, "storage_full")
            assert "redis" in error["message"]
            assert (await http.post(_PATH, json=_CHAT)).status_code == 200
            health = await http.get("/healthz")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            assert health.json()["stores"] == {"redis": "cannot write to its disk"}
            disk.make_room()
            await _is(http, "ok")
            again = await http.post(_PATH, json=_CHAT, headers={"Idempotency-Key": "k"})
            assert again.status_code == 200
    finally:
        server.stop()
