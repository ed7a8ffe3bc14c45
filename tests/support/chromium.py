"""The browser that the tests drive."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

# The first has no windows to begin with: a page takes it less than half of the CPU time.
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM = os.environ.get("TEST_CHROMIUM") or next(filter(None, map(shutil.which, _PROGRAMS)), None)
_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """It runs until the context ends."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()
