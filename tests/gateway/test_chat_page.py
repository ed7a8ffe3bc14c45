"""The chat page in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.support.running_gateway import RunningGateway
from tests.support.waiting import eventually

_CHROMIUM = os.environ.get("TEST_CHROMIUM") or shutil.which("chromium")
_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium, or TEST_CHROMIUM set"),
]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=_CHROMIUM, args=_ARGUMENTS)
        yield launched
        await launched.close()


@pytest.fixture
async def page(front: RunningGateway, browser: Browser) -> AsyncIterator[Page]:
    """The page, open and connected; no request leaves for elsewhere and nothing is logged."""
    opened = await browser.new_page()
    opened.set_default_timeout(10_000)
    troubles: list[str] = []
    urls: list[str] = []
    messages: list[str] = []
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda request: urls.append(request.url))
    opened.on("console", lambda message: messages.append(message.text))
    await opened.goto(front.url)
    await expect(opened.locator("#connection")).to_have_attribute("data-state", "open")
    await expect(opened.locator("#model")).to_be_enabled()
    yield opened
    assert troubles == []
    assert [url for url in urls if not url.startswith(front.url)] == []
    assert [message for message in messages if "Security Policy" in message] == []


async def test_a_question_streams_its_answer(front: RunningGateway, page: Page) -> None:
    front.worker.script = lambda _job: ["Tokens ", "<b>are</b> ", "water."]
    front.worker.gate.clear()
    await expect(page.locator("#prompt")).to_be_focused()
    await page.keyboard.type("How?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".asked")).to_have_text("How?")
    await expect(page.locator("#welcome")).to_be_hidden()
    await expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    front.worker.gate.set()
    await expect(page.locator(".said")).to_have_text("Tokens <b>are</b> water.")
    await expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    await expect(page.locator(".facts")).to_contain_text("TTFT")
    await expect(page.locator(".facts")).to_contain_text("3 tokens")
    await expect(page.locator("#prompt")).to_be_focused()


async def test_escape_stops(front: RunningGateway, page: Page) -> None:
    front.worker.stop_before = 3
    await page.locator(".examples button").first.click()
    await expect(page.locator(".said")).to_have_text("Wha")
    await expect(page.locator("#send")).to_have_attribute("aria-label", "Stop")
    await page.keyboard.press("Escape")
    await expect(page.locator(".facts")).to_contain_text("stopped")
    await eventually(lambda: len(front.worker.cancelled) == 1)
    await expect(page.locator("#send")).to_have_attribute("aria-label", "Send")


async def test_shift_enter_makes_a_line_and_history_is_sent(
    front: RunningGateway, page: Page
) -> None:
    await page.keyboard.type("first")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("line")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said")).to_have_text("first\nline")
    front.worker.script = lambda job: str(len(job.prompt_token_ids or ()))
    await page.locator("#prompt").fill("second")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said").nth(1)).to_have_text("6")
    await page.locator("#new-chat").click()
    await expect(page.locator(".turn")).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()


async def test_an_error_is_shown_and_asked_again(front: RunningGateway, page: Page) -> None:
    front.broker.stop()
    await page.locator("#prompt").fill("anybody?")
    await page.locator("#send").click()
    await expect(page.locator(".trouble")).to_contain_text("bus is away")
    front.broker.start()
    await page.get_by_role("button", name="Ask again").click()
    await expect(page.locator(".said")).to_have_text("anybody?")
    await expect(page.locator(".trouble")).to_have_count(0)


async def test_a_lost_connection_is_shown_and_comes_back(front: RunningGateway, page: Page) -> None:
    front.worker.stop_before = 2
    await page.locator("#prompt").fill("hello")
    await page.keyboard.press("Enter")
    await expect(page.locator(".said")).to_have_text("he")
    front.close_connections()
    await expect(page.locator(".trouble")).to_contain_text("connection was lost")
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    front.worker.stop_before = None
    await page.get_by_role("button", name="Ask again").click()
    await expect(page.locator(".said")).to_have_text("hello")
