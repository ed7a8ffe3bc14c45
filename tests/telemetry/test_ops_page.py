"""Operations page in Chromium: light and dark, on a phone, with no data and with much."""

from __future__ import annotations

import time

import msgspec
import pytest
from playwright.async_api import Page, expect

from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import WORKER_SAMPLES
from tests.support.chromium import unreadable_texts
from tests.telemetry.ops_page import OpsPage, count_charts_with_marks, shoot
from tests.telemetry.records import refusal_record, worker_sample
from tests.telemetry.traffic import NUM_REQUESTS, fill, fill_euros, fill_month

_NUM_CHARTS = 16
_MANY_ROWS = 50_000

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_the_page_draws_the_stored_figures(store: Store, ops: OpsPage, dark: bool) -> None:
    await fill(store)
    page, complaints = await ops.open(dark=dark)
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
    await expect(page.locator(".tile .value").first).to_have_text(f"{NUM_REQUESTS + 1:,}")
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    await expect(page.locator("#workers tbody tr")).to_have_count(2)
    assert {"Role", "Pulled", "Served"} <= await _columns_of_workers(page)
    await expect(page.locator("#workers tbody tr").first).to_contain_text("prefill")
    await expect(page.locator("#workers tbody tr").last).to_contain_text("decode")
    await expect(page.locator("#unit-cost tbody tr").first).to_contain_text("$")
    await expect(page.locator("#errors tbody")).to_contain_text("engine_error")
    await expect(page.locator(".nothing:visible")).to_have_count(0)
    assert await count_charts_with_marks(page) == _NUM_CHARTS
    await shoot(page, f"ops-{'dark' if dark else 'light'}", full=True)
    assert complaints == []


async def _columns_of_workers(page: Page) -> set[str]:
    names = await page.locator("#workers thead th").evaluate_all(
        "cells => cells.map((cell) => cell.firstChild.textContent)"
    )
    return set(names)


async def test_workers_without_roles_that_exchange_nothing_have_no_columns_for_it(
    store: Store, ops: OpsPage
) -> None:
    samples = [worker_sample(0, sampled_ns=time.time_ns(), worker=name) for name in ("w-1", "w-2")]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, [1, 2]), "plain")
    page, complaints = await ops.open()
    await expect(page.locator("#workers tbody tr")).to_have_count(2)
    plain = await _columns_of_workers(page)
    assert "Running" in plain
    assert not {"Devices", "Role", "Pulled", "Served"} & plain
    pulling = msgspec.structs.replace(
        worker_sample(1, sampled_ns=time.time_ns(), worker="w-1"),
        pulled_tokens=4_096,
        num_devices=2,
    )
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns([pulling], [3]), "pulling")
    await expect(page.locator("#workers tbody tr").first).to_contain_text("4,096", timeout=15_000)
    assert await _columns_of_workers(page) == plain | {"Devices", "Pulled", "Served"}
    assert complaints == []


async def test_charts_are_read_with_the_pointer_and_the_keyboard(
    store: Store, ops: OpsPage
) -> None:
    """Pointing reads out every chart at one moment."""
    await fill(store)
    page, complaints = await ops.open()
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    plot = page.locator(".plot").first
    box = await plot.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 60)
    moments = await page.locator(".when:not([hidden])").all_text_contents()
    assert len(moments) >= 6
    assert len(set(moments[:6])) == 1
    await shoot(page, "ops-hover")
    await page.locator("#traffic .plot").first.focus()
    spoken = page.locator("#traffic .spoken").first
    await page.keyboard.press("Home")
    await expect(spoken).to_contain_text("done")
    first = await spoken.text_content()
    await page.keyboard.press("ArrowRight")
    await expect(spoken).not_to_have_text(first or "")
    assert complaints == []


async def test_an_empty_store_says_how_to_fill_it(ops: OpsPage) -> None:
    page, complaints = await ops.open()
    await expect(page.locator("#empty")).to_be_visible()
    await expect(page.locator("#empty")).to_contain_text("within the last 15 minutes")
    await expect(page.locator("#empty-curl")).to_contain_text("/v1/chat/completions")
    await expect(page.locator(".nothing:visible")).to_have_count(_NUM_CHARTS)
    await expect(page.locator("#workers tbody")).to_contain_text("No worker has reported")
    await shoot(page, "ops-empty", full=True)
    assert complaints == []


async def test_unreachable_telemetry_is_said_and_it_recovers(store: Store, ops: OpsPage) -> None:
    await fill(store)
    page, _ = await ops.open()
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    await ops.leaves()
    await expect(page.locator("#problem")).to_be_visible(timeout=10_000)
    await expect(page.locator("#problem")).to_contain_text("Telemetry is unreachable.")
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    await shoot(page, "ops-away")
    await ops.comes()
    await expect(page.locator("#problem")).to_be_hidden(timeout=10_000)


