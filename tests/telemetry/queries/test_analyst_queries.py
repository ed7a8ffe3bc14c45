"""Analysts' queries, against figures that were added up by hand. All rows are stored twice and
never merged."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millrace.telemetry.store.store import Store
from tests.telemetry.books import DAY_S, FIRST_S, RANGE, REQUEST_ROWS, fill
from tests.telemetry.queries.test_queries import ask
from tests.telemetry.records import unix_s

Row = dict[str, Any]


@pytest.fixture
async def books(store: Store) -> AsyncIterator[Store]:
    await store.command("SYSTEM STOP MERGES")
    await fill(store, times=2)
    rows = await store.rows("SELECT count() FROM requests SETTINGS final = 0")
    assert rows == [(2 * len(REQUEST_ROWS),)]
    yield store
    await store.command("SYSTEM START MERGES")


def of(rows: list[Row], *names: str) -> list[tuple[Any, ...]]:
    """Return these columns of each row, with ``t`` in Unix seconds."""
    return [
        tuple(unix_s(row[name]) if name == "t" else row[name] for name in names) for row in rows
    ]


async def test_usage_by_tenant(books: Store) -> None:
    rows = await ask(books, "usage_by_tenant", **RANGE)
    counts = ("tenant", "requests", "done", "cancelled", "expired", "shed", "failed")
    assert of(rows, *counts) == [("acme", 4, 2, 1, 0, 0, 1), ("globex", 2, 1, 0, 0, 1, 0)]
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens", "device_us")
    assert of(rows, *tokens) == [(1900, 200, 160, 3_300_000), (140, 0, 10, 500_000)]
    # acme: 0.0011 + 0.0006 + 0.0001 + 0.00032; each second of small's device costs 0.001.
    assert of(rows, "cost", "device_cost", "currency") == [
        ("0.00212", "0.0033", "USD"),
        ("0.0012", "0.005", "USD"),
    ]
    assert await ask(books, "usage_by_tenant", **RANGE, tenant="globex") == rows[1:]
    assert await ask(books, "usage_by_tenant", **RANGE, model="small") == rows[:1]
    assert await ask(books, "usage_by_tenant", **RANGE, rows=1) == rows[:1]


async def test_usage_by_user_model_adapter_and_day(books: Store) -> None:
    users = await ask(books, "usage_by_user", **RANGE)
    assert of(users, "tenant", "user", "requests", "cost") == [
        ("acme", "ann", 3, "0.00152"),
        ("globex", "eve", 2, "0.0012"),
        ("acme", "bob", 1, "0.0006"),
    ]
    models = await ask(books, "usage_by_model", **RANGE)
    assert of(models, "model", "requests", "cost", "device_cost") == [
        ("small", 4, "0.00212", "0.0033"),
        ("large", 2, "0.0012", "0.005"),
    ]
    adapters = await ask(books, "usage_by_adapter", **RANGE)
    assert of(adapters, "model", "adapter", "requests", "cost") == [
        ("small", "", 3, "0.00152"),
        ("large", "", 2, "0.0012"),
        ("small", "law", 1, "0.0006"),
    ]
    days = await ask(books, "usage_by_day", **RANGE)
    assert of(days, "requests", "cost") == [(5, "0.00212"), (1, "0.0012")]
    assert days[0]["day"] < days[1]["day"]


async def test_ranges_that_follow_one_another_count_each_request_once(books: Store) -> None:
    bounds = [FIRST_S, FIRST_S + 30, FIRST_S + 75, FIRST_S + 90, FIRST_S + DAY_S]
    counted = []
    for first, last in itertools.pairwise(bounds):
        rows = await ask(books, "usage_by_day", from_s=first, to_s=last)
        counted.append(sum(row["requests"] for row in rows))
    # The second minute begins in the second range: all of its requests are counted there.
    assert counted == [1, 4, 0, 0]


async def test_an_invoice_is_what_the_price_book_says(books: Store) -> None:
    rows = await ask(books, "invoice", **RANGE, tenant="acme")
    assert of(rows, "model", "adapter", "tier", "price_version", "requests") == [
        ("small", "", "free", "2026-11", 3),
        ("small", "law", "free", "2026-11", 1),
    ]
    tokens = ("computed_tokens", "cached_tokens", "completion_tokens")
    assert of(rows, *tokens) == [(1200, 200, 110), (500, 0, 50)]
    prices = ("input_per_million", "cached_input_per_million", "output_per_million")
    assert of(rows, *prices) == [("1", "0.5", "2")] * 2
    # (1200 * 1 + 200 * 0.5 + 110 * 2) / 1,000,000 and (500 * 1 + 50 * 2) / 1,000,000
    assert of(rows, "amount", "by_price_book", "difference") == [
        ("0.00152", "0.00152", "0"),
        ("0.0006", "0.0006", "0"),
    ]
    everybody = await ask(books, "invoice", **RANGE)
    assert of(everybody, "tenant", "requests", "amount")[2:] == [("globex", 1, "0.0012")]


async def test_an_invoice_without_the_price_book_says_so(store: Store) -> None:
    await fill(store)
    await store.command("TRUNCATE TABLE prices")
    rows = await ask(store, "invoice", **RANGE, tenant="globex")
    assert of(rows, "amount", "by_price_book", "difference") == [("0.0012", None, None)]


async def test_unit_cost_four_ways(books: Store) -> None:
    large, small = await ask(books, "unit_cost", **RANGE)
    # 900 + 550 + 100 + 310 tokens; the device was there for 4 s and busy for 2, at 0.001 a second;
    # in its best minute it computed 1,300 tokens in a busy second.
    assert small == {
        "model": "small",
        "currency": "USD",
        "requests": 4,
        "tokens": 1860,
        "paid": "0.00212",
        "busy_cost": "0.002",
        "all_cost": "0.004",
        "paid_per_million": "1.139784946236",
        "busy_cost_per_million": "1.075268817204",
        "all_cost_per_million": "2.150537634408",
        "best_cost_per_million": "0.76923076923",
        "best_tokens_per_busy_s": 1300,
        "busy_share": 0.5,
        "busy_j_per_million": pytest.approx(1e6 * 66 / 1450),
        "all_j_per_million": pytest.approx(1e6 * 130 / 1300),
    }
    # What was shed was not computed; nothing is known of a best without a busy second.
    assert large["tokens"] == 110
    assert large["paid_per_million"] == "10.90909090909"
    assert large["busy_cost_per_million"] == "9.090909090909"
    assert large["all_cost_per_million"] == "90.90909090909"
    assert large["best_cost_per_million"] is None
    assert large["best_tokens_per_busy_s"] is None


async def test_idle_time_is_shown_apart(books: Store) -> None:
    rows = await ask(books, "idle_cost", **RANGE)
    times = ("worker", "busy_us", "idle_us", "charged_us", "busy_share")
    assert of(rows, *times) == [
        ("w-2", 100_000, 900_000, 100_000, 0.1),
        ("w-1", 2_000_000, 2_000_000, 1_900_000, 0.5),
    ]
    assert of(rows, "busy_cost", "idle_cost", "uncharged_cost") == [
        ("0.001", "0.009", "0"),
        ("0.002", "0.002", "0.0001"),
    ]


async def test_latencies_by_model(books: Store) -> None:
    large, small = await ask(books, "latency_percentiles", **RANGE)
    assert small["requests"] == 4
    assert small["ttft_p50_ms"] == pytest.approx(300)
    assert small["queue_p50_ms"] == pytest.approx(30, abs=10)
    # Of the 157 tokens after the first, 108 took 10 ms and 49 took 20.
    assert small["itl_p50_ms"] == pytest.approx(10, rel=0.05)
    assert small["itl_p99_ms"] == pytest.approx(20, rel=0.05)
    assert 1090 <= small["e2e_p50_ms"] <= 1280
    assert of([large], "queue_p99_ms", "ttft_p50_ms", "tpot_p90_ms", "itl_p95_ms") == [
        (10, 50, 30, 30)
    ]
    (shed_only,) = await ask(
        books, "latency_percentiles", from_s=FIRST_S, to_s=FIRST_S + DAY_S, model="large"
    )
    assert shed_only["requests"] == 1
    assert shed_only["ttft_p50_ms"] is None
    assert shed_only["itl_p99_ms"] is None


async def test_slo_attainment(books: Store) -> None:
    rows = await ask(books, "slo_attainment", **RANGE, step_s=DAY_S)
    assert of(rows, "t", "model", "requests", "met") == [
        (FIRST_S, "large", 1, 0),
        (FIRST_S, "small", 3, 2),
        (FIRST_S + DAY_S, "large", 1, 1),
    ]
    assert rows[1]["attainment"] == pytest.approx(2 / 3)
    strict = await ask(books, "slo_attainment", **RANGE, step_s=DAY_S, ttft_ms=200, tpot_ms=15)
    assert of(strict, "ttft_met", "tpot_met", "met") == [(0, 0, 0), (1, 1, 1), (1, 0, 0)]


async def test_capacity(books: Store) -> None:
    rows = await ask(books, "capacity", **RANGE, step_s=DAY_S, model="small")
    assert len(rows) == 1
    row = rows[0]
    assert of(rows, "t", "workers", "running", "waiting", "queued", "most_queued") == [
        (FIRST_S, 1, 3, 1, 2, 3)
    ]
    assert of(rows, "batch_size", "kv_use_percent", "busy_percent", "device_percent") == [
        (3, 30, 50, 25)
    ]
    assert row["step_ms"] == pytest.approx(400 / 3)
    assert of(rows, "decode_tokens_per_s", "prefill_tokens_per_s", "preemptions") == [
        (37.5, 427.5, 1)
    ]
    assert of(rows, "prefix_hit_percent", "device_memory_total_bytes") == [(20, 20)]
    by_minute = await ask(
        books, "capacity", from_s=FIRST_S, to_s=FIRST_S + 120, step_s=60, model="small"
    )
    assert of(by_minute, "t", "running") == [(FIRST_S, 4), (FIRST_S + 60, 2)]


async def test_reliability(books: Store) -> None:
    rows = await ask(books, "reliability", **RANGE, step_s=DAY_S)
    small = rows[1]
    assert of(rows, "t", "model", "requests", "shed", "failed", "cancelled") == [
        (FIRST_S, "large", 1, 1, 0, 0),
        (FIRST_S, "small", 4, 0, 1, 1),
        (FIRST_S + DAY_S, "large", 1, 0, 0, 0),
    ]
    seen = ("moves", "preemptions", "deliveries", "resumes", "replays", "stalls", "stalled_ms")
    assert of([small], *seen) == [(1, 1, 2, 1, 1, 2, 2500)]


async def test_errors_and_the_slowest(books: Store) -> None:
    errors = await ask(books, "error_codes", **RANGE)
    assert of(errors, "model", "status", "error_code", "requests", "latest_request_id") == [
        ("large", "shed", "", 1, "r5"),
        ("small", "failed", "worker_lost", 1, "r4"),
    ]
    slowest = await ask(books, "slowest_requests", **RANGE, rows=3)
    assert of(slowest, "request_id", "total_ms", "cost") == [
        ("r6", 2090, "0.00032"),
        ("r2", 1280, "0.0006"),
        ("r1", 1090, "0.0011"),
    ]
    for by, request_id in {"ttft": "r6", "queue": "r6", "tpot": "r3"}.items():
        (first,) = await ask(books, "slowest_requests", **RANGE, by=by, rows=1)
        assert first["request_id"] == request_id


async def test_what_the_prefix_cache_saved(books: Store) -> None:
    rows = await ask(books, "cache_savings", **RANGE)
    assert of(rows, "model", "requests", "prompt_tokens", "cached_tokens") == [
        ("large", 1, 100, 0),
        ("small", 4, 1900, 200),
    ]
    assert of(rows, "paid_for_cached", "saved") == [("0", "0"), ("0.0001", "0.0001")]


async def test_what_clients_saw(books: Store) -> None:
    rows = await ask(books, "deliveries_health", **RANGE)
    assert of(rows, "model", "source", "deliveries", "done", "tokens_delivered") == [
        ("small", "http", 2, 2, 150)
    ]
    seen = ("stalled", "stalls", "stalled_ms", "longest_gap_ms", "resumes", "replays", "moved")
    assert of(rows, *seen) == [(1, 2, 2500, 1500, 1, 1, 1)]


async def test_usage_by_key_with_its_joules(books: Store) -> None:
    rows = await ask(books, "usage_by_key", **RANGE, tenant="acme")
    assert of(rows, "key_id", "requests", "energy_j", "energy_requests") == [
        ("key-a", 1, 40.0, 1),
        ("key-b", 1, 26.0, 1),
        ("", 2, None, 0),
    ]
    (totals,) = await ask(books, "totals", **RANGE)
    assert (totals["energy_j"], totals["energy_requests"]) == (66.0, 2)
    (details,) = await ask(books, "request_details", id="r1")
    assert (details["key_id"], details["metadata"]) == ("key-a", {"project": "mill"})
    rows = await ask(books, "idle_cost", **RANGE)
    assert of(rows, "worker", "energy_j", "charged_j", "idle_j") == [
        ("w-2", None, None, None),
        ("w-1", 130.0, 40.0, 90.0),
    ]
