"""Transcripts: jobs permit them only for tenants whose current record allows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.tenancy.identity import Identity
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import TenantRecord
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.manual_clock import ManualClock
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer, free_port


def _keeping(known: TenantRecord) -> TenantRecord:
    return TenantRecord(tier=known.tier, limits=known.limits, keep_transcripts=True)


@asynccontextmanager
async def gateway_for(
    server: RedisServer, change: Callable[[TenantRecord], TenantRecord] | None
) -> AsyncIterator[tuple[RunningGateway, str]]:
    """Run a gateway with a key of ``acme``, after these changes of ``acme`` and ``local``."""
    config = RedisConfig(url=server.url)
    link = RedisLink(config)
    store = TenantStore(link)
    await store.change_tenant("acme", lambda _known: TenantRecord(tier=Tier.PRO))
    if change is not None:
        await store.change_tenant("acme", change)
        await store.change_tenant("local", change)
    _, token = await store.create_key("acme", 1)
    await link.close()
    async with running_gateway(redis=config) as front:
        yield front, token


async def ask_everywhere(front: RunningGateway, headers: dict[str, str]) -> None:
    """Send requests through every API, with one job or several each."""
    async with httpx.AsyncClient(base_url=front.url, timeout=20, headers=headers) as http:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        for path, body in (
            ("/v1/chat/completions", {**chat, "n": 2}),
            ("/v1/completions", {"model": MODEL, "prompt": ["one", "two"]}),
            ("/v1/responses", {"model": MODEL, "input": "hello"}),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
    async with connect(
        front.ws_url,
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
        additional_headers=headers,
    ) as socket:
        await socket.send(
            json.dumps({"type": "generate", "id": "a", "model": MODEL, "prompt": "hello"})
        )
        async with asyncio.timeout(10):
            while json.loads(await socket.recv())["type"] != "done":
                pass


@pytest.mark.parametrize("has_key", [False, True])
async def test_without_being_asked_nothing_may_be_kept(
    redis_server: RedisServer, has_key: bool
) -> None:
    async with gateway_for(redis_server, None) as (front, token):
        await ask_everywhere(front, {"x-api-key": token} if has_key else {})
        assert len(front.worker.jobs) == 6
        assert {job.tenant for job in front.worker.jobs} == {"acme" if has_key else "local"}
        assert not any(job.keep_transcript for job in front.worker.jobs)


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_tenant_that_asked_for_it(redis_server: RedisServer, has_key: bool) -> None:
    async with gateway_for(redis_server, _keeping) as (front, token):
        headers = {"x-api-key": token} if has_key else {}
        await ask_everywhere(front, headers)
        assert len(front.worker.jobs) == 6
        assert all(job.keep_transcript for job in front.worker.jobs)
        # An embedding has no answer in words.
        async with httpx.AsyncClient(base_url=front.url, headers=headers) as http:
            body = {"model": MODEL, "input": "hello"}
            assert (await http.post("/v1/embeddings", json=body)).status_code == 200
        assert not front.worker.jobs[-1].keep_transcript


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def link(redis_server: RedisServer, clock: ManualClock) -> AsyncIterator[RedisLink]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    made = RedisLink(RedisConfig(url=redis_server.url), clock)
    yield made
    await made.close()


async def test_a_change_of_mind_counts_within_seconds(link: RedisLink, clock: ManualClock) -> None:
    """Also for a socket that was there before, as each request asks anew."""
    store = TenantStore(link)
    identity = Identity(link, GatewayConfig(), clock)
    assert not await identity.keeps_transcripts("acme")
    await store.change_tenant("acme", _keeping)
    await clock.advance(5.1)
    assert await identity.keeps_transcripts("acme")
    await store.change_tenant("acme", lambda _known: TenantRecord())
    await clock.advance(4.0)
    assert await identity.keeps_transcripts("acme")
    await clock.advance(1.1)
    assert not await identity.keeps_transcripts("acme")


async def test_while_redis_is_away_no_transcript_is_kept(
    redis_server: RedisServer, clock: ManualClock
) -> None:
    link = RedisLink(RedisConfig(url=redis_server.url), clock)
    identity = Identity(link, GatewayConfig(), clock)
    try:
        await TenantStore(link).change_tenant("acme", _keeping)
        assert await identity.keeps_transcripts("acme")
        redis_server.stop()
        await clock.advance(6.0)
        assert not await identity.keeps_transcripts("acme")
    finally:
        redis_server.start()
        await link.close()


async def test_without_redis_at_all(clock: ManualClock) -> None:
    assert not await Identity(None, GatewayConfig(), clock).keeps_transcripts("acme")
    link = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"), clock)
    assert not await Identity(link, GatewayConfig(), clock).keeps_transcripts("acme")
    await link.close()
