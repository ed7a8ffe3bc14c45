"""docs/questions.md: each question is answered by its statement, over a month of six tenants."""

from __future__ import annotations

import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import pytest

from millrace.registry.catalogue import Catalogue, ModelEntry
from millrace.registry.pricing import PriceBook, cost, device_cost
from millrace.runtime.clock import SystemClock
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import (
    Attempt,
    DeliveryRecord,
    Record,
    RefusalRecord,
    RequestRecord,
    Status,
    WorkerSample,
)
from millrace.telemetry.rollups.prices import record_prices
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import table_of
from tests.support.repository import ROOT

_T = TypeVar("_T")

PAGE = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
_QUESTIONS = re.findall(r"^## (\d+)\. .+?```sql\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
_NS = 1_000_000_000
_MINUTE_NS = 60 * _NS
_HOUR_NS = 60 * _MINUTE_NS
# The begin of a minute, so that no row of it is in the future.
_NOW_NS = time.time_ns() // _MINUTE_NS * _MINUTE_NS
_TENANTS = ("acme", "globex", "initech", "hooli", "umbrella", "stark")
_TOOLS = ("get_weather", "search", "run_sql")
_ERRORS = {
    Status.FAILED: "engine_failed",
    Status.SHED: "overloaded",
    Status.EXPIRED: "deadline_exceeded",
    Status.CANCELLED: "cancelled",
}
PRICES = {
    model: PriceBook(
        version="2026-11",
        currency=currency,
        input_per_million=Decimal(price) / 2,
        cached_input_per_million=Decimal(price) / 20,
        output_per_million=Decimal(price) * 3 / 2,
        device_per_hour=Decimal(price) * 2,
    )
    for model, currency, price in (("chat-8b", "USD", 1), ("chat-70b", "EUR", 7))
}


def _request(draw: random.Random, number: int) -> RequestRecord:
    model = draw.choice(tuple(PRICES))
    prices = PRICES[model]
    status = draw.choices(list(Status), (90, 3, 2, 3, 2))[0]
    ran = status not in (Status.SHED, Status.EXPIRED)
    prompt = draw.randint(10, 4_000)
    cached = draw.choice((0, prompt // 2)) if ran else 0
    completion = draw.randint(2, 800) if ran else 0
    done_ns = _NOW_NS - draw.randint(0, 28 * 24 * 60) * _MINUTE_NS
    queue_ms, prefill_ms, decode_ms = draw.uniform(1, 90), draw.uniform(5, 500), completion * 9.0
    total_ms = queue_ms + prefill_ms + decode_ms if ran else queue_ms
    received_ns = done_ns - int(total_ms * 1e6)
    device_us = completion * 2_000 + prompt * 30 if ran else 0
    moved = ran and number % 29 == 0
    return RequestRecord(
        request_id=f"req-{number:05d}",
        tenant=draw.choice(_TENANTS),
        user=draw.choice(("", "ann", "bob", "cem", "dee")),
        source=Source.HTTP,
        tier=draw.choice((Tier.PRO, Tier.FREE, Tier.BATCH)),
        model_requested=model,
        model_served=model,
        worker_id=f"{model}-0a1b2c3d" if ran else "",
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        queue_ms=queue_ms if ran else 0.0,
        ttft_ms=queue_ms + prefill_ms if ran else 0.0,
        tpot_us=9_000.0 if ran else 0.0,
        total_ms=total_ms,
        status=status,
        error_code=_ERRORS.get(status, ""),
        cost=cost(prices, prompt, cached, completion) if ran else Decimal(0),
        currency=prices.currency,
        price_version=prices.version if ran else "",
        device_us=device_us,
        device_cost=device_cost(prices, device_us),
        received_ns=received_ns,
        started_ns=received_ns + int(queue_ms * 1e6) if ran else 0,
        first_token_ns=received_ns + int((queue_ms + prefill_ms) * 1e6) if ran else 0,
        done_ns=done_ns,
        epoch=2 if moved else 1,
        attempts=(Attempt(epoch=1, worker_id=f"{model}-99999999"),) if moved else (),
        resampled=moved and number % 2 == 0,
        called_tools=tuple(draw.choices(_TOOLS, k=number % 4)) if ran else (),
    )


def _delivery(draw: random.Random, request: RequestRecord) -> DeliveryRecord:
    stall_ms = draw.choice((0.0, 0.0, 0.0, draw.uniform(1_000, 9_000)))
    return DeliveryRecord(
        request_id=request.request_id,
        gateway_id="gateway-1",
        tenant=request.tenant,
        source=request.source,
        model=request.model_served,
        first_byte_ms=request.ttft_ms,
        total_ms=request.total_ms,
        num_epochs=request.epoch,
        num_resumes=draw.choice((0, 0, 0, 1)),
        num_stalls=int(stall_ms > 0),
        stalled_ms=stall_ms,
        longest_gap_ms=stall_ms or 20.0,
        outcome=request.status.value,
        done_ns=request.done_ns,
    )


def _sample(draw: random.Random, model: str, hour: int) -> WorkerSample:
    return WorkerSample(
        worker_id=f"{model}-0a1b2c3d",
        name=model,
        model=model,
        sampled_ns=_NOW_NS - hour * _HOUR_NS,
        period_ms=10_000.0,
        busy_us=draw.randint(0, 20_000_000),
        num_devices=2,
        queue_depth=draw.randint(0, 40),
        device_per_hour=PRICES[model].device_per_hour,
        currency=PRICES[model].currency,
    )


def _refusal(draw: random.Random, number: int) -> RefusalRecord:
    limit, code = draw.choice(
        (
            ("requests_per_minute", "requests_per_minute"),
            ("monthly_budget", "insufficient_quota"),
            ("", "model_not_found"),
        )
    )
    recorded_ns = _NOW_NS - number * _HOUR_NS
    return RefusalRecord(
        gateway_id="gateway-1",
        number=0,
        recorded_ns=recorded_ns,
        tenant=draw.choice(_TENANTS[:3]),
        key_id="5f0c2e9b71aa",
        door="/v1/chat/completions",
        status=429 if limit else 404,
        code=code,
        limit=limit,
        count=draw.randint(1, 9),
        first_ns=recorded_ns,
        last_ns=recorded_ns,
    )


_DRAW = random.Random("a month")
REQUESTS = [_request(_DRAW, number) for number in range(600)]
DELIVERIES = [_delivery(_DRAW, request) for request in REQUESTS]
SAMPLES = [_sample(_DRAW, model, hour) for model in PRICES for hour in range(100)]
REFUSALS = [_refusal(_DRAW, number) for number in range(60)]
_RAN = [one for one in REQUESTS if one.price_version]


def _grouped(rows: Iterable[_T], key: Callable[[_T], Hashable]) -> dict[Any, list[_T]]:
    groups: defaultdict[Any, list[_T]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _pays(requests: list[RequestRecord]) -> Decimal:
    return sum((one.cost for one in requests), Decimal(0))


def _hour_of(time_ns: int) -> int:
    return time_ns // _HOUR_NS * 3600


def _owes() -> set[tuple[Any, ...]]:
    groups = _grouped(REQUESTS, lambda one: (one.tenant, one.currency))
    return {(*key, len(rows), _pays(rows)) for key, rows in groups.items()}


def _first_tokens() -> set[tuple[Any, ...]]:
    groups = _grouped(_RAN, lambda one: (one.model_served, _hour_of(one.done_ns)))
    return {
        (*key, len(rows), float(np.quantile([one.ttft_ms for one in rows], 0.95)))
        for key, rows in groups.items()
    }


def _saved() -> set[tuple[Any, ...]]:
    found = set()
    for model, rows in _grouped(_RAN, lambda one: one.model_served).items():
        prices, cached = PRICES[model], sum(one.cached_tokens for one in rows)
        saved = cached * (prices.input_per_million - prices.cached_input_per_million) / 1_000_000
        share = cached / sum(one.prompt_tokens for one in rows)
        found.add((model, prices.currency, share, saved))
    return found


def _errors() -> set[tuple[Any, ...]]:
    ends = Counter((one.status.value, one.error_code) for one in REQUESTS)
    return {(*end, count, count / len(REQUESTS)) for end, count in ends.items()}


def _tools() -> set[tuple[Any, ...]]:
    calls = [(tool, one) for one in REQUESTS for tool in one.called_tools]
    return {
        (
            tool,
            len(pairs),
            len({one.request_id for _, one in pairs}),
            len({one.tenant for _, one in pairs}),
        )
        for tool, pairs in _grouped(calls, lambda pair: pair[0]).items()
    }


def _tiers() -> set[tuple[Any, ...]]:
    def tokens(rows: Iterable[RequestRecord]) -> int:
        return sum(one.prompt_tokens + one.completion_tokens for one in rows)

    return {
        (tier.value, len(rows), tokens(rows), tokens(rows) / tokens(REQUESTS))
        for tier, rows in _grouped(REQUESTS, lambda one: one.tier).items()
    }


def _refused() -> set[tuple[Any, ...]]:
    limited = [one for one in REFUSALS if one.limit]
    groups = _grouped(limited, lambda one: (one.tenant, one.limit, one.code))
    return {(*key, sum(one.count for one in rows)) for key, rows in groups.items()}


def _idle() -> set[tuple[Any, ...]]:
    found = set()
    for model, rows in _grouped(SAMPLES, lambda one: one.model).items():
        busy_us, all_us = sum(one.busy_us for one in rows), len(rows) * 20_000_000
        idle_cost = (all_us - busy_us) * PRICES[model].device_per_hour / 3_600_000_000
        found.add((model, PRICES[model].currency, 1 - busy_us / all_us, idle_cost))
    return found


def _moves() -> set[tuple[Any, ...]]:
    found = set()
    for model, rows in _grouped(_RAN, lambda one: one.model_served).items():
        moved = sum(bool(one.attempts) for one in rows)
        resampled = sum(one.resampled for one in rows)
        found.add((model, moved, moved, resampled, moved / len(rows)))
    return found


def _invoices() -> set[tuple[Any, ...]]:
    groups = _grouped(_RAN, lambda one: (one.tenant, one.currency))
    return {(*key, _pays(rows), _pays(rows), 0) for key, rows in groups.items()}


def _users() -> set[tuple[Any, ...]]:
    named = [one for one in REQUESTS if one.user]
    groups = _grouped(named, lambda one: (one.tenant, one.user, one.currency))
    lines = [(*key, len(rows), _pays(rows)) for key, rows in groups.items()]
    of_tenants = _grouped(lines, lambda line: line[0]).values()
    return {one for of in of_tenants for one in sorted(of, key=lambda line: -line[-1])[:3]}


def _waits() -> set[tuple[Any, ...]]:
    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    done = [one for one in REQUESTS if one.status is Status.DONE]
    return {
        (
            tier.value,
            len(rows),
            mean(one.queue_ms for one in rows),
            mean(one.ttft_ms - one.queue_ms for one in rows),
            mean(one.total_ms - one.ttft_ms for one in rows),
        )
        for tier, rows in _grouped(done, lambda one: one.tier).items()
    }


def _stalls() -> set[tuple[Any, ...]]:
    return {
        (
            model,
            len(rows),
            sum(one.num_stalls for one in rows) / len(rows),
            max(one.longest_gap_ms for one in rows),
            sum(one.num_resumes for one in rows),
            sum(one.num_epochs > 1 for one in rows),
        )
        for model, rows in _grouped(DELIVERIES, lambda one: one.model).items()
    }


def _margins() -> set[tuple[Any, ...]]:
    found = set()
    for model, rows in _grouped(_RAN, lambda one: one.model_served).items():
        devices = sum(one.device_cost for one in rows)
        margin = _pays(rows) - devices
        found.add((model, PRICES[model].currency, _pays(rows), devices, margin))
    return found


def _busiest() -> set[tuple[Any, ...]]:
    found = set()
    for model, rows in _grouped(SAMPLES, lambda one: one.model).items():
        hours = [
            (
                sum(one.busy_us for one in of) / (len(of) * 20_000_000),
                -hour,
                max(one.queue_depth for one in of),
            )
            for hour, of in _grouped(rows, lambda one: _hour_of(one.sampled_ns)).items()
        ]
        share, hour, queued = max(hours)
        found.add((model, -hour, share, queued))
    return found


_WANTED: tuple[Callable[[], set[tuple[Any, ...]]], ...] = (
    *(_owes, _first_tokens, _saved, _errors, _tools, _tiers, _refused, _idle, _moves),
    *(_invoices, _users, _waits, _stalls, _margins, _busiest),
)


async def _fill(store: Store) -> None:
    """Store each row twice, which must not change an answer."""
    entries = {
        name: ModelEntry(name=name, source=f"/models/{name}", prices=prices)
        for name, prices in PRICES.items()
    }
    await record_prices(store, Catalogue(entries), SystemClock())
    kinds: tuple[list[Record], ...] = ([*REQUESTS], [*DELIVERIES], [*SAMPLES], [*REFUSALS])
    for token in ("once", "twice"):
        for records in kinds:
            into = table_of(records[0])
            columns = into.to_columns(records, range(1, len(records) + 1))
            await store.insert(into, columns, f"{token} {into.name}")
    await Rollups(store, SystemClock(), 1.0).reconcile()


def _plain(row: Iterable[Any]) -> list[Any]:
    """Amounts as floats, times as Unix times."""
    return [
        value.timestamp()
        if hasattr(value, "timestamp")
        else float(value)
        if isinstance(value, Decimal)
        else value
        for value in row
    ]


async def test_the_fifteen_questions_are_answered_right(store: Store) -> None:
    assert [int(number) for number, _ in _QUESTIONS] == list(range(1, 16))
    assert len(_WANTED) == len(_QUESTIONS)
    await _fill(store)
    for (number, statement), wanted in zip(_QUESTIONS, _WANTED, strict=True):
        found = sorted(_plain(row) for row in await store.rows(statement))
        expected = sorted(_plain(row) for row in wanted())
        assert len(found) == len(expected), number
        for row, right in zip(found, expected, strict=True):
            for value, other in zip(row, right, strict=True):
                assert value == (
                    pytest.approx(other, rel=1e-6) if isinstance(other, float) else other
                ), (number, row, right)
    [statement] = [text for number, text in _QUESTIONS if number == "10"]
    assert {difference for *_, difference in await store.rows(statement)} == {0}
