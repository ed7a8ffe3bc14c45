"""Page "What did it cost?": every statement runs and answers the page's figures."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from millrace.cli.analytics.rows import parse_rows, table
from millrace.cli.main import build_parser
from millrace.registry.pricing import PriceBook, cost, device_cost
from millrace.runtime.clock import SystemClock
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import Attempt, Record, RequestRecord, Status, WorkerSample
from millrace.telemetry.http.answers import load_queries
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import PlainTable, Store
from millrace.telemetry.store.tables import table_of
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "cost.md"
MODEL = "chat-8b"
PRICES = PriceBook(
    version="2026-11",
    input_per_million=Decimal("0.50"),
    cached_input_per_million=Decimal("0.05"),
    output_per_million=Decimal("1.50"),
    device_per_hour=Decimal("3.60"),
)
_NS_PER_S = 1_000_000_000
# An hour ago, so that all is in any range that ends now, and in one minute.
DONE_NS = (time.time_ns() // (60 * _NS_PER_S) - 60) * 60 * _NS_PER_S + 20 * _NS_PER_S
# request, tenant, user, prompt, cached and completion tokens, device time in us, status
REQUESTS = (
    ("req-1", "acme", "ana", 1_200, 800, 300, 250_000, Status.DONE),
    ("req-2", "acme", "ana", 1_000, 0, 100, 180_000, Status.DONE),
    ("req-3", "acme", "ben", 2_000, 1_600, 500, 400_000, Status.DONE),
    ("req-4", "globex", "cem", 400, 0, 1_000, 650_000, Status.DONE),
    ("req-5", "globex", "cem", 600, 0, 0, 20_000, Status.CANCELLED),
)
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def request(
    name: str,
    tenant: str,
    user: str,
    prompt: int,
    cached: int,
    completion: int,
    device_us: int,
    status: Status,
) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        tenant=tenant,
        user=user,
        source=Source.HTTP,
        tier=Tier.PRO,
        model_requested=MODEL,
        model_served=MODEL,
        worker_id="worker-1",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        total_ms=2_000.0,
        status=status,
        cost=cost(PRICES, prompt, cached, completion),
        price_version=PRICES.version,
        received_ns=DONE_NS - 2 * _NS_PER_S,
        dispatched_ns=DONE_NS - 2 * _NS_PER_S + 4_000_000,
        started_ns=DONE_NS - 2 * _NS_PER_S + 6_000_000,
        first_token_ns=DONE_NS - _NS_PER_S if completion else 0,
        done_ns=DONE_NS,
        epoch=1,
        device_us=device_us,
        device_cost=device_cost(PRICES, device_us),
    )


def samples() -> Iterator[WorkerSample]:
    """Ten seconds of two workers. The second handed req-3 on, and was killed with another request
    in its hands, whose record never learnt of these 30 ms."""
    for worker, busy_us, charged_us, prefill, decode in (
        ("worker-1", 1_380_000, 1_380_000, 2_500, 1_880),
        ("worker-2", 150_000, 150_000, 400, 70),
    ):
        for second in range(10):
            yield WorkerSample(
                worker_id=worker,
                name=worker,
                model=MODEL,
                sampled_ns=DONE_NS - second * _NS_PER_S,
                period_ms=1_000.0,
                busy_us=busy_us // 10,
                charged_us=charged_us // 10,
                prefill_tokens=prefill // 10,
                decode_tokens=decode // 10,
                device_per_hour=PRICES.device_per_hour,
            )


async def fill(store: Store) -> None:
    """Store each row twice, which must not change the page."""
    requests = [request(*row) for row in REQUESTS]
    moved = Attempt(
        epoch=1, worker_id="worker-2", started_ns=DONE_NS - _NS_PER_S, device_us=120_000
    )
    requests[2] = msgspec.structs.replace(requests[2], epoch=2, attempts=(moved,))
    kinds: tuple[list[Record], ...] = ([*requests], [*samples()])
    for token in ("once", "twice"):
        for records in kinds:
            into = table_of(records[0])
            columns = into.to_columns(records, range(1, len(records) + 1))
            await store.insert(into, columns, f"{token} {into.name}")
    names = ("input_per_million", "cached_input_per_million", "output_per_million")
    money = "Decimal(38, 12)"
    prices = PlainTable(
        "prices",
        ("model", "version", "currency", *names, "device_per_hour"),
        ("String", "String", "String", money, money, money, money),
    )
    values: list[list[Any]] = [[MODEL], [PRICES.version], [PRICES.currency]]
    values += [[getattr(PRICES, name)] for name in (*names, "device_per_hour")]
    await store.insert(prices, values, "prices")
    await Rollups(store, SystemClock(), 1.0).reconcile()


def statement(kind: str, text: str) -> tuple[str, dict[str, str | int | float]] | None:
    """Return the SQL and the parameters of a block, or None if it queries nothing."""
    if kind == "sql":
        return text, {}
    words = shlex.split(text)
    if kind != "sh" or words[:3] != ["millrace", "sql", "--saved"]:
        return None
    given = build_parser().parse_args(words[1:])
    query = load_queries()[given.saved]
    return query.sql, {**query.defaults, **dict(given.param)}


def blocks() -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8"))]


async def test_every_statement_answers_what_the_page_says(store: Store) -> None:
    await fill(store)
    found = blocks()
    num_asked = 0
    for (kind, text), (following, expected) in zip(found, [*found[1:], ("", "")], strict=True):
        asked = statement(kind, text)
        if asked is None:
            continue
        sql, parameters = asked
        answer = table(parse_rows(await store.reader.read(sql, parameters, "JSONCompact")))
        assert following == "text", f"without its answer:\n{text}"
        assert answer == expected, text
        num_asked += 1
    assert num_asked >= 8


@pytest.mark.parametrize("command", [text for kind, text in blocks() if kind == "sh"])
def test_every_command_of_the_page_parses(command: str) -> None:
    for line in command.strip().splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "millrace"
        assert build_parser().parse_args(words[1:]).handler is not None
