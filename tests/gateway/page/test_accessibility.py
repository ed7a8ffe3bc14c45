"""axe-core finds nothing wrong with the page, in whatever state it is."""

from __future__ import annotations

from typing import Literal

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from tests.gateway.page.windows import MARKS, PHONE, ask, complete, ready, watched
from tests.support.running_gateway import RunningGateway

pytestmark = MARKS

THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
ANSWER = [
    "# Title\n\nSome `code`, $x^2$, $\\frac{1$ and a [link](https://example.com/).\n\n",
    "$$\\sum_i x_i$$\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n",
    "```python\n# comment\nprint('one', 1)\n```\n\n> quoted\n\n- [x] done\n",
]


class Checked:
    """Each state is looked at in both themes; what is wrong is noted under its name."""

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
