"""Two tenants, two models, two days: few rows, with figures that can be added up by hand."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

from millrace.registry.catalogue import Catalogue, ModelEntry
from millrace.registry.pricing import PriceBook, cost, device_cost
from millrace.runtime.clock import SystemClock
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import Attempt, DeliveryRecord, RequestRecord, Status, WorkerSample
from millrace.telemetry.rollups.prices import record_prices
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import DELIVERIES, REQUESTS, WORKER_SAMPLES, Table

DAY_S = 86_400
# The day before yesterday, from its first second on: no sample is too old for its table.
FIRST_S = (int(time.time()) // DAY_S - 2) * DAY_S
RANGE = {"from_s": FIRST_S, "to_s": FIRST_S + 2 * DAY_S}

SMALL = PriceBook(
    version="2026-11",
    input_per_million=Decimal(1),
    cached_input_per_million=Decimal("0.5"),
    output_per_million=Decimal(2),
    device_per_hour=Decimal("3.6"),
)
LARGE = PriceBook(
    version="2026-11",
    input_per_million=Decimal(10),
    cached_input_per_million=Decimal(5),
    output_per_million=Decimal(20),
    device_per_hour=Decimal(36),
)
PRICES = {"small": SMALL, "large": LARGE}
CATALOGUE = Catalogue(
    {
        name: ModelEntry(name=name, source=f"/models/{name}", prices=prices)
        for name, prices in PRICES.items()
    }
)


def served(
    request_id: str, who: str, model: str, after_s: int, tokens: tuple[int, int, int], **given: Any
) -> RequestRecord:
    """A request that a worker had and that ended ``after_s`` into the days; ``tokens`` are prompt,
    cached and completion tokens."""
    tenant, user = who.split("/")
    prices = PRICES[model]
    device_us = given.pop("device_us")
    done_ns = (FIRST_S + after_s) * 10**9
    received_ns = done_ns - int(given.get("total_ms", 0) * 10**6)
    return RequestRecord(
        request_id=request_id,
        tenant=tenant,
        user=user,
        source=Source.HTTP,
        tier=Tier.FREE,
        model_requested=model,
        model_served=model,
        worker_id="w-1",
        prompt_tokens=tokens[0],
        cached_tokens=tokens[1],
        completion_tokens=tokens[2],
        cost=cost(prices, *tokens),
        price_version=prices.version,
        device_us=device_us,
        device_cost=device_cost(prices, device_us),
        received_ns=received_ns,
        started_ns=received_ns + int(given.get("queue_ms", 0) * 10**6),
        first_token_ns=received_ns + int(given.get("ttft_ms", 0) * 10**6) if tokens[2] else 0,
        done_ns=done_ns,
        **{"epoch": 1, **given},
    )


def shed(request_id: str, who: str, model: str, after_s: int, prompt_tokens: int) -> RequestRecord:
    """A request that no worker had."""
    tenant, user = who.split("/")
    done_ns = (FIRST_S + after_s) * 10**9
    return RequestRecord(
        request_id=request_id,
        tenant=tenant,
        user=user,
        source=Source.HTTP,
        tier=Tier.FREE,
        model_requested=model,
        model_served=model,
        prompt_tokens=prompt_tokens,
        total_ms=3.0,
        status=Status.SHED,
        received_ns=done_ns - 3 * 10**6,
        done_ns=done_ns,
    )


REQUEST_ROWS = [
    served(
        "r1",
        "acme/ann",
        "small",
        10,
        (1000, 200, 100),
        device_us=2_000_000,
        energy_j=40.0,
        key_id="key-a",
        metadata={"project": "mill"},
        queue_ms=20,
        ttft_ms=100,
        tpot_us=10_000,
        total_ms=1090,
    ),
    served(
        "r2",
        "acme/bob",
        "small",
        70,
        (500, 0, 50),
        device_us=1_000_000,
        energy_j=26.0,
        key_id="key-b",
        queue_ms=40,
        ttft_ms=300,
        tpot_us=20_000,
        total_ms=1280,
        adapter="law",
    ),
    served(
        "r3",
        "globex/eve",
        "large",
        DAY_S + 5,
        (100, 0, 10),
        device_us=500_000,
        queue_ms=10,
        ttft_ms=50,
        tpot_us=30_000,
        total_ms=320,
    ),
    served(
        "r4",
        "acme/ann",
        "small",
        80,
        (100, 0, 0),
        device_us=100_000,
        queue_ms=5,
        total_ms=500,
        num_preemptions=1,
        epoch=2,
        status=Status.FAILED,
        error_code="worker_lost",
        attempts=(Attempt(epoch=1, worker_id="w-9", started_ns=1, ended_ns=2),),
        pulled_tokens=96,
        kv_source="w-9",
    ),
    shed("r5", "globex/eve", "large", 90, 40),
    served(
        "r6",
        "acme/ann",
        "small",
        100,
        (300, 0, 10),
        device_us=200_000,
        queue_ms=1900,
        ttft_ms=2000,
        tpot_us=10_000,
        total_ms=2090,
        status=Status.CANCELLED,
    ),
]


def _delivery(record: RequestRecord, **seen: Any) -> DeliveryRecord:
    return DeliveryRecord(
        request_id=record.request_id,
        gateway_id="gw-1",
        tenant=record.tenant,
        source=record.source,
        model=record.model_served,
        total_ms=record.total_ms,
        tokens_delivered=record.completion_tokens,
        outcome="done",
        done_ns=record.done_ns,
        **{"num_epochs": 1, **seen},
    )


DELIVERY_ROWS = [
    _delivery(
        REQUEST_ROWS[0],
        first_byte_ms=101.0,
        num_replays=1,
        num_resumes=1,
        num_epochs=2,
        num_stalls=2,
        stalled_ms=2500.0,
        longest_gap_ms=1500.0,
    ),
    _delivery(REQUEST_ROWS[1], first_byte_ms=301.0, longest_gap_ms=40.0),
]


def _sample(worker: str, model: str, after_s: int, period_ms: float, **given: Any) -> WorkerSample:
    return WorkerSample(
        worker_id=worker,
        name=worker,
        model=model,
        sampled_ns=(FIRST_S + after_s) * 10**9,
        period_ms=period_ms,
        busy_share=given["busy_us"] / period_ms / 1000,
        device_per_hour=PRICES[model].device_per_hour,
        **given,
    )


SAMPLE_ROWS = [
    _sample(
        "w-1",
        "small",
        2,
        2000.0,
        busy_us=1_000_000,
        charged_us=1_000_000,
        energy_j=130.0,
        charged_j=40.0,
        prefill_tokens=1200,
        decode_tokens=100,
        num_running=4,
        num_waiting=2,
        num_blocks=100,
        num_free_blocks=60,
        queue_depth=3,
        num_steps=10,
        step_ms_mean=100.0,
        prefix_query_tokens=1000,
        prefix_hit_tokens=200,
        device_share=0.5,
        device_memory_bytes=10,
        device_memory_total_bytes=20,
    ),
    _sample(
        "w-1",
        "small",
        62,
        2000.0,
        busy_us=1_000_000,
        charged_us=900_000,
        prefill_tokens=510,
        decode_tokens=50,
        num_running=2,
        num_waiting=0,
        num_blocks=100,
        num_free_blocks=80,
        queue_depth=1,
        num_steps=5,
        step_ms_mean=200.0,
        num_preemptions=1,
    ),
    _sample(
        "w-2",
        "large",
        5,
        1000.0,
        busy_us=100_000,
        charged_us=100_000,
        prefill_tokens=100,
        decode_tokens=10,
        num_running=1,
        num_blocks=50,
        num_free_blocks=50,
    ),
]


async def fill(store: Store, times: int = 1) -> None:
    """Insert every row so many times, as a sink that was killed does, and compute the minutes."""
    await record_prices(store, CATALOGUE, SystemClock())
    tables: list[tuple[Table[Any], list[Any]]] = [
        (REQUESTS, REQUEST_ROWS),
        (DELIVERIES, DELIVERY_ROWS),
        (WORKER_SAMPLES, SAMPLE_ROWS),
    ]
    for number in range(times):
        for table, rows in tables:
            columns = table.to_columns(rows, range(1, len(rows) + 1))
            await store.insert(table, columns, f"{table.name}:{number}")
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()
