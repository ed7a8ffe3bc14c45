"""Queries for operators: alerts, objectives, refusals, and waits of clients besides TTFT."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from millrace.runtime.clock import SystemClock
from millrace.schemas.control import TelemetryQuery
from millrace.schemas.records import DeliveryRecord, LossCause, LossObserver, RequestRecord, Status
from millrace.telemetry.http.answers import SavedQueryAnswers
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import (
    DELIVERIES,
    REFUSALS,
    REQUESTS,
    WORKER_LOSSES,
    WORKER_SAMPLES,
)
from tests.telemetry.answered import rows_of
from tests.telemetry.records import (
    delivery_record,
    loss_record,
    refusal_record,
    request_record,
    worker_sample,
)

NS = 10**9


async def ask(store: Store, name: str, **params: str | int | float) -> list[dict[str, Any]]:
    answer = await SavedQueryAnswers(store.reader).answer(TelemetryQuery(name=name, params=params))
    assert answer.error == ""
    return rows_of(answer)


def request(name: str, age_s: float, ttft_ms: float = 100.0, **more: Any) -> RequestRecord:
    base = request_record(0, done_ns=time.time_ns() - int(age_s * NS))
    known = {"model_served": "demo", "tenant": "acme", "tpot_us": 20_000.0}
    return msgspec.structs.replace(base, request_id=name, ttft_ms=ttft_ms, **(known | more))


def delivery(name: str, age_s: float, first_byte_ms: float, **more: Any) -> DeliveryRecord:
    base = delivery_record(0, done_ns=time.time_ns() - int(age_s * NS))
    known = {"request_id": name, "model": "demo", "first_byte_ms": first_byte_ms}
    return msgspec.structs.replace(base, **(known | more))


async def keep(
    store: Store, requests: Sequence[RequestRecord] = (), seen: Sequence[DeliveryRecord] = ()
) -> None:
    """Store each twice, as the bridge may."""
    names = [[one.request_id for one in requests[:1]], [one.request_id for one in seen[:1]]]
    for token in (f"{names} once", f"{names} twice"):
        columns = REQUESTS.to_columns(requests, range(len(requests)))
        await store.insert(REQUESTS, columns, token)
        columns = DELIVERIES.to_columns(seen, range(len(seen)))
        await store.insert(DELIVERIES, columns, token)
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()


async def test_what_a_client_waits_for_beside_ttft(store: Store) -> None:
    requests = [request(f"r-{n}", 10 + n, ttft_ms=100.0) for n in range(10)]
    requests.append(request("large", 10, ttft_ms=400.0, model_served="large"))
    requests.append(request("by-nats", 10, ttft_ms=9_000.0))
    seen = [delivery(f"r-{n}", 10 + n, 104.0, intake_ms=16.0) for n in range(10)]
    seen.append(delivery("large", 10, 410.0, intake_ms=2.0, model="large"))
    seen.append(delivery("shed", 10, 0.0))
    await keep(store, requests, seen)
    rows = {row["model"]: row for row in await ask(store, "first_byte")}
    assert {name: row["requests"] for name, row in rows.items()} == {"": 11, "demo": 10, "large": 1}
    of_demo = [rows["demo"][f"{what}_p50_ms"] for what in ("intake", "ttft", "way_back")]
    assert of_demo == pytest.approx([16.0, 100.0, 4.0], rel=0.01)
    assert rows["demo"]["first_byte_p99_ms"] == pytest.approx(120.0, rel=0.01)
    assert rows[""]["first_byte_p99_ms"] == pytest.approx(412.0, rel=0.01)
    assert await ask(store, "first_byte", tenant="nobody") == []
    steps = await ask(store, "client_latency", model="large", step_s=60)
    assert [row["first_byte_p50_ms"] for row in steps] == pytest.approx([412.0], rel=0.01)


async def test_an_error_budget_is_of_its_window(store: Store) -> None:
    good = [request(f"good-{n}", 100 + n) for n in range(16)]
    missed = [
        request("late", 100, ttft_ms=1_001.0),
        request("slow", 100, tpot_us=100_001.0),
        request("failed", 100, status=Status.FAILED),
        request("shed", 100, status=Status.SHED, first_token_ns=0, started_ns=0),
    ]
    old = [request(f"old-{n}", 7_200) for n in range(80)]
    left_out = [request("cancelled", 100, status=Status.CANCELLED, ttft_ms=5_000.0)]
    await keep(store, [*good, *missed, *old, *left_out])
    (row,) = await ask(store, "slo_budget", from_s=-3_600, target=0.9)
    assert (row["requests"], row["met"], row["ttft_met"], row["tpot_met"]) == (20, 16, 17, 17)
    assert row["attainment"] == pytest.approx(0.8)
    assert row["burn_rate"] == pytest.approx(2.0)
    assert (row["window_requests"], row["window_met"]) == (100, 96)
    assert row["budget_left"] == pytest.approx(0.6)
    (row,) = await ask(store, "slo_budget", from_s=-3_600, window_s=600, target=0.9)
    assert row["budget_left"] == pytest.approx(-1.0)
    (row,) = await ask(store, "slo_budget", from_s=-60)
    assert (row["requests"], row["attainment"], row["burn_rate"]) == (0, None, None)


async def conditions(store: Store, **params: float) -> dict[tuple[str, str], dict[str, Any]]:
    rows = await ask(store, "alert_conditions", **params)
    return {(row["alert"], row["subject"]): row for row in rows}


async def test_alerts_hold_since_they_began(store: Store) -> None:
    """Nine minutes in which one of four fails, after an hour in which all went well."""
    now_s = time.time()
    well = [request(f"well-{n}", 600 + 60 * n) for n in range(60)]
    bad = [
        request(f"bad-{n}", 15 * n + 1, status=Status.FAILED if n % 4 == 0 else Status.DONE)
        for n in range(36)
    ]
    await keep(store, [*well, *bad])
    found = await conditions(store)
    failing = found["MillraceGenerationsFail", "demo"]
    assert failing["is_over"] == 1
    assert failing["value"] == pytest.approx(0.25, abs=0.05)
    assert failing["since_s"] == pytest.approx(now_s - 9 * 60, abs=121)
    shedding = found["MillraceShedding", "demo"]
    assert (shedding["value"], shedding["is_over"], shedding["since_s"]) == (0, 0, None)
    # A condition that holds again after a break counts from then on.
    await keep(store, [request("again", 3_000, status=Status.FAILED)])
    again = (await conditions(store))["MillraceGenerationsFail", "demo"]
    assert again["since_s"] == failing["since_s"]


async def test_first_tokens_are_late_in_both_windows(store: Store) -> None:
    late = [delivery(f"late-{n}", 20 * n + 2, 1_500.0) for n in range(150)]
    await keep(store, seen=late)
    found = await conditions(store)
    assert found["MillraceFirstTokensLate", "demo"]["is_over"] == 1
    assert found["MillraceFirstTokensOftenLate", "demo"]["is_over"] == 1
    assert (await conditions(store, ttft_ms=1_600))["MillraceFirstTokensLate", "demo"][
        "is_over"
    ] == 0
    # The last five minutes are well again, which the hour does not know.
    await keep(store, seen=[delivery(f"soon-{n}", n + 1, 80.0) for n in range(250)])
    found = await conditions(store)
    assert found["MillraceFirstTokensLate", "demo"]["is_over"] == 0
    assert found["MillraceFirstTokensLate", "demo"]["bound"] == pytest.approx(0.72)


async def test_poison_stalls_and_full_caches(store: Store) -> None:
    poison = request("poison", 900, status=Status.FAILED, error_code="poison")
    stalled = [delivery(f"s-{n}", 5 + n, 50.0, num_stalls=n % 2) for n in range(20)]
    await keep(store, [poison], stalled)
    now_ns = time.time_ns()
    samples = [
        msgspec.structs.replace(
            worker_sample(0, sampled_ns=now_ns - age_s * NS, worker="w-1"),
            num_blocks=100,
            num_free_blocks=90 if age_s > 400 else 2,
        )
        for age_s in range(1, 600, 10)
    ]
    # The engine of this worker tells of no blocks.
    without = worker_sample(0, sampled_ns=now_ns - NS, worker="w-2")
    samples.append(msgspec.structs.replace(without, num_blocks=0, num_free_blocks=0))
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, range(61)), "full")
    found = await conditions(store)
    assert found["MillracePoison", "demo"]["is_over"] == 1
    assert found["MillraceStreamsStall", "demo"]["value"] == pytest.approx(0.5)
    cache = found["MillraceKvCacheFull", "w-1"]
    assert (cache["is_over"], cache["value"]) == (1, pytest.approx(0.98))
    assert cache["since_s"] == pytest.approx(now_ns / NS - 400, abs=12)
    assert ("MillraceKvCacheFull", "w-2") not in found
    assert None not in {row["is_over"] for row in found.values()}


async def test_refusals_by_time_and_by_what_is_looked_for(store: Store) -> None:
    now_ns = time.time_ns() - 2 * NS
    ids = tuple(f"chatcmpl-{n}" for n in range(8))
    refused = [
        msgspec.structs.replace(
            refusal_record(now_ns, 0, count=11, tenant="acme", limit="tokens_per_minute"),
            request_id=ids[0],
            request_ids=ids,
        ),
        refusal_record(now_ns - 1 * NS, 20, tenant="globex", limit="concurrent_requests"),
        refusal_record(now_ns - 120 * NS, 21, code="invalid_api_key", status=401),
    ]
    for token in ("once", "twice"):
        await store.insert(REFUSALS, REFUSALS.to_columns(refused, range(3)), token)
    steps = await ask(store, "refusals_over_time", step_s=60)
    by_reason = {(row["status"], row["reason"]): row["refused"] for row in steps}
    assert by_reason == {
        (429, "tokens_per_minute"): 11,
        (429, "concurrent_requests"): 1,
        (401, "invalid_api_key"): 1,
    }
    latest = await ask(store, "recent_refusals")
    assert [row["refused"] for row in latest] == [11, 1, 1]
    assert latest[0]["request_ids"] == list(ids)

    async def found_by(find: str) -> list[str]:
        return [row["code"] for row in await ask(store, "recent_refusals", find=find)]

    assert await found_by("chatcmpl-7") == ["tokens_per_minute"]
    assert await found_by("chatcmpl-2") == [
        "tokens_per_minute",
        "concurrent_requests",
        "invalid_api_key",
    ]
    assert await found_by("concurrent_requests") == ["concurrent_requests"]
    assert await found_by("5f0c2e9b71aa") == ["tokens_per_minute", "concurrent_requests"]
    assert await found_by("x' OR 1") == []
    (one,) = await ask(store, "refusal_details", id="chatcmpl-7")
    assert (one["tenant"], one["limit_reached"], one["status"]) == (
        "acme",
        "tokens_per_minute",
        429,
    )
    assert await ask(store, "refusal_details", id="chatcmpl-8") == []


async def test_a_loss_of_a_worker_is_one_row_that_says_what_is_known_best(store: Store) -> None:
    now_ns = time.time_ns()
    keeper, of_itself = LossObserver.PROCESS_KEEPER, LossObserver.WORKER
    signal, oom = LossCause.SIGNAL, LossCause.OUT_OF_MEMORY
    losses = [
        loss_record(LossCause.SILENT, now_ns - 10 * NS, worker="killed"),
        loss_record(signal, now_ns - 20 * NS, worker="killed", observer=keeper, detail="SIGKILL"),
        loss_record(LossCause.STOPPED, now_ns - 30 * NS, worker="stopped"),
        loss_record(oom, now_ns - 40 * NS, worker="stopped", observer=of_itself),
        loss_record(
            signal, now_ns - 50 * NS, worker="stopped", observer=of_itself, detail="SIGSEGV"
        ),
    ]
    for token in ("once", "twice"):
        await store.insert(WORKER_LOSSES, WORKER_LOSSES.to_columns(losses, range(5)), token)
    rows = await ask(store, "worker_losses")
    assert [(row["worker"], row["cause"], row["detail"], row["observers"]) for row in rows] == [
        ("killed", "signal", "SIGKILL", "process_keeper, scheduler"),
        ("stopped", "stopped", "", "scheduler"),
        ("stopped", "out_of_memory", "", "worker"),
        ("stopped", "signal", "SIGSEGV", "worker"),
    ]
    assert await ask(store, "worker_losses", model="other") == []
