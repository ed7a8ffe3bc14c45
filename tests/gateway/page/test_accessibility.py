"""Accessibility of the page in each state, checked with axe-core.

Disabled controls, which axe-core leaves out, are readable too.
"""

from __future__ import annotations

from typing import Literal

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Route, expect

from tests.gateway.page.windows import MARKS, PHONE, ask, complete, ready, watched
from tests.support.chromium import unreadable_texts
from tests.support.running_gateway import RunningGateway

pytestmark = MARKS

THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
ANSWER = [
    "# Title\n\nSome `code`, $x^2$, $\\frac{1$ and a [link](https://example.com/).\n\n",
    "$$\\sum_i x_i$$\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n",
    "```python\n# comment\nprint('one', 1)\n```\n\n> quoted\n\n- [x] done\n",
]


class Checked:
    """Checks of one page: each state in both themes; findings are recorded under its name."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.found: list[str] = []

    async def look(self, state: str) -> None:
        for theme in THEMES:
            await self.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            await expect(self.page.locator("html")).to_have_attribute("data-theme", theme)
            results = await Axe().run(self.page)
            for violation in results.response["violations"]:
                for node in violation["nodes"]:
                    what = f"{violation['id']} {node['target']} {node['failureSummary']}"
                    self.found.append(f"{state}, {theme}: {what}")
            for text in await unreadable_texts(self.page):
                self.found.append(f"{state}, {theme}: {text}")


async def test_nothing_is_wrong_with_the_page(front: RunningGateway, page: Page) -> None:
    checked = Checked(page)
    await checked.look("empty")
    front.worker.script = lambda _job: ANSWER
    await ask(page, "\n".join(map(str, range(40))))
    await page.get_by_role("button", name="Retry").click()
    await expect(page.locator(".versions")).to_contain_text("2/2")
    await complete(page)
    await expect(page.locator(".math")).to_have_count(2)
    await page.locator("#sessions li").hover()
    await page.locator("#sessions .more").click()
    await page.locator("#attach-file").set_input_files(
        {"name": "a.md", "mimeType": "", "buffer": b"# x"}
    )
    await page.locator("#attach-file").set_input_files(
        {"name": "c.bin", "mimeType": "", "buffer": b"\0"}
    )
    await expect(page.locator("#attach-trouble")).to_be_visible()
    await page.get_by_label("Search conversations").fill("39")
    await expect(page.locator("#sessions small")).to_have_count(1)
    await checked.look("a conversation")
    await page.locator(".question").hover()
    await page.get_by_role("button", name="Edit this question").click()
    await checked.look("editing")
    await page.get_by_role("button", name="System prompt and parameters").click()
    await page.locator("#parameters").get_by_label("Seed").fill("x")
    await checked.look("parameters")
    await page.keyboard.press("Escape")
    await page.get_by_role("button", name="Settings").click()
    await checked.look("settings")
    await page.keyboard.press("Escape")
    front.broker.stop()
    await page.locator("#prompt").fill("anybody?")
    await page.locator("#send").click()
    await expect(page.locator(".turn .trouble").last).to_contain_text("unreachable")
    front.broker.start()
    await checked.look("trouble")
    assert checked.found == [], "\n".join(checked.found)


async def test_the_page_is_readable_while_it_waits(browser: Browser, front: RunningGateway) -> None:
    """The page is readable while it waits for the models, for a key and for an answer."""
    async with watched(browser, front.url) as window:
        page = await window.context.new_page()
        checked = Checked(page)
        held: list[Route] = []
        await page.route("**/v1/models", lambda route: held.append(route))
        await page.goto(front.url)
        await expect(page.locator(".examples button").first).to_be_disabled()
        await checked.look("before the models are known")
        error = {
            "error": {"message": "This gateway demands an API key.", "code": "invalid_api_key"}
        }
        await held.pop().fulfill(status=401, json=error)
        await expect(page.locator("#settings")).to_be_visible()
        await checked.look("before a key is given")
        await page.keyboard.press("Escape")
        await page.unroute("**/v1/models")
        await page.reload()
        await ready(page)
        front.worker.gate.clear()
        await page.locator("#prompt").fill("hello")
        await page.locator("#send").click()
        await expect(page.locator(".answer").last).to_have_attribute("aria-busy", "true")
        await checked.look("before an answer")
        front.worker.gate.set()
        await complete(page)
    assert checked.found == [], "\n".join(checked.found)


async def test_nothing_is_wrong_on_a_phone(browser: Browser, front: RunningGateway) -> None:
    async with watched(browser, front.url, **PHONE) as window:
        page = await window.open()
        checked = Checked(page)
        await ready(page)
        await ask(page, "hello")
        await checked.look("a conversation")
        await page.get_by_role("button", name="Conversations").click()
        await checked.look("the list")
    assert checked.found == [], "\n".join(checked.found)
