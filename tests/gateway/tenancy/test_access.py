"""Access to a gateway, by key and by the page's origin, and a gateway's shutdown."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
_PATH = "/v1/chat/completions"


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=f"{redis_server.url}/0")


async def make_key(store: TenantStore, tenant: str) -> str:
    _, token = await store.create_key(tenant, time.time_ns())
    return token


def socket_to(front: RunningGateway, **options: Any) -> connect:
    return connect(front.ws_url, subprotocols=[SUBPROTOCOL], **options)  # type: ignore[list-item]


async def answer_to(socket: Any, **message: Any) -> dict[str, Any]:
    await socket.send(json.dumps(message))
    async with asyncio.timeout(5.0):
        found: dict[str, Any] = json.loads(await socket.recv())
    return found


async def test_where_keys_are_demanded_nothing_goes_without(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    key = await make_key(TenantStore(link), "acme")
    async with (
        running_gateway(GatewayConfig(auth="required"), redis=redis) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        for path in ("/v1/models", "/v1/limits", "/v1/tools", "/v1/sessions/s", "/ops/api/x"):
            refused = await http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            ), path
        for path in (_PATH, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/batches"):
            assert (await http.post(path, json=_CHAT)).status_code == 401, path
        for path in ("/healthz", "/ops/tables.html", "/ops/tables.json"):
            assert (await http.get(path)).status_code == 200, path
        taken = await http.post(_PATH, json=_CHAT, headers={"Authorization": f"Bearer {key}"})
        assert taken.status_code == 200
        assert front.worker.jobs[0].tenant == "acme"
        assert "x-ratelimit-remaining-requests" in taken.headers
        ops = await http.get("/ops/api/x", headers={"Authorization": f"Bearer {key}"})
        assert (ops.status_code, ops.json()["error"]["code"]) == (403, "insufficient_permissions")
    await link.close()


async def test_a_key_in_a_trailer_is_no_key(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    key = await make_key(TenantStore(link), "acme")
    bearer = f"Authorization: Bearer {key}\r\n".encode()
    body = json.dumps(_CHAT).encode()
    start = b"HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with running_gateway(GatewayConfig(auth="required"), redis=redis) as front:
        for path in (_PATH, "/v1/embeddings", "/v1/files"):
            head = b"POST " + path.encode() + b" " + start
            assert await _status(front, head + b"\r\n" + chunks + bearer + b"\r\n") == 401
            for more in (bearer, b"X-Idempotency: 1\r\n"):
                with_key = head + bearer + b"\r\n" + chunks + more + b"\r\n"
                assert await _status(front, with_key) != 401
    await link.close()


async def _status(front: RunningGateway, data: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
    writer.write(data)
    async with asyncio.timeout(5.0):
        answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


async def test_a_socket_shows_its_key_in_its_head_or_its_first_message(
    redis: RedisConfig,
) -> None:
    link = RedisLink(redis)
    key = await make_key(TenantStore(link), "acme")
    async with running_gateway(GatewayConfig(auth="required"), redis=redis) as front:
        async with socket_to(front, additional_headers={"Authorization": f"Bearer {key}"}) as one:
            assert (await answer_to(one, type="ping"))["type"] == "pong"
        with pytest.raises(InvalidStatus) as refused:
            await socket_to(front, additional_headers={"Authorization": "Bearer mr-x-y"})
        assert refused.value.response.status_code == 401
        async with socket_to(front) as other:
            early = await answer_to(other, type="generate", id="a", model=MODEL, prompt="x")
            assert (early["code"], early["id"]) == ("invalid_api_key", "a")
            known = await answer_to(other, type="authenticate", token=key)
            assert (known["type"], known["tenant"]) == ("authenticated", "acme")
            accepted = await answer_to(other, type="generate", id="a", model=MODEL, prompt="x")
            assert accepted["type"] == "accepted"
        async with socket_to(front) as stranger:
            bad = await answer_to(stranger, type="authenticate", token=key[:-2] + "zz")
            assert bad["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosed) as closed:
                await stranger.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
    await link.close()


async def test_another_tenant_s_request_cannot_be_resumed(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    store = TenantStore(link)
    keys = [await make_key(store, tenant) for tenant in ("acme", "rival")]
    async with running_gateway(GatewayConfig(auth="required"), redis=redis) as front:
        front.worker.gate.clear()
        heads = [{"Authorization": f"Bearer {key}"} for key in keys]
        async with (
            socket_to(front, additional_headers=heads[0]) as owner,
            socket_to(front, additional_headers=heads[1]) as thief,
        ):
            accepted = await answer_to(owner, type="generate", id="a", model=MODEL, prompt="x")
            stolen = await answer_to(
                thief, type="resume", id="b", request_id=accepted["request_id"]
            )
            assert stolen["code"] == "request_not_found"
            front.worker.gate.set()
            async with asyncio.timeout(5.0):
                while json.loads(await owner.recv())["type"] != "done":
                    pass
    await link.close()


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
        ("https://app.example", 200),
        (None, 200),
    ],
)
async def test_pages_of_others_stay_out(origin: str | None, status: int) -> None:
    config = GatewayConfig(allowed_origins=("https://app.example",))
    headers = {} if origin is None else {"Origin": origin}
    async with (
        running_gateway(config) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        answer = await http.post(_PATH, json=_CHAT, headers=headers)
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (
            origin if origin and status == 200 else None
        )
        if status == 403:
            assert answer.json()["error"]["code"] == "origin_not_allowed"
            asked = headers | {"Access-Control-Request-Method": "POST"}
            for refused in (answer, await http.options(_PATH, headers=asked)):
                assert refused.status_code == 403
                told = ("access-control-", "set-cookie", "x-ratelimit-")
                assert not [name for name in refused.headers if name.startswith(told)]
            with pytest.raises(InvalidStatus):
                await socket_to(front, additional_headers=headers)
        else:
            async with socket_to(front, additional_headers=headers) as socket:
                assert (await answer_to(socket, type="ping"))["type"] == "pong"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8000", 403),
        ("evil.example.", 403),
        ("[zz]", 403),
        ("app.example", 200),
        ("localhost:8000", 200),
        ("gateway:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
    ],
)
async def test_a_page_whose_name_leads_here_reads_nothing(host: str, status: int) -> None:
    """Browsers send no Origin when a page reads from its own host."""
    config = GatewayConfig(allowed_origins=("https://app.example",))
    async with (
        running_gateway(config) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        answer = await http.get("/v1/files", headers={"host": host})
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "host_not_allowed"
    async with (
        running_gateway(GatewayConfig(auth="required")) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        assert (await http.get("/v1/files", headers={"host": host})).status_code == 401


async def test_an_origin_that_is_none(front: RunningGateway, http: httpx.AsyncClient) -> None:
    answer = await http.post(_PATH, json=_CHAT, headers={"Origin": "http://["})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await http.post(path, json=_CHAT, headers={"Origin": "http://["})
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "permission_error")


async def test_a_page_of_this_gateway_may_use_it() -> None:
    async with (
        running_gateway() as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        own = await http.post(_PATH, json=_CHAT, headers={"Origin": front.url})
        assert own.status_code == 200
        # A name that somebody else has lead here is not this gateway's.
        headers = {"Origin": "http://evil.example", "Host": "evil.example"}
        rebound = await http.post(_PATH, json=_CHAT, headers=headers)
        assert rebound.status_code == 403


async def test_browsers_are_told_beforehand() -> None:
    config = GatewayConfig(allowed_origins=("*",))
    async with (
        running_gateway(config) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        preflight = await http.options(
            _PATH,
            headers={
                "Origin": "https://app.example",
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            },
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == "authorization"


async def test_sockets_of_one_address_are_bounded() -> None:
    async with (
        running_gateway(GatewayConfig(max_sockets_per_address=2)) as front,
        socket_to(front),
    ):
        async with socket_to(front):
            with pytest.raises(InvalidStatus) as refused:
                await socket_to(front)
            assert refused.value.response.status_code == 429
        await eventually(lambda: len(front.gateway.sockets) == 1)
        async with socket_to(front) as socket:
            assert (await answer_to(socket, type="ping"))["type"] == "pong"


async def test_a_gateway_that_leaves_says_so_and_cuts_nobody_off() -> None:
    async with running_gateway() as front:
        front.worker.gate.clear()
        async with socket_to(front) as busy, socket_to(front) as idle:
            await answer_to(busy, type="generate", id="a", model=MODEL, prompt="to its end")
            leaving = asyncio.create_task(front.server.stop(drain_timeout_s=5.0))
            assert json.loads(await idle.recv())["type"] == "going_away"
            with pytest.raises(ConnectionClosed) as closed:
                await idle.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            front.worker.gate.set()
            kinds: list[str] = []
            with pytest.raises(ConnectionClosed) as closed:
                await _read_kinds(busy, kinds)
            assert {"going_away", "delta", "done"} <= set(kinds)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
        await leaving
        assert not front.worker.cancelled


async def _read_kinds(socket: Any, kinds: list[str]) -> None:
    async with asyncio.timeout(5.0):
        while True:
            kinds.append(json.loads(await socket.recv())["type"])


async def test_an_event_stream_that_outlasts_the_gateway_says_how_to_go_on() -> None:
    async with (
        running_gateway() as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        front.worker.stop_before = 2
        headers = {"accept": "text/event-stream"}
        asking = asyncio.create_task(
            http.post(_PATH, json=_CHAT | {"stream": True}, headers=headers)
        )
        await eventually(lambda: any(s.delivery.num_delivered for s in front.gateway.streams))
        await front.server.stop(drain_timeout_s=0.0)
        lines = [line for line in (await asking).text.splitlines() if line]
        assert any(line.startswith("id: ") for line in lines)
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "gateway_restarting"
        assert not front.worker.cancelled


async def test_a_whole_answer_that_outlasts_the_gateway_is_to_be_asked_again() -> None:
    async with (
        running_gateway() as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        front.worker.stop_before = 2
        asking = asyncio.create_task(http.post(_PATH, json=_CHAT))
        await eventually(lambda: bool(front.worker.jobs))
        await front.server.stop(drain_timeout_s=0.0)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_restarting")
        assert answer.headers["retry-after"] == "1"
