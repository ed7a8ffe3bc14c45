"""The chat page in a browser, over a real gateway, and over a scripted one for what is rare."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Locator, Page, async_playwright, expect

from schemas.config import RedisConfig
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_CHROMIUM = os.environ.get("TEST_CHROMIUM") or shutil.which("chromium")
_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 640},
    "has_touch": True,
    "is_mobile": True,
}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
    pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium, or TEST_CHROMIUM set"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=_CHROMIUM, args=_ARGUMENTS)
        yield launched
        await launched.close()


@pytest_asyncio.fixture(loop_scope="module")
async def front(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(redis=RedisConfig(url=redis_server.url)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def scripted() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as made:
        yield made


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


@pytest_asyncio.fixture(loop_scope="module")
async def window(front: RunningGateway, browser: Browser) -> AsyncIterator[Watched]:
    async with watched(browser, front.url) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def page(window: Watched) -> Page:
    opened = await window.open()
    await ready(opened)
    return opened


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


# One conversation.


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


async def test_markdown_is_shown_and_markup_is_not(front: RunningGateway, page: Page) -> None:
    front.worker.script = lambda _job: [
        "# Title\n\nSome **bold",
        "** and `co",
        "de`.\n\n- one\n- two\n  - three\n\n",
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n",
        "```python\nprint('<b>')\n",
        "```\n\n> quoted\n\n",
        "<img src=x onerror=alert(1)> </script><script>alert(2)</script>\n\n",
        "[bad](javascript:alert(3)) [worse](data:text/html,x) [good](https://example.com/)\n\n",
        "![picture](https://example.com/x.png) <https://example.com/y>",
    ]
    await ask(page, "show")
    answer = said(page)
    await expect(answer.locator("h3")).to_have_text("Title")
    await expect(answer.locator("strong")).to_have_text("bold")
    await expect(answer.locator("p code")).to_have_text("code")
    await expect(answer.locator("li li")).to_have_text("three")
    await expect(answer.locator("td.end")).to_have_text("2")
    await expect(answer.locator("figcaption")).to_contain_text("python")
    await expect(answer.locator("pre code")).to_have_text("print('<b>')")
    await expect(answer.locator("blockquote")).to_have_text("quoted")
    await expect(answer).to_contain_text("<img src=x onerror=alert(1)> </script><script>")
    await expect(answer).to_contain_text("[bad](javascript:alert(3)) [worse](data:text/html,x)")
    await expect(answer.locator("img, script, b, iframe")).to_have_count(0)
    links = answer.locator("a")
    hrefs = await links.evaluate_all("links => links.map(link => link.href)")
    assert hrefs == [f"https://example.com/{path}" for path in ("", "x.png", "y")]
    assert await links.first.get_attribute("rel") == "noopener noreferrer nofollow"


async def test_hostile_markdown_is_shown_at_once(page: Page) -> None:
    marks = [
        "*a ",
        "_a",
        "**a*",
        "[",
        "[a](",
        "`",
        "`a``b",
        "~~a",
        ">",
        "> ",
        "- ",
        "1. ",
        "|",
        "<",
    ]
    lines = ["- a\n  ", "|a|\n", "> - ", "```\n", "# \n", "https://a_", "a\n\n"]
    took_ms = await page.evaluate(
        """async (texts) => {
          const { Markdown } = await import("/static/chat/markdown.js");
          return texts.map((text) => {
            const before = performance.now();
            new Markdown(document.createElement("div")).show(text);
            return performance.now() - before;
          });
        }""",
        [text * (20_000 // len(text)) for text in (*marks, *lines)],
    )
    assert max(took_ms) < 1_000, dict(zip((*marks, *lines), took_ms, strict=True))


async def test_marks_within_a_line(page: Page) -> None:
    expected = {
        "a_b_c 2 * 3 * 4": "a_b_c 2 * 3 * 4",
        "*a* **b** ***c*** ~~d~~": "<em>a</em> <strong>b</strong> <em><strong>c</strong></em> "
        "<del>d</del>",
        "**a `*` and *b***": "<strong>a <code>*</code> and <em>b</em></strong>",
        "\\*a\\* **open *x": "*a* **open *x",
        "one  \ntwo\nthree": "one<br>two\nthree",
        "&lt; <b>x</b>": "&amp;lt; &lt;b&gt;x&lt;/b&gt;",
        "[x]( JaVaScRiPt:a) [y](//e.com) [z](/r)": "[x]( JaVaScRiPt:a) [y](//e.com) [z](/r)",
    }
    shown = await page.evaluate(
        """async (texts) => {
          const { inlineNodes } = await import("/static/chat/inline.js");
          return texts.map((text) => {
            const root = document.createElement("p");
            root.append(...inlineNodes(text));
            return root.innerHTML;
          });
        }""",
        list(expected),
    )
    assert dict(zip(expected, shown, strict=True)) == expected


async def test_markdown_is_the_same_however_it_streams(page: Page) -> None:
    text = (
        "# A\n\npara *one*\nline\n\n1. x\n\n   more\n2. y\n\n```js\nlet a = `b`;\n\n// c\n```\n"
        "after\n\n> q\n> - r\n\n|a|b|\n|-|-|\n|c|d|\n\nend"
    )
    wholes = await page.evaluate(
        """async (text) => {
          const { Markdown } = await import("/static/chat/markdown.js");
          const shown = (step) => {
            const root = document.createElement("div");
            const markdown = new Markdown(root);
            for (let end = step; end < text.length; end += step) markdown.show(text.slice(0, end));
            markdown.show(text);
            return root.innerHTML;
          };
          return [1, 3, 7, 1000].map(shown);
        }""",
        text,
    )
    assert len(set(wholes)) == 1


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
    await expect(page.locator(".trouble")).to_contain_text("bus is away")
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
    await expect(page.locator(".status")).to_contain_text("goes on when it is back")
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
    more = page.get_by_role("button", name="Rename or delete water")
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
    await page.get_by_role("button", name="Rename or delete river").click()
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
        await expect(page.locator(".trouble")).to_contain_text("not there any more")


async def test_the_operations_page_asks_for_a_key(
    browser: Browser, scripted: ScriptedGateway
) -> None:
    scripted.token = "mr-admin"
    async with watched(browser, scripted.url) as window:
        page = await window.open("/ops/")
        await expect(page.locator("#key .why")).to_have_text("This key may not see that.")
        await page.get_by_label("API key of an administrator").fill("mr-admin")
        await page.get_by_role("button", name="Use this key").click()
        await expect(page.locator("#away")).to_contain_text("Telemetry is away.")
        await expect(page.locator("#key")).to_be_hidden()


# A phone.


async def test_a_phone(browser: Browser, scripted: ScriptedGateway) -> None:
    wide = "w" * 300
    scripted.script = lambda _request: [
        f"{wide}\n\n```\n{wide}\n```\n\n| {wide} | b |\n|--|--|\n| 1 | 2 |\n\n`{wide}`"
    ]
    async with watched(browser, scripted.url, **_PHONE) as window:
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
    """Nothing is wider than the screen, and what is pressed is big enough for a finger."""
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
