"""Stored conversations: listed, and shared between tabs."""

from __future__ import annotations

import httpx
from playwright.async_api import Page, expect

from tests.gateway.page.windows import (
    MARKS,
    Watched,
    ask,
    complete,
    kept,
    ready,
    said,
)
from tests.support.running_gateway import RunningGateway
from tests.support.waiting import eventually

pytestmark = MARKS


async def test_a_conversation_is_kept_by_the_gateway(front: RunningGateway, page: Page) -> None:
    await ask(page, "first")
    await ask(page, "second")
    assert [message["content"] for message in await kept(front, page)] == [
        "first",
        "first",
        "second",
        "second",
    ]
    await page.reload()
    await ready(page)
    await expect(page.locator(".asked")).to_have_text(["first", "second"])
    await expect(said(page)).to_have_text(["first", "second"])
    await expect(page.locator("#sessions .choose")).to_have_text("first")


async def test_retry_and_edit_replace_what_followed(front: RunningGateway, page: Page) -> None:
    await ask(page, "first")
    await ask(page, "second")
    front.worker.script = lambda _job: "again"
    await page.get_by_role("button", name="Retry").last.click()
    await expect(said(page)).to_have_text(["first", "again"])
    await complete(page)
    assert [one["content"] for one in await kept(front, page)][-2:] == ["second", "again"]
    await page.locator(".question").first.hover()
    await page.get_by_role("button", name="Edit this question").first.click()
    await page.get_by_label("Your question").fill("changed")
    await page.get_by_role("button", name="Ask", exact=True).click()
    await expect(page.locator(".asked")).to_have_text(["changed"])
    await complete(page)
    assert [one["content"] for one in await kept(front, page)] == ["changed", "again"]


async def test_conversations_are_listed_renamed_and_deleted(
    front: RunningGateway, page: Page
) -> None:
    await ask(page, "water")
    await page.locator("#new-chat").click()
    await expect(page.locator(".turn")).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()
    await ask(page, "stone")
    entries = page.locator("#sessions .choose")
    await expect(entries).to_have_text(["stone", "water"])
    await entries.nth(1).click()
    await expect(said(page)).to_have_text("water")
    more = page.get_by_role("button", name="More for water")
    await more.focus()
    await more.click()
    await (
        page.get_by_role("button", name="Rename", exact=True)
        .and_(page.locator(".opened *"))
        .click()
    )
    await page.get_by_label("Title of the conversation").fill("river")
    await page.keyboard.press("Enter")
    await expect(entries).to_have_text(["stone", "river"])
    assert await kept(front, page) != []
    url = page.url
    await entries.nth(1).hover()
    await page.get_by_role("button", name="More for river").click()
    await page.locator(".opened").get_by_role("button", name="Delete", exact=True).click()
    await page.locator(".opened").get_by_role("button", name="Delete for good?").click()
    await expect(entries).to_have_text(["stone"])
    await expect(page.locator(".turn")).to_have_count(0)
    async with httpx.AsyncClient() as client:
        address = url.replace("/#", "/v1/sessions/")

        async def is_gone() -> bool:
            return (await client.get(address)).status_code == 404

        await eventually(is_gone)


async def test_what_the_gateway_has_forgotten_is_told_again(
    front: RunningGateway, page: Page
) -> None:
    await ask(page, "first")
    session_id = page.url.partition("#")[2]
    async with httpx.AsyncClient(base_url=front.url) as client:
        await client.delete(f"/v1/sessions/{session_id}")
    await page.reload()
    await ready(page)
    await expect(said(page)).to_have_text("first")
    await ask(page, "second")
    contents = [message["content"] for message in await kept(front, page)]
    assert contents == ["first", "first", "second", "second"]


async def test_two_tabs_show_one_conversation(
    front: RunningGateway, window: Watched, page: Page
) -> None:
    await ask(page, "first")
    other = await window.open("/" + page.url.rpartition("/")[2])
    await ready(other)
    await expect(said(other)).to_have_text("first")
    front.worker.gate.clear()
    await page.locator("#prompt").fill("second")
    await page.locator("#send").click()
    await expect(other.locator(".asked")).to_have_text(["first", "second"])
    await expect(other.locator(".status").last).to_contain_text("another tab")
    front.worker.gate.set()
    await expect(said(other)).to_have_text(["first", "second"])
    await ask(other, "third")
    await expect(said(page)).to_have_text(["first", "second", "third"])
    assert len(await kept(front, page)) == 6
