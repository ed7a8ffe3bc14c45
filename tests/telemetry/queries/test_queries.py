"""Every saved query, run by its name on the real engine."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from millrace.runtime.clock import SystemClock
from millrace.schemas.control import TelemetryQuery
from millrace.schemas.engines import WorkerRole
from millrace.schemas.records import LossCause, Status, WorkerSample
from millrace.telemetry.http.answers import SavedQueryAnswers, load_queries
from millrace.telemetry.http.parameters import read_values
from millrace.telemetry.rollups.budgets import TABLE as BUDGETS
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import (
    DELIVERIES,
    REFUSALS,
    REQUESTS,
    WORKER_LOSSES,
    WORKER_SAMPLES,
)
from tests.telemetry.answered import integer_columns, rows_of
from tests.telemetry.records import (
    delivery_record,
    loss_record,
    refusal_record,
    request_record,
    unix_s,
    worker_sample,
)


async def fill(store: Store) -> None:
    """A minute of traffic that ended a moment ago, each row twice, and its minutes."""
    now_ns = time.time_ns()
    records = [request_record(n, done_ns=now_ns - n * 10**9) for n in range(1, 61)]
    deliveries = [delivery_record(n, done_ns=now_ns - n * 10**9) for n in range(1, 61)]
    samples = [
        worker_sample(n, sampled_ns=now_ns - n * 10**9, worker=worker)
        for n in range(60)
        for worker in ("w-1", "w-2")
    ]
    refusals = [refusal_record(now_ns - n * 10**9, n) for n in range(1, 11)]
    losses = [loss_record(LossCause.SILENT, now_ns - 10**9)]
    for token in ("once", "twice"):
        await store.insert(BUDGETS, (["acme"], [""], ["USD"], [Decimal(100)], [0]), token)
        await store.insert(WORKER_LOSSES, WORKER_LOSSES.to_columns(losses, range(1)), token)
        await store.insert(REFUSALS, REFUSALS.to_columns(refusals, range(10)), token)
        await store.insert(REQUESTS, REQUESTS.to_columns(records, range(60)), token)
        await store.insert(DELIVERIES, DELIVERIES.to_columns(deliveries, range(60)), token)
        await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(120)), token)
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()


async def ask(store: Store, name: str, **params: str | int | float) -> list[dict[str, Any]]:
    answer = await SavedQueryAnswers(store.reader).answer(TelemetryQuery(name=name, params=params))
    assert answer.error == "", name
    return rows_of(answer)


async def test_each_query_runs_empty_and_filled(store: Store) -> None:
    refused_id = refusal_record(number=1).request_id
    given = {}
    for name, query in load_queries().items():
        known = {"id": refused_id if name == "refusal_details" else request_record(1).request_id}
        needed = query.parameters.values()
        given[name] = {p.name: known[p.name] for p in needed if p.default is None}
        await ask(store, name, **given[name])
    await fill(store)
    failed = replace(request_record(0, done_ns=time.time_ns() - 10**9), status=Status.FAILED)
    await store.insert(REQUESTS, REQUESTS.to_columns([failed], [60]), "failed")
    for name, params in given.items():
        assert await ask(store, name, **params), name


async def test_integers_of_64_bits_are_text_that_the_page_reads(store: Store) -> None:
    await fill(store)
    found = set()
    for name, query in load_queries().items():
        known = {"id": refusal_record(1).request_id if name == "refusal_details" else "r"}
        given = {p.name: known[p.name] for p in query.parameters.values() if p.default is None}
        values = read_values(name, query.parameters, given, time.time())
        described = json.loads(await store.reader.read(query.sql, values, "JSONCompact"))
        columns = {one["name"] for one in described["meta"] if "Int64" in one["type"]}
        found |= columns
        answer = await SavedQueryAnswers(store.reader).answer(
            TelemetryQuery(name=name, params={**given})
        )
        for row in json.loads(answer.rows_json):
            assert all(isinstance(row[one], str | None) for one in columns), (name, row)
    # The page does not count with a hash, which may be above 2^53.
    assert found - {"request_hash"} == integer_columns()


async def test_totals_count_each_request_once(store: Store) -> None:
    await fill(store)
    (totals,) = await ask(store, "totals", from_s=-300)
    records = [request_record(n) for n in range(1, 61)]
    assert totals["requests"] == 60
    for counted in ("completion_tokens", "proposed_tokens", "accepted_tokens"):
        assert totals[counted] == sum(getattr(record, counted) for record in records)
    assert totals["currencies"] == ["USD"]
    assert Decimal(totals["costs"][0]) == sum(record.cost for record in records)
    assert totals["ttft_p50_ms"] == pytest.approx(
        sorted(record.ttft_ms for record in records)[30], rel=0.1
    )


async def test_rates_add_up_and_quiet_steps_are_zeros(store: Store) -> None:
    await fill(store)
    rows = await ask(store, "traffic", from_s=-300, step_s=5)
    assert len(rows) in {60, 61}
    total = sum(5 * row["done_per_s"] for row in rows)
    assert total == pytest.approx(60, abs=6)
    assert rows[0]["done_per_s"] == 0


async def test_workers_are_added_up(store: Store) -> None:
    await fill(store)
    rows = await ask(store, "workers", from_s=-300, step_s=10)
    assert all(0 < row["kv_use_percent"] < 100 for row in rows)
    assert all(row["busy_percent"] < 100 for row in rows)
    assert max(row["decode_tokens_per_s"] for row in rows) > 500
    now = await ask(store, "workers_now")
    assert [row["name"] for row in now] == ["w-1", "w-2"]
    assert [row["role"] for row in now] == ["both"] * 2
    now_ns = time.time_ns()
    samples = [
        replace(
            worker_sample(n, sampled_ns=now_ns - n * 10**9, worker="w-3"),
            role=WorkerRole.DECODE,
            pulled_tokens=16 * n,
            served_tokens=1,
        )
        for n in range(1, 4)
    ]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(3)), "peers")
    *_, row = await ask(store, "workers_now")
    assert (row["name"], row["role"]) == ("w-3", "decode")
    assert (int(row["pulled_tokens"]), int(row["served_tokens"])) == (96, 3)


async def test_a_step_longer_than_a_sample_makes_no_idle_time(store: Store) -> None:
    """The engine says that a step took time when it is over."""
    now_ns = time.time_ns() // (20 * 10**9) * 20 * 10**9
    samples = [
        replace(
            worker_sample(n, sampled_ns=now_ns - n * 10**9, worker="w-1"),
            period_ms=1_000.0,
            busy_us=busy_us,
            device_per_hour=Decimal(3_600),
        )
        for n, busy_us in enumerate((1_500_000, 0, 1_900_000, 400_000), start=1)
    ]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(4)), "long")
    rows = await ask(store, "device_cost", from_s=-300, step_s=20)
    assert sum(row["busy_cost"] for row in rows) == pytest.approx(3.8)
    assert sum(row["idle_cost"] for row in rows) == pytest.approx(0.2)


@pytest.mark.parametrize("step_s", [20, 60])
async def test_a_group_idles_with_all_its_devices(store: Store, step_s: int) -> None:
    """Four devices at 3,600 an hour each, busy for a second of two."""
    minute_ns = (time.time_ns() // (60 * 10**9) - 2) * 60 * 10**9
    samples = [
        replace(
            worker_sample(n, sampled_ns=minute_ns + n * 10**9, worker="w-1"),
            period_ms=1_000.0,
            busy_us=busy_us,
            charged_us=busy_us,
            num_devices=4,
            device_per_hour=Decimal(3_600),
        )
        for n, busy_us in enumerate((4_000_000, 0), start=1)
    ]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(2)), "group")
    await Rollups(store, SystemClock(), 1.0).reconcile()
    rows = await ask(store, "workers", from_s=-300, step_s=step_s)
    assert [row["busy_percent"] for row in rows] == [pytest.approx(50)]
    rows = await ask(store, "device_cost", from_s=-300, step_s=step_s)
    assert [row["busy_cost"] for row in rows] == [pytest.approx(4)]
    assert [row["idle_cost"] for row in rows] == [pytest.approx(4)]
    (idle,) = await ask(store, "idle_cost")
    assert (int(idle["busy_us"]), int(idle["idle_us"])) == (4_000_000, 4_000_000)
    assert idle["busy_share"] == 0.5
    assert Decimal(idle["idle_cost"]) == 4


async def test_a_rest_is_of_every_step_that_it_lasted(store: Store) -> None:
    until_ns = (time.time_ns() // (30 * 10**9) - 1) * 30 * 10**9
    samples = [
        _rest(1, until_ns - 30 * 10**9),
        _rest(2, until_ns),
        worker_sample(3, sampled_ns=until_ns + 10**9, worker="w-1"),
    ]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(3)), "rests")
    to_s = until_ns // 10**9
    rows = await ask(store, "workers", from_s=to_s - 60, to_s=to_s, step_s=5)
    assert [unix_s(row["t"]) for row in rows] == list(range(to_s - 60, to_s, 5))
    assert {(row["workers"], row["busy_percent"]) for row in rows} == {(1, 0.0)}
    costs = await ask(store, "device_cost", from_s=to_s - 60, to_s=to_s, step_s=5)
    assert [row["t"] for row in costs] == [row["t"] for row in rows]
    assert sum(row["idle_cost"] for row in costs) == pytest.approx(60.0)


async def test_a_worker_at_rest_is_there_for_longer(store: Store) -> None:
    now_ns = time.time_ns()
    samples = [
        _rest(1, now_ns - 33 * 10**9),
        replace(_rest(2, now_ns - 33 * 10**9), worker_id="busy", num_running=1),
        replace(_rest(3, now_ns - 60 * 10**9), worker_id="gone"),
    ]
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(3)), "rests")
    assert [row["worker"] for row in await ask(store, "workers_now")] == ["w-1"]


def _rest(number: int, until_ns: int) -> WorkerSample:
    """Half a minute in which nothing happened, at 3,600 an hour."""
    sample = worker_sample(number, sampled_ns=until_ns, worker="w-1")
    counts = {"num_running": 0, "num_waiting": 0, "num_steps": 0, "busy_us": 0, "busy_share": 0.0}
    return replace(sample, period_ms=30_000.0, device_per_hour=Decimal(3_600), **counts)


async def test_recent_requests_are_the_latest(store: Store) -> None:
    await fill(store)
    rows = await ask(store, "recent_requests", rows=5)
    assert [row["request_id"] for row in rows] == [
        request_record(n).request_id for n in range(1, 6)
    ]


@pytest.mark.parametrize(
    ("name", "params", "error"),
    [
        ("nothing", {}, "unknown query 'nothing'"),
        ("totals", {"hours": 1}, "no parameter 'hours'"),
        ("totals", {"from_s": "1) OR 1"}, "from_s"),
        ("totals; DROP TABLE requests", {}, "unknown query"),
    ],
)
async def test_what_is_wrong_is_said(
    store: Store, name: str, params: dict[str, str | int | float], error: str
) -> None:
    answer = await SavedQueryAnswers(store.reader).answer(TelemetryQuery(name=name, params=params))
    assert error in answer.error
    assert answer.rows_json == b"[]"


async def test_refusals_add_up_and_count_each_record_once(store: Store) -> None:
    now_ns = time.time_ns() - 10**9
    refusals = [
        refusal_record(now_ns, 0, count=5, tenant="acme", limit="tokens_per_minute"),
        refusal_record(now_ns - 10**9, 0, count=6, tenant="acme", limit="tokens_per_minute"),
        refusal_record(now_ns, 1, count=7, code="invalid_api_key", status=401),
        refusal_record(now_ns - 3_600 * 10**9, 0, count=1_000, tenant="acme", code="old"),
    ]
    for token in ("once", "twice"):
        await store.insert(REFUSALS, REFUSALS.to_columns(refusals, range(4)), token)
    rows = await ask(store, "refusals", from_s=-1_800)
    found = [(row["tenant"], row["code"], row["status"], row["refused"]) for row in rows]
    assert found == [("acme", "tokens_per_minute", 429, 11), ("", "invalid_api_key", 401, 7)]
    assert rows[0]["limit_reached"] == "tokens_per_minute"
    assert rows[0]["first_at"] < rows[0]["last_at"]
    assert [
        row["tenant"] for row in await ask(store, "refusals", tenant="acme", from_s=-1_800)
    ] == ["acme"]