async def test_the_page_is_readable_in_every_state(store: Store, ops: OpsPage) -> None:
    """Money of two currencies and a spent error budget are there, and all of it is readable while
    the page loads, lives, waits for telemetry or for a key, in light and dark."""
    refused = refusal_record(time.time_ns(), 1, tenant="acme", limit="monthly_budget")
    await fill(store, [refused])
    await fill_euros(store)
    found: list[str] = []

    async def look(page: Page, state: str) -> None:
        for theme in ("light", "dark"):
            await page.emulate_media(
                color_scheme="dark" if theme == "dark" else "light", reduced_motion="reduce"
            )
            await expect(page.locator("html")).to_have_attribute("data-theme", theme)
            found.extend(f"{state}, {theme}: {text}" for text in await unreadable_texts(page))
            await shoot(page, f"ops-{state.replace(' ', '-')}-{theme}", full=True)

    page, complaints = await ops.open()
    await page.route("**/api/**", lambda route: route.abort())
    await page.reload()
    await look(page, "nothing yet")
    await expect(page.locator("#problem")).to_be_visible()
    await look(page, "never reached")
    await page.unroute("**/api/**")
    complaints.clear()
    await expect(page.locator("#recent tbody tr")).to_have_count(50, timeout=15_000)
    await expect(page.locator(".tile dt:text-is('Tenants pay, EUR') + dd")).to_have_text("€6.00")
    await expect(page.locator(".tile dt:text-is('Tenants pay, USD') + dd")).to_contain_text("$")
    await expect(page.locator("#cost .panel:visible h3 .unit")).to_have_text(
        ["EUR", "EUR", "USD", "USD", "computed"]
    )
    await expect(page.locator("#slo tbody")).to_contain_text("overspent")
    await expect(page.locator("#alerts-note")).to_contain_text(
        "1 error budget overspent, 1 tenant over its monthly budget"
    )
    await expect(page.locator("#alerts tbody")).not_to_contain_text("No alerts are firing")
    await look(page, "live")
    await page.locator("#recent tbody a").first.click()
    await expect(page.locator("#request .timeline li").first).to_be_visible()
    await look(page, "one request")
    await page.keyboard.press("Escape")
    assert complaints == []
    await ops.leaves()
    await expect(page.locator("#problem")).to_be_visible(timeout=15_000)
    await look(page, "telemetry is away")
    await ops.comes()
    forbidden = {"error": {"message": "This needs an API key of an administrator."}}
    await page.route("**/api/**", lambda route: route.fulfill(status=403, json=forbidden))
    await page.reload()
    await expect(page.locator("#key")).to_be_visible()
    await look(page, "a key is asked for")
    await page.unroute("**/api/**")
    tables, _ = await ops.open("tables.html")
    await expect(tables.locator("#said")).to_contain_text("Times are UTC")
    await look(tables, "tables")
    assert found == [], "\n".join(found)


async def test_on_a_phone_nothing_overflows(store: Store, ops: OpsPage) -> None:
    await fill(store)
    page, complaints = await ops.open(width=390, height=844, touch=True)
    await expect(page.locator("#recent tbody tr")).to_have_count(50)
    overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0
    await shoot(page, "ops-phone", full=True)
    await page.locator("#recent tbody a").first.tap()
    await expect(page.locator("#request .timeline li").first).to_be_visible()
    overflow = await page.evaluate(
        "(s => s.scrollWidth - s.clientWidth)(document.querySelector('#request'))"
    )
    assert overflow <= 0
    await shoot(page, "ops-phone-request")
    assert complaints == []


async def test_a_hidden_page_asks_nothing(ops: OpsPage) -> None:
    page, _ = await ops.open()
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")
    await page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    await expect(page.locator("#state")).to_have_attribute("data-state", "paused")
    await page.wait_for_load_state("networkidle")
    asked = len(ops.asked)
    await page.wait_for_timeout(3_000)
    assert len(ops.asked) == asked
    await page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {get: () => false});"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    await expect(page.locator("#state")).to_have_attribute("data-state", "live")


async def test_a_month_of_many_requests(store: Store, ops: OpsPage) -> None:
    await fill_month(store, _MANY_ROWS)
    page, complaints = await ops.open("#range=30d")
    await expect(page.locator("#recent tbody tr")).to_have_count(50, timeout=30_000)
    await expect(page.locator(".tile .value").first).to_have_text(f"{_MANY_ROWS:,}")
    await expect(page.locator("#tenant option")).to_have_count(51)
    await expect(page.locator("#model option")).to_have_count(6)
    await shoot(page, "ops-month", full=True)
    assert complaints == []
