"""The operations page in Chromium, over rows of a real embedded store."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import uvicorn
from playwright.async_api import Browser, Page, async_playwright, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from schemas.control import TelemetryQuery
from schemas.records import RequestRecord, Status, WorkerSample
from telemetry.answers import Answers
from telemetry.store import Store
from telemetry.tables import REQUESTS, WORKER_SAMPLES
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tests.telemetry.records import request_record, worker_sample

STATIC = Path(__file__).resolve().parents[2] / "gateway" / "static"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = os.environ.get("TEST_SCREENSHOTS", "")

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


class OpsServer:
    """The page's folder under a strict policy, and answers from the store; ``away`` plays a
    telemetry process that does not answer."""

    def __init__(self, store: Store) -> None:
        self.answers = Answers(store.reader)
        self.away = False
        self.num_asked = 0
        self.pages: list[Page] = []
        self.port = free_port()
        app = Starlette(
            routes=[
                Route("/ops/api/{query}", self.api),
                Mount("/ops", StaticFiles(directory=STATIC / "ops", html=True)),
                Mount("/static", StaticFiles(directory=STATIC)),
            ]
        )
        self.server = uvicorn.Server(
            uvicorn.Config(
                app,
                port=self.port,
                log_level="error",
                headers=[("content-security-policy", POLICY)],
            )
        )

    async def api(self, request: Request) -> Response:
        self.num_asked += 1
        if self.away:
            body = {"error": {"message": "The telemetry process does not answer."}}
            return JSONResponse(body, status_code=503)
        query = TelemetryQuery(name=request.path_params["query"], params=dict(request.query_params))
        answer = await self.answers.answer(query)
        assert answer.error == "", answer.error
        return Response(answer.rows_json, media_type="application/json")


@pytest_asyncio.fixture(loop_scope="module")
async def ops(store: Store) -> AsyncIterator[OpsServer]:
    made = OpsServer(store)
    task = asyncio.create_task(made.server.serve())
    await eventually(lambda: made.server.started)
    yield made
    for page in made.pages:
        await page.close()
    made.server.should_exit = True
    await task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        await launched.close()


async def open_page(
    browser: Browser, ops: OpsServer, *, dark: bool = False, width: int = 1440, height: int = 1250
) -> tuple[Page, list[str]]:
    page = await browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    ops.pages.append(page)
    await page.goto(f"http://127.0.0.1:{ops.port}/ops/#15m")
    return page, complaints


async def shoot(page: Page, name: str, *, full: bool = False) -> None:
    """Keep a picture for whoever wants to look at it."""
    if SHOTS:
        await page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=full)


@functools.cache
def traffic() -> tuple[list[RequestRecord], list[WorkerSample]]:
    """A quarter of an hour of traffic that swells and ebbs, with some of everything."""
    now_ns = time.time_ns()
    records = []
    for number in range(2_400):
        # Denser towards two moments, like people coming back from a break.
        age_s = (number * 0.37 + 60 * ((number * 7919) % 13)) % 890
        record = request_record(number, done_ns=now_ns - int(age_s * 1e9))
        if number % 61 == 0:
            record = msgspec.structs.replace(
                record, status=Status.FAILED, error_code="engine_error", finish_reason=""
            )
        elif number % 37 == 0:
            record = msgspec.structs.replace(record, status=Status.CANCELLED, finish_reason="")
        elif number % 83 == 0:
            record = msgspec.structs.replace(
                record,
                status=Status.SHED,
                error_code="queue_full",
                finish_reason="",
                started_ns=0,
                first_token_ns=0,
                completion_tokens=0,
                worker_id="",
            )
        records.append(record)
    samples = [
        worker_sample(n, sampled_ns=now_ns - n * 10**9, worker=worker)
        for n in range(900)
        for worker in ("worker-1", "worker-2")
    ]
    return records, samples


async def fill(store: Store) -> None:
    records, samples = traffic()
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(len(records))), "page")
    await store.insert(
        WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(len(samples))), "page"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_it_draws_what_the_store_holds(
    store: Store, ops: OpsServer, browser: Browser, dark: bool
) -> None:
    await fill(store)
    page, complaints = await open_page(browser, ops, dark=dark)
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
    await expect(page.locator(".panel svg .marks > *")).not_to_have_count(0)
    await expect(page.locator(".tile .value").first).to_have_text("2,400")
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    await expect(page.locator(".nothing:visible")).to_have_count(0)
    await shoot(page, f"ops-{'dark' if dark else 'light'}")
    assert complaints == []


async def test_pointing_reads_out_every_chart_at_one_moment(
    store: Store, ops: OpsServer, browser: Browser
) -> None:
    await fill(store)
    page, complaints = await open_page(browser, ops)
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    box = await page.locator(".plot").first.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    moments = await page.locator(".when:not([hidden])").all_text_contents()
    assert len(moments) >= 6
    assert len(set(moments[:6])) == 1
    await shoot(page, "ops-hover")
    assert complaints == []


async def test_an_empty_store_says_how_to_fill_it(ops: OpsServer, browser: Browser) -> None:
    page, complaints = await open_page(browser, ops)
    await expect(page.locator("#empty")).to_be_visible()
    await expect(page.locator("#empty-curl")).to_contain_text("/v1/chat/completions")
    await expect(page.locator(".nothing:visible")).to_have_count(7)
    await shoot(page, "ops-empty")
    assert complaints == []


async def test_telemetry_away_is_said_and_it_recovers(
    store: Store, ops: OpsServer, browser: Browser
) -> None:
    await fill(store)
    page, _ = await open_page(browser, ops)
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    ops.away = True
    await expect(page.locator("#away")).to_be_visible(timeout=10_000)
    await expect(page.locator("#away")).to_contain_text("does not answer")
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    await shoot(page, "ops-away")
    ops.away = False
    await expect(page.locator("#away")).to_be_hidden(timeout=10_000)


async def test_a_range_is_chosen_and_remembered_in_the_address(
    store: Store, ops: OpsServer, browser: Browser
) -> None:
    await fill(store)
    page, complaints = await open_page(browser, ops)
    await page.get_by_role("radio", name="5 min", exact=True).click()
    await expect(page.locator("[role=radio][aria-checked=true]")).to_have_text("5 min")
    assert page.url.endswith("#5m")
    await page.keyboard.press("ArrowRight")
    assert page.url.endswith("#15m")
    await page.get_by_role("radio", name="7 d").click()
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
    await expect(page.locator(".axes .x").first).to_contain_text(re.compile("[A-Z][a-z]{2} [0-9]+"))
    await shoot(page, "ops-week")
    assert complaints == []


async def test_on_a_narrow_screen_nothing_overflows(
    store: Store, ops: OpsServer, browser: Browser
) -> None:
    await fill(store)
    page, complaints = await open_page(browser, ops, width=390, height=844)
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0
    await shoot(page, "ops-narrow", full=True)
    assert complaints == []


async def test_it_rests_while_nobody_looks(ops: OpsServer, browser: Browser) -> None:
    page, _ = await open_page(browser, ops)
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
    await page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    await expect(page.locator("#state")).to_have_attribute("data-state", "paused")
    asked = ops.num_asked
    await page.wait_for_timeout(3_000)
    assert ops.num_asked == asked
    await page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {get: () => false});"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
