"""The browser that the tests drive."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

# The first has no windows to begin with: a page takes it less than half of the CPU time.
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = os.environ.get("TEST_CHROMIUM") or next(filter(None, map(shutil.which, _PROGRAMS)), None)
_TEXTS_OF_PAGE = Path(__file__).with_name("texts_of_page.js").read_text(encoding="utf-8")
_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Chromium until the context ends."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


async def unreadable_texts(page: Page) -> list[str]:
    """Texts whose contrast is below 4.5, or below 3 if they are large (WCAG 2.2, 1.4.3). Texts of
    disabled controls count."""
    texts = await page.evaluate(_TEXTS_OF_PAGE)
    assert texts, "the page shows no text"
    return [
        f"{one['ratio']:.2f} of {one['least']}: {one['text']!r} in {one['where']}"
        for one in texts
        if one["ratio"] < one["least"]
    ]
