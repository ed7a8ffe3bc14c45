"""Money of two currencies is never added: no figure depends on amounts of another currency.

Every question is asked twice, of stores that differ in the amounts in EUR alone, which are FACTOR
times as large in the second one. What a row says of USD must not change, and what it says of EUR
must change by FACTOR.
"""

from __future__ import annotations

import re
import shlex
import time
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from millrace.cli.analytics.rows import parse_rows
from millrace.registry.catalogue import Catalogue, ModelEntry
from millrace.registry.pricing import PriceBook, cost, device_cost
from millrace.runtime.clock import SystemClock
from millrace.schemas.control import TelemetryQuery
from millrace.schemas.records import RequestRecord, WorkerSample
from millrace.telemetry.http.answers import SavedQueryAnswers, load_queries
from millrace.telemetry.rollups.prices import record_prices
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS, WORKER_SAMPLES
from tests.support.repository import ROOT
from tests.telemetry.answered import rows_of
from tests.telemetry.records import request_record, worker_sample
from tests.telemetry.stores import empty

FACTOR = 7
MINUTE_NS = 60 * 10**9
NOW_NS = time.time_ns() // MINUTE_NS * MINUTE_NS - 10 * MINUTE_NS
# Columns of exact money, which is text; charts have numbers.
MONEY = re.compile(
    r"cost(?!_method)|paid|pays|saved|amount|by_price_book|per_million$|per_hour|margin|by_request|by_minute"
)
EXAMPLES = [
    *(
        pytest.param(block, id=f"{page.name} {number}")
        for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
        for number, block in enumerate(
            [
                *(
                    re.sub(r"\ACREATE OR REPLACE VIEW \S+ AS\s", "", block)
                    for block in re.findall(
                        r"```sql\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
                    )
                    # Models of dbt are no statements yet.
                    if "{{" not in block
                ),
                *(
                    shlex.split(line)[2]
                    for line in re.findall(
                        r'millrace sql "[^"]*"', page.read_text(encoding="utf-8")
                    )
                ),
            ]
        )
    )
]


def book(currency: str, factor: int) -> PriceBook:
    """Make prices of a currency; prices in EUR are ``factor`` times as high."""
    by = factor if currency == "EUR" else 1
    return PriceBook(
        version=f"2026-11 {currency}",
        currency=currency,
        input_per_million=Decimal("1.1") * by,
        cached_input_per_million=Decimal("0.5") * by,
        output_per_million=Decimal("2.3") * by,
        device_per_hour=Decimal(3_600) * by,
    )


def requests(factor: int) -> list[RequestRecord]:
    """Rows of one model, tenant, user, key and minute in two currencies."""
    made = []
    for number in range(1, 9):
        prices = book("EUR" if number % 2 else "USD", factor)
        base = replace(
            request_record(number, done_ns=NOW_NS - number * 10**9),
            request_id=f"req-{number}",
            tenant="acme",
            user="ana",
            key_id="key-1",
            model_requested="demo",
            model_served="demo",
            adapter="",
            worker_id="worker-1",
            device_us=250_000 * number,
            metadata={"project": "web"},
        )
        tokens = (base.prompt_tokens, base.cached_tokens, base.completion_tokens)
        made.append(
            replace(
                base,
                cost=cost(prices, *tokens),
                device_cost=device_cost(prices, base.device_us),
                currency=prices.currency,
                price_version=prices.version,
            )
        )
    return made


def samples(factor: int, now_ns: int) -> list[WorkerSample]:
    """A worker of each currency, with the same model."""
    return [
        replace(
            worker_sample(number, sampled_ns=at_ns, worker=f"w-{currency}"),
            model="demo",
            period_ms=1_000.0,
            busy_us=400_000,
            charged_us=400_000,
            num_devices=1,
            device_per_hour=book(currency, factor).device_per_hour,
            currency=currency,
        )
        for currency in ("EUR", "USD")
        for number, at_ns in enumerate((NOW_NS, NOW_NS - 10**9, now_ns))
    ]


async def fill(store: Store, factor: int, now_ns: int) -> None:
    await empty(store)
    rows, of_workers = requests(factor), samples(factor, now_ns)
    await store.insert(REQUESTS, REQUESTS.to_columns(rows, range(1, 9)), f"r {factor}")
    await store.insert(
        WORKER_SAMPLES, WORKER_SAMPLES.to_columns(of_workers, range(len(of_workers))), f"w {factor}"
    )
    for currency in ("EUR", "USD"):
        prices = book(currency, factor)
        entry = ModelEntry(name="demo", source="/models/demo", prices=prices)
        await record_prices(store, Catalogue({"demo": entry}), SystemClock())
    await Rollups(store, SystemClock(), 1.0).reconcile()


