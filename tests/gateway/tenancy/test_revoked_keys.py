"""A key is revoked while its clients are served, by two gateways on one Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.api.socket.session import SocketSession
from millrace.gateway.tenancy import identity, key_watch
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import TenantRecord
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

CONFIG = GatewayConfig(auth="required")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
# What is promised is 5 s; a loaded machine has its own idea of time.
_WAIT_S = 30.0


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[TenantStore]:
    link = RedisLink(RedisConfig(url=redis_server.url))
    made = TenantStore(link)
    await made.change_tenant("acme", lambda _known: TenantRecord(tier=Tier.PRO))
    yield made
    await link.close()


@pytest.fixture
async def pair(redis_server: RedisServer) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    redis = RedisConfig(url=redis_server.url)
    async with (
        running_gateway(CONFIG, redis=redis, gateway_id="gw-1") as one,
        running_gateway(CONFIG, redis=redis, gateway_id="gw-2", broker=one.broker) as other,
    ):
        yield one, other


@asynccontextmanager
async def socket(front: RunningGateway, token: str) -> AsyncIterator[ClientConnection]:
    headers = {"authorization": f"Bearer {token}"}
    async with connect(front.ws_url, additional_headers=headers) as connection:
        yield connection


async def until(connection: ClientConnection, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(_WAIT_S):
        while True:
            message: dict[str, Any] = json.loads(await connection.recv())
            if message["type"] == kind:
                return message


async def generate(connection: ClientConnection) -> str:
    """The request id of a generation of which the first token has come."""
    await connection.send(json.dumps({"type": "generate", "id": "a", **CHAT}))
    return str((await until(connection, "delta"))["request_id"])


def stop_after_one_token(front: RunningGateway) -> None:
    front.worker.stop_before = 1


def test_what_is_remembered_of_a_key_is_within_what_is_promised() -> None:
    assert identity._KEY_FRESH_S + key_watch._INTERVAL_S < 5.0


async def test_a_socket_of_a_revoked_key_ends_at_every_gateway(
    pair: tuple[RunningGateway, RunningGateway], store: TenantStore
) -> None:
    front, other = pair
    stop_after_one_token(front)
    record, token = await store.create_key("acme", 0)
    _, good_token = await store.create_key("acme", 0)
    async with (
        socket(front, token) as one,
        socket(other, token) as two,
        socket(other, good_token) as good,
    ):
        running = {await generate(one), await generate(two)}
        request_id = await generate(good)
        await store.revoke(record.key_id, 1)
        for connection in (one, two):
            ended = await until(connection, "error")
            assert (ended["id"], ended["code"]) == ("a", "invalid_api_key")
            assert ended["request_id"] in running
            with pytest.raises(ConnectionClosed) as closed:
                await until(connection, "none")
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "key_revoked")
        # The key's generations end too, and no others do.
        await eventually(lambda: set(front.worker.cancelled) == running, _WAIT_S)
        await good.send('{"type": "ping"}')
        await until(good, "pong")
        assert request_id not in front.worker.cancelled


async def test_a_socket_that_reads_nothing_is_closed_too(
    pair: tuple[RunningGateway, RunningGateway], store: TenantStore
) -> None:
    front, _ = pair
    record, token = await store.create_key("acme", 0)
    async with socket(front, token) as connection:
        await until_open(front)
        [session] = front.gateway.sockets
        assert isinstance(session, SocketSession)
        session._writer = _Unwritable()  # type: ignore[assignment]
        await store.revoke(record.key_id, 1)
        await eventually(lambda: not front.gateway.sockets, _WAIT_S)
        with pytest.raises(ConnectionClosed):
            await until(connection, "none")


class _Unwritable:
    """Client with full buffers that reads nothing."""

    is_writable = False
    on_writable = None


async def until_open(front: RunningGateway) -> None:
    await eventually(lambda: len(front.gateway.sockets) == 1, _WAIT_S)


async def test_resume_with_a_revoked_key_is_refused_at_once(
    pair: tuple[RunningGateway, RunningGateway], store: TenantStore
) -> None:
    """Resumption at a second gateway is refused on an open socket and on a new SSE request."""
    front, other = pair
    stop_after_one_token(front)
    record, token = await store.create_key("acme", 0)
    async with socket(front, token) as origin:
        request_id = await generate(origin)
        async with socket(other, token) as second, client(other, token) as http:
            await http.get("/v1/models")  # so that the key is remembered there
            await store.revoke(record.key_id, 1)
            resume = {"type": "resume", "id": "b", "request_id": request_id, "next_index": 0}
            await second.send(json.dumps(resume))
            refused = await until(second, "error")
            assert refused["code"] == "invalid_api_key"
            headers = {"last-event-id": f"{request_id}/0"}
            answer = await http.post(
                "/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_over_http_end_with_the_key(
    pair: tuple[RunningGateway, RunningGateway], store: TenantStore, *, stream: bool
) -> None:
    front, _ = pair
    stop_after_one_token(front)
    record, token = await store.create_key("acme", 0)
    async with client(front, token) as http:
        asked = asyncio.create_task(
            http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        )
        await eventually(lambda: front.worker.num_running == 1, _WAIT_S)
        await eventually(_has_a_token(front), _WAIT_S)
        await store.revoke(record.key_id, 1)
        answer = await asked
        if stream:
            assert answer.status_code == 200
            last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 401
            error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert "revoked" in error["message"]
        await eventually(lambda: len(front.worker.cancelled) == 1, _WAIT_S)
        await eventually(lambda: len(front.gateway.streams) == 0, _WAIT_S)


def _has_a_token(front: RunningGateway) -> Any:
    return lambda: any(stream.reader.token_ids for stream in front.gateway.streams)


@asynccontextmanager
async def client(front: RunningGateway, token: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=front.url, headers=headers, timeout=_WAIT_S) as made:
        yield made


async def test_no_socket_is_closed_while_redis_is_away(
    redis_server: RedisServer,
    pair: tuple[RunningGateway, RunningGateway],
    store: TenantStore,
) -> None:
    """The server stores nothing on disk, so the key no longer exists after its restart."""
    front, _ = pair
    _, token = await store.create_key("acme", 0)
    async with socket(front, token) as connection:
        await until_open(front)
        looks = _Looks(front)
        redis_server.kill()
        try:
            await eventually(lambda: looks.num_failed >= 2, _WAIT_S)
            await connection.send('{"type": "ping"}')
            await until(connection, "pong")
        finally:
            redis_server.start()
        with pytest.raises(ConnectionClosed) as closed:
            await until(connection, "none")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


class _Looks:
    """Counts how often a gateway asked in vain."""

    def __init__(self, front: RunningGateway) -> None:
        self.num_failed = 0
        watch = front.gateway.keys
        store = watch._store
        assert store is not None
        look = store.closed_keys

        async def counted(key_ids: Any) -> set[str]:
            try:
                return await look(key_ids)
            except Exception:
                self.num_failed += 1
                raise

        store.closed_keys = counted  # type: ignore[method-assign]
