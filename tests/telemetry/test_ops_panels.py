"""Panels of the operations page: refusals, alerts, usage, waits of clients, and comparisons."""

from __future__ import annotations

import csv
import re
import time
from decimal import Decimal

import msgspec
import pytest
from msgspec.structs import replace
from playwright.async_api import Locator, Page, expect

from millrace.runtime.alerts.watch import AlertCondition
from millrace.schemas.models.rollouts import Rollout, RolloutState, VersionFigures
from millrace.schemas.records import RefusalRecord, RequestRecord
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS
from tests.bus.fleet.memory_rollouts import MemoryRolloutStore
from tests.telemetry.ops_page import OpsPage, shoot
from tests.telemetry.records import refusal_record, request_record
from tests.telemetry.traffic import NUM_REQUESTS, fill

NS = 10**9

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow(
        reason="23 s of Chromium; test_ops_page.py loads the same page, and tests/telemetry/queries"
        " has the queries that it asks"
    ),
    pytest.mark.browser,
]


def _refused() -> list[RefusalRecord]:
    now_ns = time.time_ns()
    many = msgspec.structs.replace(
        refusal_record(now_ns - NS, 0, count=1_204, tenant="acme", limit="tokens_per_minute"),
        request_ids=tuple(f"chatcmpl-limit-{n}" for n in range(8)),
    )
    return [
        many,
        refusal_record(now_ns - 2 * NS, 1, count=88_000, code="invalid_api_key", status=401),
        refusal_record(now_ns - 3 * NS, 2, count=2, tenant="globex", code="invalid_json"),
        refusal_record(now_ns - NS, 3, count=9, tenant="acme", code="storage_full", status=503),
    ]


async def test_what_was_refused_is_seen(store: Store, ops: OpsPage) -> None:
    await fill(store, _refused())
    page, complaints = await ops.open()
    rows = page.locator("#refusals tbody tr")
    await expect(rows).to_have_count(4)
    await expect(rows.nth(0)).to_contain_text("invalid_api_key")
    await expect(rows.nth(0)).to_contain_text("88,000")
    await expect(rows.nth(1)).to_contain_text("5f0c2e9b71aa")
    await expect(rows.nth(1).locator("td").nth(2)).to_have_text("tokens_per_minute")
    await expect(page.locator("#refusals-note")).to_have_text("89,215 requests")
    await expect(_tile(page, "Refused")).to_contain_text("1,204 by a limit (429)")
    await expect(page.locator("#refused-requests .legend")).to_contain_text("tokens_per_minute 429")
    await page.locator("#refusals").scroll_into_view_if_needed()
    await shoot(page, "ops-refusals")
    await page.locator("#tenant").select_option("globex")
    await expect(rows).to_have_count(1, timeout=30_000)
    await expect(rows).to_contain_text("invalid_json")
    async with page.expect_download() as saving:
        await page.get_by_role("button", name="Save “By reason, tenant and key”").click()
    saved = (await (await saving.value).path()).read_text()
    assert saved.splitlines()[1].startswith("globex,5f0c2e9b71aa,/v1/chat/completions,400,")
    assert complaints == []


async def test_the_reason_of_one_429_is_found_by_its_id(store: Store, ops: OpsPage) -> None:
    await fill(store, _refused())
    page, complaints = await ops.open()
    await page.get_by_label("Request id, key, limit or code").fill("chatcmpl-limit-7")
    latest = page.locator("#recent-refusals tbody tr")
    await expect(latest).to_have_count(1)
    await expect(latest.locator("td").nth(3)).to_have_text("tokens_per_minute")
    await expect(latest).to_contain_text("and 1,196 more")
    assert "refused=chatcmpl-limit-7" in page.url
    # By its reason, all of the kind.
    await page.get_by_label("Request id, key, limit or code").fill("")
    await expect(latest).to_have_count(4)
    await latest.get_by_role("button", name="storage_full").click()
    await expect(latest).to_have_count(1)
    await expect(latest).to_contain_text("503")
    # And the sheet of a request says so, too.
    other, _ = await ops.open("#request=chatcmpl-limit-3")
    sheet = other.get_by_role("dialog")
    await expect(sheet).to_contain_text("exceeds the limit tokens_per_minute")
    await expect(sheet).to_contain_text("acme")
    await shoot(other, "ops-refused-request")
    assert complaints == []


