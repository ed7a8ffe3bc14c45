"""The page without Redis, with tools, keys and limits, and on a phone."""

from __future__ import annotations

from playwright.async_api import Browser, Page, expect

from tests.gateway.page.windows import (
    MARKS,
    PHONE,
    ask,
    ready,
    said,
    watched,
)
from tests.support.running_gateway import running_gateway
from tests.support.scripted_gateway import ScriptedGateway

pytestmark = MARKS


async def test_without_redis_the_page_keeps_the_conversation_itself(browser: Browser) -> None:
    async with running_gateway() as front, watched(browser, front.url) as window:
        page = await window.open()
        await ready(page)
        await ask(page, "first")
        await ask(page, "second")
        await expect(said(page)).to_have_text(["first", "second"])
        await page.reload()
        await expect(said(page)).to_have_text(["first", "second"])


# What a gateway seldom says.


async def test_tools_are_switched_on_and_shown(browser: Browser, scripted: ScriptedGateway) -> None:
    step = {"type": "tool_step", "call_id": "c1", "name": "clock", "arguments": '{"zone":"utc"}'}
    scripted.script = lambda _request: [
        "Let me look. ",
        {**step, "ok": True, "output": "<b>noon</b>", "duration_ms": 12.0},
        "It is noon.",
    ]
    async with watched(browser, scripted.url) as window:
        page = await window.open()
        await ready(page)
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("clock").check()
        await page.get_by_role("button", name="Close", exact=True).click()
        await ask(page, "time?")
        tool = page.locator(".tool")
        await expect(tool.locator("summary")).to_have_text("clockanswered in 12 ms")
        await expect(tool.locator("pre").first).to_be_hidden()
        await tool.locator("summary").click()
        await expect(tool.locator("pre")).to_have_text(['{ "zone": "utc" }', "<b>noon</b>"])
        await expect(page.locator(".prose")).to_have_text(["Let me look.", "It is noon."])
        assert scripted.messages("generate")[0]["server_tools"] == ["clock"]


async def test_a_refusal_says_when_to_try_again(
    browser: Browser, scripted: ScriptedGateway
) -> None:
    scripted.refusal = {"code": "queue_full", "message": "Full.", "retry_after_s": 1.2}
    async with watched(browser, scripted.url) as window:
        page = await window.open()
        await ready(page)
        await ask(page, "hello")
        await expect(page.locator(".trouble")).to_have_text("Full.")
        retry = page.get_by_role("button", name="Retry")
        await expect(retry).to_have_text("Retry in 1 s")
        await expect(retry).to_be_disabled()
        await expect(retry).to_be_enabled()
        await retry.click()
        await expect(said(page)).to_have_text("hello")


async def test_a_key_is_asked_for(browser: Browser, scripted: ScriptedGateway) -> None:
    scripted.token = "mr-good"
    async with watched(browser, scripted.url) as window:
        page = await window.open()
        await expect(page.locator("#settings .why")).to_have_text("An API key is needed.")
        await page.get_by_label("API key").fill("mr-good")
        await page.get_by_role("button", name="Use this key").click()
        await ready(page)
        await ask(page, "hello")
        await expect(said(page)).to_have_text("hello")
        assert await page.evaluate("Object.keys(localStorage).includes('millrace.key')") is False
        await page.reload()
        await ready(page)


async def test_an_answer_that_is_gone_is_said_to_be(
    browser: Browser, scripted: ScriptedGateway
) -> None:
    scripted.hold_before = 2
    async with watched(browser, scripted.url) as window:
        page = await window.open()
        await ready(page)
        await page.locator("#prompt").fill("abcd")
        await page.locator("#send").click()
        await expect(said(page)).to_have_text("ab")
        scripted.runs.clear()
        scripted.sessions.clear()
        await page.reload()
        await expect(page.locator(".trouble")).to_contain_text("no longer available")


async def test_the_operations_page_asks_for_a_key(
    browser: Browser, scripted: ScriptedGateway
) -> None:
    scripted.token = "mr-admin"
    async with watched(browser, scripted.url) as window:
        page = await window.open("/ops/")
        await expect(page.locator("#key .why")).to_have_text("This key may not see that.")
        await page.get_by_label("API key of an administrator").fill("mr-admin")
        await page.get_by_role("button", name="Use this key").click()
        await expect(page.locator("#problem")).to_contain_text("Telemetry is unreachable.")
        await expect(page.locator("#key")).to_be_hidden()


# A phone.


async def test_the_page_fits_a_phone(browser: Browser, scripted: ScriptedGateway) -> None:
    wide = "w" * 300
    scripted.script = lambda _request: [
        f"{wide}\n\n```\n{wide}\n```\n\n| {wide} | b |\n|--|--|\n| 1 | 2 |\n\n`{wide}`"
    ]
    async with watched(browser, scripted.url, **PHONE) as window:
        page = await window.open()
        await ready(page)
        await assert_fits(page)
        await ask(page, wide)
        await assert_fits(page)
        await expect(page.locator("#drawer")).to_be_hidden()
        await page.get_by_role("button", name="Conversations").click()
        await expect(page.get_by_role("button", name="Close the list")).to_be_focused()
        await expect(page.locator("#sessions .choose")).to_be_in_viewport()
        await assert_fits(page)
        await page.keyboard.press("Escape")
        await expect(page.locator("#drawer")).to_be_hidden()
        await page.get_by_role("button", name="Conversations").click()
        await page.get_by_role("button", name="Settings").click()
        await assert_fits(page)


async def assert_fits(page: Page) -> None:
    """Assert that nothing is wider than the screen and that controls fit a finger."""
    widths = await page.evaluate(
        """() => [document.documentElement, document.querySelector("#scroll")].map(
          (box) => box.scrollWidth - box.clientWidth)"""
    )
    assert widths == [0, 0]
    small = await page.evaluate(
        """() => [...document.querySelectorAll("button, select, summary, label:has(input), nav a")]
          .filter((one) => one.checkVisibility({ visibilityProperty: true }))
          .map((one) => [one.id || one.textContent, one.getBoundingClientRect()])
          .filter(([, box]) => box.width < 44 || box.height < 44)
          .map(([name]) => name)"""
    )
    assert small == []
