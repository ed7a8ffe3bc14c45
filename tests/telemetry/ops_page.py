"""The operations page as a gateway serves it, in Chromium, over a real store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, Page

from millrace.bus.transport import Subscription
from millrace.runtime.alerts.watch import AlertWatch
from millrace.runtime.clock import SystemClock
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.telemetry.http.answers import SavedQueryAnswers
from millrace.telemetry.store.store import Store
from tests.support.running_gateway import RunningGateway, running_gateway

SHOTS = os.environ.get("TEST_SCREENSHOTS", "")

# What charts write on their canvases, which is no part of the document.
_KEEP_DRAWN_TEXTS = """
  window.drawnTexts = [];
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.drawnTexts.push(text);
    return fillText.call(this, text, ...rest);
  };
"""
# How many charts have a mark in the colour of one of the page's series on their canvas.
_COUNT_CHARTS_WITH_MARKS = """() => {
  const style = getComputedStyle(document.documentElement);
  const hues = [0, 1, 2, 3, 4, 5].map((i) => style.getPropertyValue(`--s${i}`).trim().slice(1));
  const colours = new Set(hues.map((hue) => Number.parseInt(hue, 16)));
  return [...document.querySelectorAll(".plot canvas")].filter((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
      if (colours.has(data[i] * 65536 + data[i + 1] * 256 + data[i + 2])) return true;
    }
    return false;
  }).length;
}"""


class OpsPage:
    """A gateway whose bus has a telemetry process on the store, until it ``leaves``. ``asked`` are
    the questions that came, ``alerts`` what that process knows of itself."""

    def __init__(self, front: RunningGateway, store: Store, browser: Browser) -> None:
        self.front = front
        self.asked: list[TelemetryQuery] = []
        self.alerts = AlertWatch(SystemClock())
        self._answers = SavedQueryAnswers(store.reader, self.alerts.alerts)
        self._browser = browser
        self._pages: list[Page] = []
        self._subscription: Subscription | None = None

    async def comes(self) -> None:
        self._subscription = await self.front.worker.bus.control.serve_telemetry(self.answer)

    async def leaves(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    async def answer(self, query: TelemetryQuery) -> TelemetryAnswer:
        self.asked.append(query)
        return await self._answers.answer(query)

    async def open(
        self,
        hash_: str = "#range=15m",
        *,
        dark: bool = False,
        width: int = 1440,
        height: int = 1250,
        touch: bool = False,
    ) -> tuple[Page, list[str]]:
        """Open the page; also return the complaints of its console."""
        context = await self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            is_mobile=touch,
        )
        await context.add_init_script(_KEEP_DRAWN_TEXTS)
        page = await context.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        self._pages.append(page)
        await page.goto(f"{self.front.url}/ops/{hash_}")
        return page, complaints

    async def close(self) -> None:
        for page in self._pages:
            await page.context.close()


@asynccontextmanager
async def serving(store: Store, browser: Browser) -> AsyncIterator[OpsPage]:
    async with running_gateway() as front:
        made = OpsPage(front, store, browser)
        await made.comes()
        try:
            yield made
        finally:
            await made.close()
            await made.leaves()


async def count_charts_with_marks(page: Page) -> int:
    counted: int = await page.evaluate(_COUNT_CHARTS_WITH_MARKS)
    return counted


async def shoot(page: Page, name: str, *, full: bool = False) -> None:
    """Save a screenshot if the environment names a folder for it."""
    if SHOTS:
        await page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=full)
