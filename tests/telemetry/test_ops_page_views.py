"""Views of the operations page, kept in the address: ranges, filters, one request, files."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect
from playwright.async_api import Error as PlaywrightError

from millrace.schemas.records import RequestRecord
from millrace.telemetry.store.store import Store
from tests.support.waiting import eventually
from tests.telemetry.ops_page import OpsPage, serving, shoot
from tests.telemetry.stores import empty
from tests.telemetry.traffic import MOVED_ID, NUM_REQUESTS, fill

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow(
        reason="20 s of Chromium; test_ops_page.py loads the same page, and tests/telemetry/queries"
        " has the queries that it asks"
    ),
    pytest.mark.browser,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(opened_store: Store) -> Store:
    """Emptied once for all tests here, which only look at it."""
    await empty(opened_store)
    return opened_store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def records(store: Store) -> list[RequestRecord]:
    return await fill(store)


@pytest_asyncio.fixture(loop_scope="module")
async def ops(
    store: Store, browser: Browser, records: list[RequestRecord]
) -> AsyncIterator[OpsPage]:
    async with serving(store, browser) as made:
        yield made


async def shows(page: Page, num_requests: int) -> None:
    await expect(page.locator(".tile .value").first).to_have_text(f"{num_requests:,}")


async def test_a_range_is_chosen_and_kept_in_the_address(ops: OpsPage) -> None:
    page, complaints = await ops.open()
    await shows(page, NUM_REQUESTS + 1)
    await page.get_by_role("radio", name="1 h", exact=True).click()
    await expect(page.locator("[role=radio][aria-checked=true]")).to_have_text("1 h")
    assert page.url.endswith("#range=1h")
    await page.keyboard.press("ArrowRight")
    assert page.url.endswith("#range=6h")
    await page.get_by_role("radio", name="30 d").click()
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
    drawn = "() => drawnTexts.some((text) => /^[0-9]+ [A-Z]/.test(text))"
    await page.wait_for_function(drawn, timeout=10_000)
    await page.go_back()
    await expect(page.locator("[role=radio][aria-checked=true]")).to_have_text("6 h")
    await shows(page, NUM_REQUESTS + 1)
    assert complaints == []


async def test_a_range_of_ones_own_is_fixed_and_shared(
    ops: OpsPage, records: list[RequestRecord]
) -> None:
    page, complaints = await ops.open()
    await shows(page, NUM_REQUESTS + 1)
    await page.get_by_role("radio", name="Custom").click()
    await expect(page.locator("#from")).to_be_focused()
    end_s = int(time.time()) // 60 * 60 - 120
    for name, at_s in (("from", end_s - 300), ("to", end_s)):
        local = time.strftime("%Y-%m-%dT%H:%M", time.localtime(at_s))
        await page.locator(f"#{name}").fill(local)
    await page.get_by_role("button", name="Show").click()
    within = [r for r in records if end_s - 300 <= r.done_ns / 1e9 < end_s]
    await shows(page, len(within))
    await expect(page.locator("#state")).to_have_attribute("data-state", "still")
    address = page.url
    assert time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(end_s)) in address
    other, _ = await ops.open(address.partition("/ops/")[2])
    await shows(other, len(within))

    await page.locator("#to").fill("2020-01-01T00:00")
    await page.get_by_role("button", name="Show").click()
    await expect(page.locator("#custom-why")).to_contain_text("after the beginning")
    await shoot(page, "ops-custom")
    assert complaints == []


async def test_a_stretch_that_is_drawn_is_looked_at(ops: OpsPage) -> None:
    page, complaints = await ops.open()
    await shows(page, NUM_REQUESTS + 1)
    box = await page.locator(".plot").first.bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2
    await page.mouse.move(middle, box["y"] + 50)
    await page.mouse.down()
    await page.mouse.move(middle + 90, box["y"] + 60, steps=4)
    width = await page.locator(".u-select").first.evaluate("stretch => stretch.offsetWidth")
    assert width == pytest.approx(90, abs=2)
    await shoot(page, "ops-stretch")
    await page.mouse.up()
    await expect(page.locator("[role=radio][aria-checked=true]")).to_have_text("Custom")
    assert re.search(r"#from=\d{4}-\d\d-\d\dT", page.url)
    await page.go_back()
    await shows(page, NUM_REQUESTS + 1)
    assert complaints == []


async def test_tenant_and_model_filter_what_is_shown(
    ops: OpsPage, records: list[RequestRecord]
) -> None:
    acme = [r for r in records if r.tenant == "acme"]
    large = [r for r in acme if r.model_served == "demo-large"]
    page, complaints = await ops.open()
    await expect(page.locator("#tenant option")).to_have_count(4)
    await page.locator("#tenant").select_option("acme")
    await shows(page, len(acme))
    await page.locator("#model").select_option("demo-large")
    await shows(page, len(large))
    assert page.url.endswith("#range=15m&tenant=acme&model=demo-large")
    await expect(page.locator("#recent tbody tr td:nth-child(5)").first).to_have_text("acme")
    asked = [query for query in ops.asked if query.name == "tokens"][-1]
    assert (asked.params["tenant"], asked.params["model"]) == ("acme", "demo-large")
    await page.get_by_role("button", name="Clear").click()
    await shows(page, NUM_REQUESTS + 1)
    assert complaints == []


async def test_a_tenant_of_no_requests_is_kept_as_the_choice(ops: OpsPage) -> None:
    page, _ = await ops.open("#range=1h&tenant=nobody")
    await expect(page.locator("#empty")).to_contain_text("for this choice of tenant and model")
    assert await page.locator("#tenant").input_value() == "nobody"


async def test_recent_requests_by_how_they_ended_and_by_id(ops: OpsPage) -> None:
    page, complaints = await ops.open()
    await page.locator("#status").select_option("shed")
    shed = page.locator("#recent .status[data-status=shed]")
    await expect(page.locator("#recent .status:not([data-status=shed])")).to_have_count(0)
    await expect(shed.first).to_contain_text("queue_full")
    await page.locator("#status").select_option("")
    await page.get_by_label("Id begins with").fill("req-mov")
    await expect(page.locator("#recent tbody tr")).to_have_count(1)
    await expect(page.locator("#recent .runs")).to_have_text("run 2")
    assert page.url.endswith("&id=req-mov")
    assert complaints == []


async def open_still(ops: OpsPage) -> tuple[Page, list[str]]:
    """The page of a range that is over, all shown: it asks for nothing more by itself."""
    now = datetime.now(UTC)
    opened = await ops.open(f"#from={now - timedelta(minutes=20):%FT%TZ}&to={now:%FT%TZ}")
    await expect(opened[0].locator("#state")).to_have_attribute("data-state", "still")
    return opened


async def test_the_questions_of_a_view_that_was_left_keep_nobody_waiting(ops: OpsPage) -> None:
    page, complaints = await open_still(ops)
    asked: list[str] = []
    go_on = asyncio.Event()

    async def hold(route: Route) -> None:
        asked.append(route.request.url)
        await go_on.wait()
        with contextlib.suppress(PlaywrightError):  # the page has aborted the request
            await route.continue_()

    await page.route("**/api/**", hold)
    for status in ("shed", "failed", ""):
        await page.locator("#status").select_option(status)
    await page.get_by_label("Id begins with").fill("req-mov")
    await eventually(lambda: page.url.endswith("&id=req-mov"))
    go_on.set()
    await expect(page.locator("#recent tbody tr")).to_have_count(1)
    tables = [url for url in asked if "recent_requests" in url]
    assert [parse_qs(urlsplit(url).query, keep_blank_values=True)["id"] for url in tables] == [
        ["req-mov"]
    ]
    assert complaints == []


async def test_a_request_that_was_clicked_does_not_wait_for_the_view(ops: OpsPage) -> None:
    page, complaints = await open_still(ops)
    asked: list[str] = []
    go_on = asyncio.Event()

    async def hold(route: Route) -> None:
        asked.append(urlsplit(route.request.url).path.rsplit("/", 1)[-1])
        await go_on.wait()
        with contextlib.suppress(PlaywrightError):  # the page has aborted the request
            await route.continue_()

    await page.route("**/api/**", hold)
    await page.locator("#status").select_option("failed")
    await eventually(lambda: len(asked) == 3)
    await page.evaluate(f"location.hash += '&request={MOVED_ID}'")
    await expect(page.get_by_role("dialog")).to_contain_text("Loading…")
    go_on.set()
    await expect(page.get_by_role("dialog").locator(".timeline li")).to_have_count(9)
    assert {"request_details", "request_timeline"} <= set(asked[:6])
    assert complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_one_request_is_told_from_its_receipt_to_its_end(ops: OpsPage, dark: bool) -> None:
    page, complaints = await ops.open(f"#range=15m&id={MOVED_ID}", dark=dark)
    link = page.get_by_role("link", name=f"Request {MOVED_ID}")
    await link.focus()
    await page.keyboard.press("Enter")
    sheet = page.get_by_role("dialog")
    await expect(sheet).to_contain_text(MOVED_ID)
    await expect(sheet.locator(".timeline .what")).to_have_text(
        [
            "Received, queued",
            "Prefill",
            "Interrupted",
            "Dispatched",
            "Prefill",
            "First token of this run",
            "First byte to the client",
            "Done",
            "Delivery over",
        ]
    )
    await expect(sheet.locator(".timeline .offset").nth(2)).to_have_text("+2,100 ms")
    await expect(sheet).to_contain_text("Proposed ahead")
    await expect(sheet.locator("dt:text-is('Pulled') + dd")).to_have_text(
        "1,984 from worker-3-5f0c2e9b"
    )
    await expect(sheet.locator("dt:text-is('Device time') + dd")).to_have_text(
        re.compile("840.*, of 4 devices")
    )
    await expect(sheet.locator(".sums")).to_have_text(
        re.compile("waiting.*250 ms.*prefill.*150 ms.*decode.*1,600 ms.*earlier runs.*2,000 ms")
    )
    await expect(sheet.locator(".groups")).to_contain_text("0af7651916cd43dd8448eb211c80319c")
    assert page.url.endswith(f"request={MOVED_ID}")
    await shoot(page, f"ops-request-{'dark' if dark else 'light'}")
    await page.keyboard.press("Escape")
    await expect(sheet).to_be_hidden()
    await expect(link).to_be_focused()
    await expect(page).not_to_have_url(re.compile("request="))
    assert complaints == []


async def test_a_request_is_linked_to_and_leads_on(ops: OpsPage) -> None:
    page, complaints = await ops.open(f"#range=15m&request={MOVED_ID}")
    sheet = page.get_by_role("dialog")
    await expect(sheet.locator(".timeline li")).to_have_count(9)
    await sheet.get_by_role("button", name="acme").click()
    await expect(sheet).to_be_hidden()
    assert page.url.endswith("#range=15m&tenant=acme")
    await page.go_back()
    await expect(sheet).to_be_visible()
    other, _ = await ops.open("#request=req-nobody-knows")
    await expect(other.get_by_role("dialog")).to_contain_text("No request with this id has ended")
    assert complaints == []


async def test_files_of_what_is_shown(
    ops: OpsPage, records: list[RequestRecord], tmp_path: Path
) -> None:
    page, complaints = await ops.open("#range=15m&tenant=acme")
    await expect(page.locator("#recent tbody tr")).to_have_count(50)

    async def rows_of(button: str) -> list[dict[str, str]]:
        async with page.expect_download() as download:
            await page.get_by_role("button", name=button).click()
        kept = tmp_path / (await download.value).suggested_filename
        await (await download.value).save_as(kept)
        with kept.open(newline="") as file:
            return list(csv.DictReader(file))

    requests = await rows_of("Save all as CSV")
    acme = sorted(r.request_id for r in records if r.tenant == "acme")
    assert sorted(row["request_id"] for row in requests) == acme
    cost = await rows_of("Save “Tenants pay” as a CSV file")
    assert {row["currency"] for row in cost} == {"USD"}
    errors = await rows_of("Save “Errors” as a CSV file")
    assert "engine_error" in {row["error_code"] for row in errors}
    assert complaints == []


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
async def test_the_tables_are_described(ops: OpsPage, width: int) -> None:
    """The page shows docs/tables.md without a key and without a query to telemetry."""
    page, complaints = await ops.open("tables.html", width=width)
    rows = page.locator("#columns tbody tr")
    await expect(page.locator("#said")).to_contain_text("Times are UTC")
    await page.get_by_label("Find").fill("requests_once energy")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("energy_j")
    await expect(rows).to_contain_text("Nullable(Float64)")
    await shoot(page, f"tables-{width}")
    await page.get_by_label("Find").fill("no such column")
    await expect(rows).to_contain_text("No table or column")
    assert ops.asked == []
    assert complaints == []
