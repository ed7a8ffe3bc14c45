"""The operations page's queries over a few rows, each stored twice, with figures by hand."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from millrace.runtime.clock import SystemClock
from millrace.schemas.control import TelemetryQuery
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import Attempt, DeliveryRecord, RequestRecord, Status, WorkerSample
from millrace.telemetry.http.answers import SavedQueryAnswers
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.sink.merging import merge_generations
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import DELIVERIES, GENERATION_ROWS, REQUESTS, WORKER_SAMPLES
from tests.telemetry.answered import rows_of
from tests.telemetry.records import unix_s

# The begin of an hour, a while ago.
BEGIN_S = int(time.time()) // 3600 * 3600 - 7_200
RANGE: dict[str, str | int | float] = {"from_s": BEGIN_S, "to_s": BEGIN_S + 600, "step_s": 60}


def request(
    name: str,
    at_s: float,
    *,
    tenant: str = "acme",
    model: str = "small",
    status: Status = Status.DONE,
    cost: str = "0.1",
    currency: str = "USD",
    attempts: tuple[Attempt, ...] = (),
    pulled_tokens: int = 0,
    kv_source: str = "",
) -> RequestRecord:
    """100 tokens in (40 cached), 11 out; 2 s: 100 ms in the queue, TTFT 500 ms, TPOT 150 ms."""
    done_ns = BEGIN_S * 10**9 + round(at_s * 1_000) * 1_000_000
    return RequestRecord(
        request_id=name,
        tenant=tenant,
        source=Source.HTTP,
        tier=Tier.PRO,
        model_requested=model,
        model_served=model,
        worker_id="w-1",
        prompt_tokens=100,
        cached_tokens=40,
        completion_tokens=11,
        queue_ms=100.0,
        ttft_ms=500.0,
        tpot_us=150_000.0,
        total_ms=2_000.0,
        status=status,
        cost=Decimal(cost),
        currency=currency,
        received_ns=done_ns - 2_000_000_000,
        dispatched_ns=done_ns - 1_910_000_000,
        started_ns=done_ns - 1_900_000_000,
        first_token_ns=done_ns - 1_500_000_000,
        done_ns=done_ns,
        epoch=65,
        num_preemptions=1 if attempts else 0,
        device_us=500_000,
        device_cost=Decimal("0.02"),
        attempts=attempts,
        pulled_tokens=pulled_tokens,
        kv_source=kv_source,
    )


MOVED = request(
    "moved",
    130,
    attempts=(
        Attempt(
            epoch=64,
            worker_id="w-0",
            started_ns=(BEGIN_S + 128) * 10**9 + 30_000_000,
            ended_ns=(BEGIN_S + 128) * 10**9 + 60_000_000,
            device_us=30_000,
            pulled_tokens=32,
            kv_source="w-9",
        ),
    ),
    pulled_tokens=128,
    kv_source="w-0",
)
REQUESTS_MADE = [
    request("a", 0),
    request("b", 30, model="large", cost="0.123456789012"),
    request("c", 59.999, tenant="globex"),
    request("d", 60, status=Status.SHED, cost="0"),
    request("e", 61, status=Status.FAILED, cost="0", currency="EUR"),
    MOVED,
    request("out", 600),
    request("before", -0.001),
]
DELIVERIES_MADE = [
    DeliveryRecord(
        request_id="moved",
        gateway_id="gw-1",
        tenant="acme",
        source=Source.HTTP,
        model="small",
        first_byte_ms=510.0,
        total_ms=2_010.0,
        tokens_delivered=11,
        num_resumes=2,
        num_stalls=1,
        stalled_ms=1_200.0,
        longest_gap_ms=1_200.0,
        outcome="done",
        done_ns=(BEGIN_S + 130) * 10**9 + 10_000_000,
    )
]


def sample(at_s: int, worker: str) -> WorkerSample:
    """A second of a worker: half of it busy, 8 of 10 blocks in use, 100 tokens, $36 an hour."""
    return WorkerSample(
        worker_id=worker,
        name=worker,
        model="small",
        sampled_ns=(BEGIN_S + at_s) * 10**9,
        period_ms=1_000.0,
        num_running=4,
        num_blocks=10,
        num_free_blocks=2,
        busy_share=0.5,
        busy_us=500_000,
        decode_tokens=100,
        queue_depth=3,
        prefix_query_tokens=10,
        prefix_hit_tokens=5,
        device_per_hour=Decimal(36),
    )


async def ask(store: Store, name: str, **params: str | int | float) -> list[dict[str, Any]]:
    answers = SavedQueryAnswers(store.reader)
    known = answers._queries[name].parameters
    chosen = {key: value for key, value in RANGE.items() if key in known}
    answer = await answers.answer(TelemetryQuery(name=name, params={**chosen, **params}))
    assert answer.error == ""
    return rows_of(answer)


@pytest.fixture
async def filled(store: Store) -> Store:
    samples = [sample(at_s, worker) for at_s in range(120) for worker in ("w-1", "w-2")]
    for token in ("once", "again"):
        columns = REQUESTS.to_columns(REQUESTS_MADE, range(len(REQUESTS_MADE)))
        await store.insert(REQUESTS, columns, token)
        await store.insert(DELIVERIES, DELIVERIES.to_columns(DELIVERIES_MADE, range(1)), token)
        columns = WORKER_SAMPLES.to_columns(samples, range(len(samples)))
        await store.insert(WORKER_SAMPLES, columns, token)
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()
    return store


async def test_totals(filled: Store) -> None:
    (row,) = await ask(filled, "totals")
    assert {name: row[name] for name in ("requests", "done", "shed", "failed", "moved")} == {
        "requests": 6,
        "done": 4,
        "shed": 1,
        "failed": 1,
        "moved": 1,
    }
    assert row["currencies"] == ["EUR", "USD"]
    assert row["costs"] == ["0", "0.423456789012"]
    assert row["device_costs"] == ["0.02", "0.1"]
    assert row["device_us"] == 3_000_000
    assert row["ttft_p50_ms"] == row["ttft_p99_ms"] == 500
    assert row["tpot_p95_ms"] == pytest.approx(150, rel=0.01)
    assert row["e2e_p50_ms"] == pytest.approx(2_000, rel=0.01)
    (row,) = await ask(filled, "totals", tenant="globex")
    assert (row["requests"], row["costs"]) == (1, ["0.1"])
    (row,) = await ask(filled, "totals", tenant="nobody")
    assert (row["requests"], row["ttft_p50_ms"], row["currencies"]) == (0, None, [])


async def test_traffic_counts_half_open_steps(filled: Store) -> None:
    rows = await ask(filled, "traffic")
    assert [unix_s(row["t"]) for row in rows] == [BEGIN_S + 60 * n for n in range(10)]
    assert rows[0] == {
        "t": f"{datetime.fromtimestamp(BEGIN_S, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "done_per_s": 3 / 60,
        "cancelled_per_s": 0,
        "shed_per_s": 0,
        "failed_per_s": 0,
    }
    assert (rows[1]["shed_per_s"], rows[1]["failed_per_s"]) == (1 / 60, 1 / 60)
    assert all(row["done_per_s"] == 0 for row in rows[3:])
    rows = await ask(filled, "traffic", from_s=BEGIN_S + 30, to_s=BEGIN_S + 90)
    assert [row["done_per_s"] for row in rows] == [2 / 30, 0]


async def test_tokens_and_latencies(filled: Store) -> None:
    rows = await ask(filled, "tokens", model="small")
    assert (rows[0]["output_per_s"], rows[0]["prompt_per_s"], rows[0]["cached_per_s"]) == (
        22 / 60,
        120 / 60,
        80 / 60,
    )
    rows = await ask(filled, "latency")
    assert [unix_s(row["t"]) - BEGIN_S for row in rows] == [0, 60, 120]
    assert rows[0]["queue_p50_ms"] == 100
    assert rows[0]["itl_p99_ms"] == pytest.approx(150, rel=0.01)
    assert rows[1]["e2e_p50_ms"] is None


async def test_cost_by_model_is_exact(filled: Store) -> None:
    rows = await ask(filled, "cost_by_model", step_s=600)
    assert [(row["model"], row["currency"], row["cost"], row["requests"]) for row in rows] == [
        ("large", "USD", "0.123456789012", 1),
        ("small", "EUR", "0", 1),
        ("small", "USD", "0.3", 4),
    ]


async def test_filters_list_models_and_tenants_with_requests(filled: Store) -> None:
    rows = await ask(filled, "tenants_models")
    assert [(row["kind"], row["name"], row["requests"]) for row in rows] == [
        ("model", "small", 5),
        ("model", "large", 1),
        ("tenant", "acme", 5),
        ("tenant", "globex", 1),
    ]


async def test_interruptions_are_counted_by_step(filled: Store) -> None:
    rows = await ask(filled, "interruptions")
    assert [unix_s(row["t"]) - BEGIN_S for row in rows] == [60, 120]
    assert (rows[0]["shed"], rows[0]["failed"], rows[0]["moves"]) == (1, 1, 0)
    assert (rows[1]["moves"], rows[1]["preemptions"]) == (1, 1)
    assert (rows[1]["resumes"], rows[1]["stalls"], rows[1]["stalled_ms"]) == (2, 1, 1_200)
    assert await ask(filled, "interruptions", tenant="globex") == []


@pytest.mark.parametrize("step_s", [30, 60])
async def test_workers_by_sample_and_by_minute(filled: Store, step_s: int) -> None:
    rows = await ask(filled, "workers", to_s=BEGIN_S + 120, step_s=step_s)
    costs = await ask(filled, "device_cost", to_s=BEGIN_S + 120, step_s=step_s)
    assert [row["t"] for row in costs] == [row["t"] for row in rows]
    assert len(rows) == 120 // step_s
    for row in rows:
        assert row["workers"] == 2
        assert row["decode_tokens_per_s"] == 200
        assert (row["running"], row["batch"], row["queued"]) == (8, 4, 3)
        assert (row["kv_use_percent"], row["busy_percent"]) == (80, 50)
        assert row["prefix_hit_percent"] == 50
    for row in costs:
        # Two devices of a cent a second, busy for half of the time.
        assert row["currency"] == "USD"
        assert row["busy_cost"] == pytest.approx(0.01 * step_s)
        assert row["idle_cost"] == pytest.approx(0.01 * step_s)


async def test_recent_requests_by_status_and_id(filled: Store) -> None:
    rows = await ask(filled, "recent_requests", rows=2)
    assert [row["request_id"] for row in rows] == ["moved", "e"]
    assert rows[0]["num_lives"] == 1
    rows = await ask(filled, "recent_requests", status="shed")
    assert [row["request_id"] for row in rows] == ["d"]
    rows = await ask(filled, "recent_requests", id="mo")
    assert [row["request_id"] for row in rows] == ["moved"]


async def test_one_request_in_the_order_of_time(filled: Store) -> None:
    rows = await ask(filled, "request_timeline", id="moved")
    begun_us = (BEGIN_S + 128) * 1_000_000
    timeline = [
        (
            row["event"],
            round(1e6 * unix_s(row["at"])) - begun_us,
            row["run"],
            row["place"],
            row["device_us"],
        )
        for row in rows
    ]
    assert timeline == [
        ("received", 0, 0, "", 0),
        ("started", 30_000, 64, "w-0", 0),
        ("interrupted", 60_000, 64, "w-0", 30_000),
        ("dispatched", 90_000, 65, "w-1", 0),
        ("started", 100_000, 65, "w-1", 0),
        ("first_token", 500_000, 65, "w-1", 0),
        ("first_byte", 510_000, 0, "gw-1", 0),
        ("ended", 2_000_000, 65, "w-1", 500_000),
        ("delivered", 2_010_000, 0, "gw-1", 0),
    ]
    (row,) = await ask(filled, "request_details", id="moved")
    assert (row["cost"], row["device_cost"], row["num_resumes"]) == ("0.1", "0.02", 2)
    assert (row["pulled_tokens"], row["kv_source"]) == (128, "w-0")
    assert (row["pull_sources"], row["pull_tokens"]) == (["w-9", "w-0"], [32, 96])
    (row,) = await ask(filled, "request_details", id="a")
    assert not row["is_delivered"]


async def test_a_request_of_several_generations(store: Store) -> None:
    """The details sum all generations; they and the timeline list each generation too."""
    first = request("several", 10)
    parts = [
        msgspec.structs.replace(first, parent_id="several"),
        msgspec.structs.replace(first, request_id="several.1", parent_id="several", choice=1),
        msgspec.structs.replace(first, request_id="several-r1", parent_id="several", round=1),
    ]
    columns = GENERATION_ROWS.to_columns(parts, range(1, 4))
    await store.insert(GENERATION_ROWS, columns, "several")
    await merge_generations(store, ["several"])
    (row,) = await ask(store, "request_details", id="several")
    assert row["num_generations"] == 3
    rows = await ask(store, "request_generations", id="several")
    assert [(one["choice"], one["round"]) for one in rows] == [(0, 0), (0, 1), (1, 0)]
    for name in ("prompt_tokens", "completion_tokens", "device_us"):
        assert row[name] == sum(one[name] for one in rows)
    assert Decimal(row["cost"]) == sum(Decimal(one["cost"]) for one in rows)
    rows = await ask(store, "request_timeline", id="several")
    ended = [(row["choice"], row["round"]) for row in rows if row["event"] == "ended"]
    assert sorted(ended) == [(0, 0), (0, 1), (1, 0)]
    assert [row["event"] for row in rows].count("received") == 1


async def test_a_request_of_the_former_version_has_a_timeline(store: Store) -> None:
    former = msgspec.structs.replace(
        request("former", 10), dispatched_ns=0, device_us=0, device_cost=Decimal(0), version=1
    )
    await store.insert(REQUESTS, REQUESTS.to_columns([former], [1]), "former")
    rows = await ask(store, "request_timeline", id="former")
    assert [row["event"] for row in rows] == ["received", "started", "first_token", "ended"]