async def test_alerts_say_what_since_when_and_what_to_do(store: Store, ops: OpsPage) -> None:
    now_ns = time.time_ns()
    failing = [
        msgspec.structs.replace(
            request_record(n, done_ns=now_ns - (n + 1) * 20 * NS, seed=9),
            model_served="broken",
            error_code="poison",
        )
        for n in range(20)
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(failing, range(20)), "poison")
    await fill(store)
    full = AlertCondition(name="MillraceOutboxFills", value=150_000.0, holds=True)
    ops.alerts.look([full])
    page, complaints = await ops.open()
    rows = page.locator("#alerts tbody tr")
    poison = rows.filter(has_text="MillracePoison")
    await expect(poison.locator(".alert-state")).to_have_text("Firing ticket")
    await expect(poison).to_contain_text("broken")
    await expect(poison).to_contain_text(re.compile("for [678] min"))
    await expect(poison).to_contain_text("The queue's dead letters have the request")
    outbox = rows.filter(has_text="MillraceOutboxFills")
    await expect(outbox.locator(".alert-state")).to_have_text("Pending")
    await expect(outbox).to_contain_text("150,000")
    await expect(page.locator("#alerts-note")).to_contain_text("1 firing")
    await page.locator("#alerts-well-count").click()
    well = page.locator("#alerts-well tbody tr").filter(has_text="MillraceGenerationsFail")
    await expect(well.first).to_contain_text("up to 2 %")
    slo = page.locator("#slo tbody tr").filter(has_text="demo-large")
    await expect(slo).to_contain_text("%")
    await expect(page.locator("#slo-note")).to_contain_text(
        "95 % with TTFT up to 1,000 ms and TPOT up to 100 ms, over 30 days"
    )
    await shoot(page, "ops-alerts")
    # Without telemetry it is not said that all is well.
    await ops.leaves()
    answered = await page.evaluate("fetch('api/alerts').then((answer) => answer.json())")
    assert "unknown" in {one["state"] for one in answered}
    assert complaints == []


async def test_what_the_client_waited_for_beside_ttft(store: Store, ops: OpsPage) -> None:
    await fill(store)
    page, complaints = await ops.open("#range=15m&model=demo")
    rows = page.locator("#first-byte tbody tr")
    await expect(rows).to_have_count(4)
    assert await rows.locator("td:nth-child(2)").all_text_contents() == [
        "Before receipt",
        "TTFT",
        "Way back",
        "First byte",
    ]
    await expect(rows.nth(0).locator("td").nth(2)).to_have_text("0.25 ms")
    await expect(rows.nth(2).locator("td").nth(2)).to_have_text("1.5 ms")
    # Every latency says which percentile and which unit.
    for name in ("TTFT", "First byte", "TPOT", "Whole answer"):
        tile = _tile(page, f"{name} p50")
        await expect(tile.locator(".value")).to_contain_text("ms")
        await expect(tile.locator(".detail")).to_contain_text("p95")
    await expect(_tile(page, "Output tokens")).to_contain_text("% proposed ahead")
    heads = await page.locator("#latency .panel:has(.plot) .head").all_text_contents()
    assert len(heads) == 5
    assert all("p50" in head and "ms" in head for head in heads)
    assert complaints == []


async def test_usage_by_whom_sorted_with_exact_sums_and_as_a_file(
    store: Store, ops: OpsPage
) -> None:
    records = await fill(store)
    page, complaints = await ops.open("#range=1h")
    table = page.locator("#usage")
    await expect(table.locator("tbody tr")).to_have_count(3)
    await expect(table.locator("tfoot tr")).to_have_count(1)
    paid = table.locator("tfoot td").last
    assert await paid.get_attribute("title") == f"Exactly {_plain(_paid(records))} USD"
    names = [await one.text_content() for one in await table.locator("tbody td:first-child").all()]
    assert names == sorted(names, key=lambda name: -_paid(records, tenant=name))
    await table.get_by_role("button", name="Tenant", exact=True).click()
    await expect(table.locator("th").first).to_have_attribute("aria-sort", "ascending")
    first = table.locator("tbody td").first
    await expect(first).to_have_text("acme")
    await table.get_by_role("button", name="Tenant", exact=True).click()
    await expect(first).to_have_text("initech")
    await page.get_by_role("button", name="User", exact=True).click()
    await expect(table.locator("th").nth(1)).to_have_text("User")
    await expect(table.locator("tbody tr")).to_have_count(60)
    assert "by=user" in page.url
    async with page.expect_download() as saving:
        await page.get_by_role("button", name="Save “Usage and spend”").click()
    with (await (await saving.value).path()).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(Decimal(row["cost"]) for row in rows) == _paid(records)
    await page.get_by_role("button", name="Model", exact=True).click()
    await expect(table.locator("tbody tr")).to_have_count(2)
    await page.get_by_role("button", name="Adapter", exact=True).click()
    adapters = {(one.model_served, one.adapter) for one in records}
    assert len(adapters) > 2
    await expect(table.locator("th").nth(1)).to_have_text("Adapter")
    await expect(table.locator("tbody tr")).to_have_count(len(adapters))
    await shoot(page, "ops-usage", full=True)
    # A tenant leads to all that is its own.
    await page.get_by_role("button", name="Tenant", exact=True).first.click()
    await table.get_by_role("button", name="globex").click()
    await expect(table.locator("tbody tr")).to_have_count(1)
    assert await paid.get_attribute("title") == (
        f"Exactly {_plain(_paid(records, tenant='globex'))} USD"
    )
    assert complaints == []


