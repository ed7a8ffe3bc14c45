"""Browser windows on the chat page, and a user's actions in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, BrowserContext, Locator, Page, expect

from tests.support.running_gateway import RunningGateway

PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 640},
    "has_touch": True,
    "is_mobile": True,
}

MARKS = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
]


class Watched:
    """A browser's window on the page: nothing leaves for elsewhere and nothing goes wrong in it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.troubles: list[str] = []

    async def open(self, path: str = "/") -> Page:
        page = await self.context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", lambda request: self._check(request.url))
        page.on("console", lambda message: self._read(message.text))
        await page.goto(self.url + path)
        return page

    def _check(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.troubles.append(f"a request to {url}")

    def _read(self, message: str) -> None:
        if "Security Policy" in message:
            self.troubles.append(message)


@asynccontextmanager
async def watched(browser: Browser, url: str, **options: Any) -> AsyncIterator[Watched]:
    context = await browser.new_context(**options)
    window = Watched(context, url)
    try:
        yield window
    finally:
        await context.close()
    assert window.troubles == []


async def ready(page: Page) -> None:
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    await expect(page.locator("#model")).to_be_enabled()


async def ask(page: Page, question: str) -> None:
    """Ask, and wait for the whole answer."""
    turns = page.locator(".turn")
    number = await turns.count()
    await page.locator("#prompt").fill(question)
    await page.locator("#send").click()
    await expect(turns).to_have_count(number + 1)
    await complete(page)


async def complete(page: Page) -> None:
    await expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")


def said(page: Page) -> Locator:
    return page.locator(".said")


async def kept(front: RunningGateway, page: Page) -> list[dict[str, Any]]:
    """The messages that the gateway keeps of the page's conversation."""
    session_id = page.url.partition("#")[2]
    async with httpx.AsyncClient(base_url=front.url) as client:
        answer = await client.get(f"/v1/sessions/{session_id}")
    messages: list[dict[str, Any]] = answer.json()["messages"] if answer.is_success else []
    return messages
