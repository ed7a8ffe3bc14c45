"""Chats that front ends keep, over HTTP and a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from millrace.bus.redis_keys import chat_key, chats_key
from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.sessions.chats import ChatStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.chat.chats import ChatUpdate
from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.support.manual_clock import ManualClock
from tests.support.running_gateway import running_gateway
from tests.support.servers import RedisServer

CONFIG = GatewayConfig(auth="auto", chat_max_bytes=200, max_chats=4)

Clients = dict[str, httpx.AsyncClient]


@pytest.fixture
async def clients(redis: Redis, redis_server: RedisServer) -> AsyncIterator[Clients]:
    """Yield one client per tenant; tenant "" has no key."""
    config = RedisConfig(url=redis_server.url)
    link = RedisLink(config)
    store = TenantStore(link)
    keys = {tenant: (await store.create_key(tenant, 0))[1] for tenant in ("acme", "other")}
    await link.close()
    async with running_gateway(CONFIG, redis=config) as front:
        made = {
            tenant: httpx.AsyncClient(
                base_url=f"{front.url}/v1/chats",
                headers={"authorization": f"Bearer {key}"} if key else {},
            )
            for tenant, key in {**keys, "": ""}.items()
        }
        yield made
        for client in made.values():
            await client.aclose()


async def put(
    client: httpx.AsyncClient, chat_id: str, revision: int = 0, **document: Any
) -> httpx.Response:
    body = {"revision": revision, "title": f"The {chat_id}", "document": document}
    return await client.post(f"/{chat_id}", json=body)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def ids(client: httpx.AsyncClient, **query: Any) -> list[str]:
    return [chat["id"] for chat in (await client.get("", params=query)).json()["data"]]


async def test_the_first_to_change_a_revision_wins(clients: Clients, redis: Redis) -> None:
    acme = clients["acme"]
    first = (await put(acme, "c1", turns=["ä"])).json()
    assert (first["title"], first["object"]) == ("The c1", "chat")
    read = (await acme.get("/c1")).json()
    assert read == {**first, "document": {"turns": ["ä"]}}
    second = (await put(acme, "c1", first["revision"], turns=["two"])).json()
    assert second["revision"] > first["revision"]
    for stale in (first["revision"], 0, second["revision"] + 1):
        assert code_of(await put(acme, "c1", stale, turns=["lost"])) == (409, "chat_changed")
    assert (await acme.get("/c1")).json()["document"] == {"turns": ["two"]}
    gone = (await acme.delete("/c1")).json()
    assert gone == {"id": "c1", "object": "chat.deleted", "deleted": True}
    assert code_of(await put(acme, "c1", second["revision"])) == (409, "chat_changed")
    again = (await put(acme, "c1")).json()
    assert again["revision"] > second["revision"]
    ttl_s = await redis.ttl(chat_key("acme", "c1"))
    assert 0 < ttl_s <= CONFIG.chat_ttl_s


async def test_chats_are_listed_in_pages(clients: Clients) -> None:
    acme = clients["acme"]
    revisions = [(await put(acme, one)).json()["revision"] for one in ("c0", "z1", "c2", "c3")]
    await put(acme, "z1", revisions[1])
    assert await ids(acme) == ["z1", "c3", "c2", "c0"]
    page = (await acme.get("", params={"limit": 2})).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("z1", "c3", True)
    rest = (await acme.get("", params={"limit": 2, "after": "c3"})).json()
    assert ([chat["id"] for chat in rest["data"]], rest["has_more"]) == (["c2", "c0"], False)
    assert code_of(await put(acme, "c9")) == (409, "too_many_chats")
    await acme.delete("/c0")
    assert (await put(acme, "c9")).is_success
    for query in ({"limit": 0}, {"limit": 101}, {"after": "c0"}, {"order": "asc"}):
        answer = await acme.get("", params=query)
        assert answer.status_code == 400, query
        assert answer.json()["error"]["param"] in query


async def test_tenants_see_their_own_only(clients: Clients) -> None:
    acme, other = clients["acme"], clients["other"]
    made = (await put(acme, "c1", secret=1)).json()
    assert code_of(await other.get("/c1")) == (404, "chat_not_found")
    assert code_of(await other.delete("/c1")) == (404, "chat_not_found")
    assert code_of(await put(other, "c1", made["revision"])) == (409, "chat_changed")
    assert await ids(other) == []
    assert code_of(await other.get("", params={"after": "c1"}))[0] == 400
    await put(other, "c1", own=1)
    assert (await acme.get("/c1")).json()["document"] == {"secret": 1}
    for answer in (
        await clients[""].get(""),
        await clients[""].get("/c1"),
        await put(clients[""], "c1"),
        await clients[""].delete("/c1"),
    ):
        assert code_of(answer) == (403, "chats_need_key")


async def test_what_is_refused(clients: Clients) -> None:
    acme = clients["acme"]
    assert code_of(await put(acme, "c1", long="x" * 300)) == (413, "payload_too_large")
    for chat_id in ("a%2Fb", "a.b", "x" * 65, "%00", "_"):
        assert (await put(acme, chat_id)).status_code == 404
        assert (await acme.get(f"/{chat_id}")).status_code == 404
    good = {"revision": 0, "title": "", "document": {}}
    for name, value in {
        "revision": -1,
        "title": "x" * 201,
        "document": [1],
    }.items():
        answer = await acme.post("/c1", json={**good, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    bodies: tuple[Any, ...] = (
        {**good, "more": 1},
        {"title": ""},
        {**good, "revision": 2**70},
        [],
        "x",
    )
    for body in bodies:
        assert (await acme.post("/c1", json=body)).status_code == 400
    assert await ids(acme) == []


async def test_expired_chats_leave_the_list(redis: Redis, redis_server: RedisServer) -> None:
    clock = ManualClock()
    link = RedisLink(RedisConfig(url=redis_server.url))
    store = ChatStore(link, GatewayConfig(chat_ttl_s=60.0), clock)
    update = ChatUpdate(revision=0, title="", document=b"{}")  # type: ignore[arg-type]
    try:
        await store.put("acme", "old", update)
        await clock.advance(40)
        await store.put("acme", "new", update)
        await clock.advance(30)
        found, has_more = await store.list_newest("acme", "", 10)
        assert ([chat.id for chat in found], has_more) == (["new"], False)
        assert await redis.zrange(chats_key("acme"), 0, -1) == [b"new"]
    finally:
        await link.close()