def check(first: list[dict[str, Any]], second: list[dict[str, Any]], what: str) -> bool:
    """Check that amounts of one currency ignore the other; return whether the rows have amounts."""
    parts = [
        ([row for row in rows if row.get("currency") == "EUR"], rows) for rows in (first, second)
    ]
    (euros, _), (euros_times, _) = parts
    others = [[row for row in rows if row.get("currency") != "EUR"] for rows in (first, second)]
    has_money = False
    for row, times in zip(*others, strict=True):
        for name, value in row.items():
            if isinstance(value, list) and "currencies" in row and MONEY.search(name):
                has_money = True
                at = row["currencies"].index("EUR")
                assert scaled(value[at], times[name][at]), (what, name)
                value, times[name] = (
                    value[:at] + value[at + 1 :],
                    times[name][:at] + times[name][at + 1 :],
                )
            assert value == times[name], f"{what}: {name} depends on amounts in EUR: {row}"
    for row, times in zip(euros, euros_times, strict=True):
        for name, value in row.items():
            if value is None or not MONEY.search(name):
                continue
            has_money = True
            assert scaled(value, times[name]), f"{what}: {name} is not in EUR alone: {row}, {times}"
    return has_money


def scaled(value: Any, times: Any) -> bool:
    # Quotients are cut after 12 digits.
    return abs(Decimal(str(value)) * FACTOR - Decimal(str(times))) <= Decimal("1e-9")


async def ask(store: Store, name: str) -> list[dict[str, Any]]:
    query = load_queries()[name]
    given: dict[str, str | int | float] = {
        "id": "req-1",
        "from_s": NOW_NS // 10**9 - 600,
        "to_s": NOW_NS // 10**9 + 60,
        "step_s": 60,
    }
    params = {one: given[one] for one in query.parameters if one in given}
    answer = await SavedQueryAnswers(store.reader).answer(TelemetryQuery(name=name, params=params))
    assert not answer.error, (name, answer.error)
    return rows_of(answer)


async def test_no_saved_query_adds_currencies(store: Store) -> None:
    names = sorted(load_queries())
    now_ns = time.time_ns()
    await fill(store, 1, now_ns)
    first = {name: await ask(store, name) for name in names}
    await fill(store, FACTOR, now_ns)
    with_money = {name for name in names if check(first[name], await ask(store, name), name)}
    assert with_money >= {
        *(
            "cache_savings",
            "cost_by_model",
            "device_cost",
            "idle_cost",
            "invoice",
            "recent_requests",
        ),
        *("request_details", "requests_page", "slowest_requests", "totals", "unit_cost"),
        *(f"usage_by_{what}" for what in ("adapter", "day", "key", "model", "tenant", "user")),
        "workers_now",
    }
    # Columns that look like money and are in no row of a currency would go unseen.
    named = {name for name in names for row in first[name] for one in row if MONEY.search(one)}
    assert named <= with_money


async def example_rows(store: Store, sql: str) -> list[dict[str, Any]]:
    rows = parse_rows(await store.reader.read(sql, {}, "JSONCompact"))
    return [dict(zip(rows.names, row, strict=True)) for row in rows.rows]


async def test_no_example_of_the_docs_adds_currencies(store: Store) -> None:
    statements = [
        (str(example.id), str(example.values[0]).replace("'ID'", "'req-1'")) for example in EXAMPLES
    ]
    # How the store lies on its disk, and texts that are kept for some tenants only, have no money.
    readable = [
        one
        for one in statements
        if "SHOW" not in one[1]
        and "system.parts" not in one[1]
        and "prompt, completion" not in one[1]
    ]
    assert len(readable) >= 10
    now_ns = time.time_ns()
    await fill(store, 1, now_ns)
    first = {name: await example_rows(store, sql) for name, sql in readable}
    await fill(store, FACTOR, now_ns)
    with_money = [
        name for name, sql in readable if check(first[name], await example_rows(store, sql), name)
    ]
    assert len(with_money) >= 4
    assert any(name.startswith("README") for name in with_money)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sum(cost) AS cost FROM requests_once",
        "SELECT tenant, sum(cost) AS pays FROM usage_by_minute FINAL GROUP BY tenant",
        "SELECT sum(device_cost) AS costs, any(currency) AS currency FROM requests_once",
    ],
)
async def test_the_check_finds_a_sum_of_both(store: Store, sql: str) -> None:
    now_ns = time.time_ns()
    await fill(store, 1, now_ns)
    first = await example_rows(store, sql)
    await fill(store, FACTOR, now_ns)
    second = await example_rows(store, sql)
    with pytest.raises(AssertionError):
        check(first, second, "a sum")