async def test_the_most_spent_are_listed_and_the_others_added_up(
    store: Store, ops: OpsPage
) -> None:
    now_ns = time.time_ns()
    records = [
        msgspec.structs.replace(
            request_record(n, done_ns=now_ns - 90 * NS, seed=5), tenant=f"tenant-{n}", user=""
        )
        for n in range(130)
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(130)), "many")
    await fill(store, [])
    page, _ = await ops.open("#range=1h")
    table = page.locator("#usage")
    await expect(table.locator("tbody tr")).to_have_count(100)
    others, everybody = table.locator("tfoot tr").nth(0), table.locator("tfoot tr").nth(1)
    await expect(others.locator("td").first).to_have_text("Others")
    await expect(others.locator("td").nth(1)).to_have_text("33")
    await expect(everybody.locator("td").nth(1)).to_have_text(f"{NUM_REQUESTS + 131:,}")


async def test_a_range_beside_the_one_before(store: Store, ops: OpsPage) -> None:
    records = await fill(store)
    before = [
        msgspec.structs.replace(
            record,
            request_id=f"before-{n}",
            ttft_ms=record.ttft_ms / 2,
            received_ns=record.received_ns - 3_600 * NS,
            done_ns=record.done_ns - 3_600 * NS,
        )
        for n, record in enumerate(records[: NUM_REQUESTS // 2])
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(before, range(len(before))), "before")
    page, complaints = await ops.open("#range=1h")
    await expect(page.locator(".delta")).to_have_count(0)
    await page.get_by_label("Compare with").select_option("the time before")
    requests = _tile(page, "Requests").locator(".delta")
    await expect(requests).to_have_attribute("data-tone", "neutral")
    await expect(requests).to_contain_text("▲ 100 %")
    ttft = _tile(page, "TTFT p50").locator(".delta")
    await expect(ttft).to_have_attribute("data-tone", "worse")
    # Not by its colour alone, and not only for eyes.
    await expect(ttft.locator(".tone")).to_have_text("worse")
    await expect(ttft.locator(".spoken")).to_contain_text("more than the time before")
    assert page.url.endswith("#range=1h&compare=previous")
    traffic = page.locator("#traffic .panel").first
    await expect(traffic.locator(".legend")).to_contain_text("all, the time before")
    plot = traffic.locator(".plot")
    await plot.focus()
    await page.keyboard.press("End")
    await expect(traffic.locator(".spoken")).to_contain_text("all, the time before")
    await shoot(page, "ops-compare", full=True)
    await page.get_by_label("Compare with").select_option("a week before")
    await expect(requests).to_contain_text("from 0")
    await page.get_by_label("Compare with").select_option("Nothing")
    await expect(page.locator(".delta")).to_have_count(0)
    nonsense, complaints_of_it = await ops.open("#range=1h&compare=tomorrow&by=shoe&refused=%00")
    await expect(nonsense.locator("#problem")).to_contain_text("NUL")
    assert [one for one in complaints_of_it if "400" not in one] == []
    assert complaints == []


def _tile(page: Page, name: str) -> Locator:
    return page.locator(".tile").filter(has=page.locator("dt", has_text=name)).first


def _paid(records: list[RequestRecord], tenant: str | None = None) -> Decimal:
    mine = (record.cost for record in records if tenant in (None, record.tenant))
    return sum(mine, Decimal(0))


def _plain(amount: Decimal) -> str:
    """Format an amount as the store writes it."""
    return f"{amount.normalize():f}"


async def test_rollouts_are_seen_with_what_each_version_does(
    ops: OpsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, _ = await ops.open()
    await expect(page.locator("#alerts-note")).not_to_be_empty()
    await expect(page.locator("#rollouts-panel")).to_be_hidden()

    store = MemoryRolloutStore()
    chat = Rollout(model="chat", stable="chat", candidate="chat@v2", abort_if="ttft_p95>1.5x")
    figures = [
        VersionFigures(version="chat@v2", num_requests=40, percentiles_ms={"ttft_p95": 120.0}),
        VersionFigures(version="chat", num_requests=360, error_rate=0.005),
    ]
    started = await store.start(chat)
    runs = await store.change(started, replace(started, state=RolloutState.RUNNING, percent=10.0))
    assert runs is not None
    await store.put_figures(runs, figures)
    over = replace(chat, model="old", stable="old", candidate="old@v2", reason="it was slow")
    await store.start(replace(over, state=RolloutState.ABORTED))
    monkeypatch.setattr("millrace.gateway.api.ops.RolloutStore", lambda _link: store)
    monkeypatch.setattr("millrace.gateway.api.ops.reachable", lambda link: link)
    page, complaints = await ops.open()
    rows = page.locator("#rollouts tbody tr")
    await expect(rows).to_have_count(4)
    for row, texts in (
        (0, ["chat", "Running", "chat@v2", "10 %", "40", "0 %", "120 ms", "ttft_p95>1.5x"]),
        (1, ["chat", "90 %", "360", "0.5 %"]),
        (2, ["old", "Aborted", "old@v2", "0 %", "it was slow"]),
        (3, ["old", "100 %"]),
    ):
        for text in texts:
            await expect(rows.nth(row)).to_contain_text(text)
    await page.locator("#rollouts").scroll_into_view_if_needed()
    await shoot(page, "ops-rollouts")
    assert complaints == []
