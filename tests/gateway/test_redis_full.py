"""Requests while Redis is there but has no room: as while it is unreachable, never an error of
ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from millrace.gateway.tools.catalogue import load_tools
from millrace.schemas.config import RedisConfig
from millrace.schemas.jobs import Job
from tests.support.running_gateway import MODEL, running_gateway
from tests.support.servers import RedisServer
from tests.support.tool_server import reply, tool_server

_PATH = "/v1/chat/completions"
_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Rain?"}]}


@pytest.fixture
async def full_redis(redis_server: RedisServer) -> AsyncIterator[RedisConfig]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.config_set("maxmemory", 1)
    yield RedisConfig(url=f"{redis_server.url}/0")
    await client.config_set("maxmemory", 0)
    await client.aclose()


async def test_a_key_for_idempotency_cannot_be_noted(full_redis: RedisConfig) -> None:
    async with (
        running_gateway(redis=full_redis) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        with_key = await http.post(_PATH, json=_CHAT, headers={"Idempotency-Key": "k"})
        assert with_key.status_code == 503
        assert with_key.json()["error"]["code"] == "state_unavailable"
        assert front.worker.jobs == []
        assert (await http.post(_PATH, json=_CHAT)).status_code == 200


async def test_what_a_tool_gave_is_used_though_it_cannot_be_noted(
    tmp_path: Path, full_redis: RedisConfig
) -> None:
    def call_then_say(job: Job) -> str:
        if job.request_id.endswith("-r1"):
            return "It rains."
        return '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

    file = tmp_path / "tools.yaml"
    async with tool_server() as server:
        server.answers["/weather"] = reply('{"sky": "rain"}')
        file.write_text(
            f"tools:\n  weather:\n    url: {server.url('/weather')}\n    allow_private: true\n"
        )
        async with (
            running_gateway(redis=full_redis, tools=load_tools(str(file), {})) as front,
            httpx.AsyncClient(base_url=front.url, timeout=10) as http,
        ):
            front.worker.script = call_then_say
            answer = await http.post(_PATH, json={**_CHAT, "server_tools": ["weather"]})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "It rains."
