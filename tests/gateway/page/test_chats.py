"""Conversations of a key, in several browsers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.gateway.page.windows import MARKS, Watched, ask, complete, ready, said, watched
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

pytestmark = MARKS

KEPT = "Saved on the server for your API key"


class Keyed:
    """A gateway and the keys of two tenants."""

    def __init__(self, front: RunningGateway, keys: dict[str, str]) -> None:
        self.front = front
        self.keys = keys

    async def open(self, window: Watched, tenant: str, path: str = "/") -> Page:
        """The page in a browser that remembers the tenant's key."""
        key = self.keys[tenant]
        await window.context.add_init_script(f"localStorage.setItem('millrace.key', '{key}')")
        page = await window.open(path)
        await ready(page)
        await expect(page.locator("#kept")).to_contain_text(KEPT)
        return page

    async def read(self, tenant: str, path: str = "/v1/chats") -> str:
        """Return the gateway's answer at ``path`` to the tenant."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        async with httpx.AsyncClient(base_url=self.front.url, headers=headers) as client:
            return (await client.get(path)).text


@pytest_asyncio.fixture(loop_scope="module")
async def keyed(redis_server: RedisServer) -> AsyncIterator[Keyed]:
    config = RedisConfig(url=redis_server.url)
    link = RedisLink(config)
    store = TenantStore(link)
    keys = {tenant: (await store.create_key(tenant, 0))[1] for tenant in ("acme", "other")}
    await link.close()
    async with running_gateway(GatewayConfig(auth="required"), redis=config) as front:
        yield Keyed(front, keys)


async def come_back(page: Page) -> None:
    """Return to the tab, as a user does."""
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


async def test_another_browser_shows_the_tenants_chats(browser: Browser, keyed: Keyed) -> None:
    front = keyed.front
    async with (
        watched(browser, front.url) as here,
        watched(browser, front.url) as there,
        watched(browser, front.url) as elsewhere,
    ):
        one = await keyed.open(here, "acme")
        await ask(one, "first")
        front.worker.script = lambda _job: "again"
        await one.get_by_role("button", name="Retry").click()
        await expect(said(one)).to_have_text("again")
        await complete(one)
        chat_id = one.url.partition("#")[2]

        async def is_kept() -> bool:
            return chat_id in await keyed.read("acme")

        await eventually(is_kept)
        two = await keyed.open(there, "acme")
        await two.locator("#sessions .choose", has_text="first").click()
        await expect(said(two)).to_have_text("again")
        await expect(two.locator(".versions")).to_contain_text("2/2")

        # Another tenant has neither the list nor what a link leads to.
        stranger = await keyed.open(elsewhere, "other", f"/#{chat_id}")
        await expect(stranger.locator("#welcome")).to_be_visible()
        await expect(stranger.locator("#sessions .choose")).to_have_count(0)

        # Both go on from the same turn without knowing of one another: nothing is lost.
        front.worker.script = lambda _job: "from one"
        await ask(one, "second")
        front.worker.script = lambda _job: "from two"
        await ask(two, "other second")

        async def has_both() -> bool:
            stored = await keyed.read("acme", f"/v1/chats/{chat_id}")
            return "from one" in stored and "from two" in stored

        await eventually(has_both)
        session = await keyed.read("acme", f"/v1/sessions/{chat_id}")
        said_there = [one["content"] for one in json.loads(session)["messages"]]
        assert said_there == ["first", "again", "other second", "from two"]
        await come_back(one)
        await come_back(two)
        for page in (one, two):
            await expect(page.locator(".versions").last).to_contain_text("/2")
            words = await page.evaluate("JSON.stringify(localStorage)")
            assert "from one" in words
            assert "from two" in words

        # Deleted in one, it is deleted in the other.
        await one.locator("#sessions li").first.hover()
        await one.get_by_role("button", name="More for first").click()
        await here.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await one.get_by_role("button", name="Copy the link to first").click()
        link = await one.evaluate("navigator.clipboard.readText()")
        other = await keyed.open(there, "acme", link.removeprefix(front.url))
        await expect(said(other)).to_have_count(2)
        await other.close()
        await one.locator(".opened").get_by_role("button", name="Delete", exact=True).click()
        await one.locator(".opened").get_by_role("button", name="Delete for good?").click()

        async def is_gone() -> bool:
            return chat_id not in await keyed.read("acme")

        await eventually(is_gone)
        await come_back(two)
        await expect(two.locator("#sessions .choose")).to_have_count(0)
        await expect(two.locator(".turn")).to_have_count(0)


async def test_without_a_key_the_page_says_that_chats_stay_in_the_browser(
    browser: Browser, front: RunningGateway
) -> None:
    async with watched(browser, front.url) as window:
        page = await window.open()
        await ready(page)
        await expect(page.locator("#kept")).to_contain_text("Kept in this browser only")
