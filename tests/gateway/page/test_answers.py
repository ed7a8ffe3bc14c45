"""Conversation on the page: questions, stops, copies, errors, lost connections."""

from __future__ import annotations

import re

from playwright.async_api import Page, expect

from tests.gateway.page.windows import (
    MARKS,
    Watched,
    ask,
    complete,
    said,
)
from tests.support.running_gateway import RunningGateway
from tests.support.waiting import eventually

pytestmark = MARKS


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
    await expect(said(page)).to_have_text("Tokens <b>are</b> water.")
    await complete(page)
    await expect(page.locator(".facts")).to_contain_text("TTFT")
    await expect(page.locator(".facts")).to_contain_text("3 tokens")
    await expect(page.locator("#prompt")).to_be_focused()


async def test_only_the_demo_model_is_said_to_know_one_subject(page: Page) -> None:
    await expect(page.locator("#prompt")).to_have_attribute("placeholder", "Message echo")
    await expect(page.locator("#welcome")).to_be_visible()
    await expect(page.locator("#about-demo")).to_be_hidden()


async def test_escape_stops(front: RunningGateway, page: Page) -> None:
    front.worker.stop_before = 3
    await page.locator(".examples button").first.click()
    await expect(said(page)).to_have_text("Wha")
    await expect(page.locator("#send")).to_have_attribute("aria-label", "Stop")
    await page.keyboard.press("Escape")
    await expect(page.locator(".facts")).to_contain_text("stopped")
    await eventually(lambda: len(front.worker.cancelled) == 1)
    await expect(page.locator("#send")).to_have_attribute("aria-label", "Send")


async def test_shift_enter_makes_a_line(page: Page) -> None:
    await page.keyboard.type("first")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("line")
    await page.keyboard.press("Enter")
    await expect(said(page)).to_have_text("first\nline")


async def test_copy(front: RunningGateway, window: Watched, page: Page) -> None:
    await window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    front.worker.script = lambda _job: ["An **answer**.\n\n```\ncode\n```\n"]
    await ask(page, "copy")
    await page.locator(".actions").get_by_role("button", name="Copy").click()
    assert await page.evaluate("navigator.clipboard.readText()") == (
        "An **answer**.\n\n```\ncode\n```\n"
    )
    await page.locator("figure").get_by_role("button", name="Copy").click()
    await expect(page.locator("figure").get_by_role("button")).to_have_text("Copied")
    assert await page.evaluate("navigator.clipboard.readText()") == "code"


async def test_an_error_is_shown_and_asked_again(front: RunningGateway, page: Page) -> None:
    front.broker.stop()
    await page.locator("#prompt").fill("anybody?")
    await page.locator("#send").click()
    await expect(page.locator(".trouble")).to_contain_text("bus is unreachable")
    front.broker.start()
    await page.get_by_role("button", name=re.compile("^Retry")).click()
    await expect(said(page)).to_have_text("anybody?")
    await expect(page.locator(".trouble")).to_have_count(1)
    await expect(page.locator(".trouble")).to_be_hidden()


# Connections that are lost.


async def test_an_answer_goes_on_after_a_lost_connection(front: RunningGateway, page: Page) -> None:
    front.worker.script = lambda _job: ["one ", "two ", "three ", "four"]
    front.worker.gate.clear()
    await page.locator("#prompt").fill("hello")
    await page.keyboard.press("Enter")
    await eventually(lambda: len(front.worker.jobs) == 1)
    front.close_connections()
    await expect(page.locator(".status")).to_contain_text("continues after reconnecting")
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    front.worker.gate.set()
    await expect(said(page)).to_have_text("one two three four")
    await complete(page)
    await expect(page.locator(".facts")).to_contain_text("resumed once")
    assert len(front.worker.jobs) == 1


async def test_an_answer_goes_on_after_the_page_was_loaded_again(
    front: RunningGateway, page: Page
) -> None:
    front.worker.script = lambda _job: ["one ", "two ", "three ", "four"]
    front.worker.gate.clear()
    await page.locator("#prompt").fill("hello")
    await page.keyboard.press("Enter")
    # The page goes on with what it knows that it was accepted.
    await page.wait_for_function(
        """() => Object.values(localStorage).some((kept) => /"requestId":"[^"]/.test(kept))"""
    )
    await page.reload()
    await expect(page.locator(".asked")).to_have_text("hello")
    front.worker.gate.set()
    await expect(said(page)).to_have_text("one two three four")
    await complete(page)
    assert len(front.worker.jobs) == 1


# Conversations.
