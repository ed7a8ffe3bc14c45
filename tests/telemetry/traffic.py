"""A quarter of an hour of traffic, with some of everything, and a month of a great deal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import Decimal

import msgspec

from millrace.runtime.clock import SystemClock
from millrace.schemas.engines import WorkerRole
from millrace.schemas.records import (
    Attempt,
    DeliveryRecord,
    RefusalRecord,
    RequestRecord,
    Status,
    WorkerSample,
)
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import DELIVERIES, REFUSALS, REQUESTS, WORKER_SAMPLES
from tests.telemetry.records import (
    delivery_record,
    refusal_record,
    request_record,
    worker_sample,
)

NUM_REQUESTS = 2_400
MOVED_ID = "req-moved"
_US_PER_TOKEN = 2_000
_DELIVERED_NS = 2_000_000
_HOURLY = Decimal("2.40")


def traffic() -> tuple[list[RequestRecord], list[DeliveryRecord], list[WorkerSample]]:
    """Make requests of the last minutes with two peaks, their deliveries, and worker samples."""
    now_ns = time.time_ns()
    records = []
    for number in range(NUM_REQUESTS):
        age_s = 1 + (number * 0.37 + 60 * ((number * 7919) % 13)) % 480
        records.append(_request(number, now_ns - int(age_s * 1e9)))
    records.append(moved_request(now_ns - 60 * 10**9))
    deliveries = [
        msgspec.structs.replace(
            delivery_record(number, done_ns=record.done_ns + _DELIVERED_NS),
            request_id=record.request_id,
            tenant=record.tenant,
            model=record.model_served,
            first_byte_ms=record.ttft_ms + 1.5 if record.first_token_ns else 0.0,
            intake_ms=0.25,
            total_ms=record.total_ms + _DELIVERED_NS / 1e6,
            num_resumes=int(number % 97 == 0),
            num_stalls=int(number % 71 == 0),
            stalled_ms=1_400.0 if number % 71 == 0 else 0.0,
        )
        for number, record in enumerate(records)
    ]
    samples = [
        msgspec.structs.replace(
            sample,
            busy_us=int(sample.busy_share * 1e6),
            charged_us=int(sample.busy_share * 1e6),
            device_name="Test Device",
            device_share=sample.busy_share,
            device_memory_bytes=60 << 30,
            device_memory_total_bytes=80 << 30,
            device_per_hour=_HOURLY,
            role=WorkerRole.PREFILL if worker == "worker-1" else WorkerRole.DECODE,
            pulled_tokens=32 if worker == "worker-2" else 0,
            served_tokens=32 if worker == "worker-1" else 0,
        )
        for number in range(900)
        for worker in ("worker-1", "worker-2")
        for sample in [worker_sample(number, sampled_ns=now_ns - number * 10**9, worker=worker)]
    ]
    return records, deliveries, samples


def _request(number: int, done_ns: int) -> RequestRecord:
    record = request_record(number, done_ns=done_ns)
    device_us = record.completion_tokens * _US_PER_TOKEN
    record = msgspec.structs.replace(
        record,
        dispatched_ns=record.started_ns - 2_000_000,
        device_us=device_us,
        device_cost=(_HOURLY * device_us / Decimal(3_600_000_000)).quantize(Decimal("1e-12")),
    )
    if number % 61 == 0:
        return msgspec.structs.replace(
            record, status=Status.FAILED, error_code="engine_error", finish_reason=""
        )
    if number % 37 == 0:
        return msgspec.structs.replace(record, status=Status.CANCELLED, finish_reason="")
    if number % 83 == 0:
        return msgspec.structs.replace(
            record,
            status=Status.SHED,
            error_code="queue_full",
            finish_reason="",
            started_ns=0,
            first_token_ns=0,
            dispatched_ns=0,
            completion_tokens=0,
            worker_id="",
        )
    return record


def moved_request(done_ns: int) -> RequestRecord:
    """A request of 4 s whose first worker was killed after it had made half of the answer."""
    received_ns = done_ns - 4_000_000_000
    life = Attempt(
        epoch=65,
        worker_id="worker-1",
        started_ns=received_ns + 100_000_000,
        ended_ns=received_ns + 2_100_000_000,
        device_us=0,
    )
    return msgspec.structs.replace(
        _request(NUM_REQUESTS + 1, done_ns),
        request_id=MOVED_ID,
        tenant="acme",
        model_served="demo-large",
        worker_id="worker-2",
        status=Status.DONE,
        error_code="",
        finish_reason="stop",
        received_ns=received_ns,
        dispatched_ns=received_ns + 2_200_000_000,
        started_ns=received_ns + 2_250_000_000,
        first_token_ns=received_ns + 2_400_000_000,
        queue_ms=2_250.0,
        ttft_ms=2_400.0,
        total_ms=4_000.0,
        epoch=66,
        attempts=(life,),
        pulled_tokens=1_984,
        kv_source="worker-3-5f0c2e9b",
        device_us=840_000,
        num_devices=4,
        trace_id="0af7651916cd43dd8448eb211c80319c",
    )


def refusals() -> list[RefusalRecord]:
    """Make refusals of the traffic: a tenant at its limit, and requests with a wrong key."""
    now_ns = time.time_ns()
    limited = [
        refusal_record(
            now_ns - number * 9 * 10**9, 0, count=1, tenant="acme", limit="requests_per_minute"
        )
        for number in range(1, 40)
    ]
    unknown = [
        refusal_record(now_ns - number * 60 * 10**9, 1, code="invalid_api_key", status=401)
        for number in range(1, 8)
    ]
    return limited + unknown


async def fill(store: Store, refused: Sequence[RefusalRecord] | None = None) -> list[RequestRecord]:
    """Store it; the requests that there are now."""
    records, deliveries, samples = traffic()
    refused = refusals() if refused is None else refused
    columns = REFUSALS.to_columns(refused, range(len(refused)))
    await store.insert(REFUSALS, columns, "page")
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(len(records))), "page")
    columns = DELIVERIES.to_columns(deliveries, range(len(deliveries)))
    await store.insert(DELIVERIES, columns, "page")
    columns = WORKER_SAMPLES.to_columns(samples, range(len(samples)))
    await store.insert(WORKER_SAMPLES, columns, "page")
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()
    return records


async def fill_euros(store: Store) -> None:
    """Six requests of a model that is priced in EUR, at 1 EUR each, and its worker. One fails,
    which is more than the error budget of the model."""
    now_ns = time.time_ns()
    records = [
        msgspec.structs.replace(
            _request(number, now_ns - number * 10**9),
            request_id=f"req-euro-{number}",
            model_served="demo-eu",
            status=Status.DONE if number < 6 else Status.FAILED,
            error_code="" if number < 6 else "engine_error",
            finish_reason="stop" if number < 6 else "",
            cost=Decimal(1),
            device_cost=Decimal("0.25"),
            currency="EUR",
            price_version="2026-01-eu",
        )
        for number in range(1, 7)
    ]
    samples = [
        msgspec.structs.replace(
            worker_sample(number, sampled_ns=now_ns - number * 10**9, worker="worker-eu"),
            model="demo-eu",
            device_per_hour=_HOURLY,
            currency="EUR",
        )
        for number in range(60)
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(10_000, 10_006)), "euros")
    columns = WORKER_SAMPLES.to_columns(samples, range(10_000, 10_060))
    await store.insert(WORKER_SAMPLES, columns, "euros")
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()


async def fill_month(store: Store, rows: int) -> None:
    """Requests of the last 30 days, made by the engine itself."""
    await store.command(_MONTH, {"rows": rows})


_MONTH = """
INSERT INTO requests
(
    request_id, tenant, user, source, tier, model_requested, model_served, worker, prompt_tokens,
    cached_tokens, completion_tokens, queue_ms, ttft_ms, tpot_us, total_ms, finish_reason, status,
    cost, device_us, device_cost, currency, price_version, received_at, dispatched_at, started_at,
    first_token_at, done_at, epoch, record_version, outbox_sequence
)
WITH
    sipHash64(number, 1) AS a,
    sipHash64(number, 2) AS b,
    20 + a % 300 AS ttft,
    1 + b % 400 AS tokens,
    4000 + a % 9000 AS tpot,
    ttft + tokens * tpot / 1000 AS total,
    toInt64(sipHash64(number, 3) % 2591000000000) AS age_us,
    now64(6) - toIntervalMicrosecond(1000000 + age_us) AS done,
    done - toIntervalMicrosecond(toInt64(total * 1000)) AS received,
    received + toIntervalMicrosecond(toInt64(ttft * 300)) AS started
SELECT
    'req-' || leftPad(toString(number), 24, '0'),
    'tenant-' || toString(a % 50),
    'user-' || toString(b % 2000),
    ['http', 'ws', 'nats'][1 + a % 3],
    ['free', 'pro'][1 + b % 2],
    'model-' || toString(a % 5),
    'model-' || toString(a % 5),
    'worker-' || toString(b % 8),
    b % 2000,
    b % 2000 / 3,
    tokens,
    ttft / 3,
    ttft,
    tpot,
    total,
    'stop',
    if(a % 50 = 0, ['failed', 'cancelled', 'shed'][1 + b % 3], 'done'),
    toDecimal128(tokens * 6, 12) / 10000000,
    tokens * 2000,
    toDecimal128(tokens * 3, 12) / 10000000,
    'USD',
    '2026-11',
    received,
    started,
    started,
    received + toIntervalMicrosecond(toInt64(ttft * 1000)),
    done,
    65,
    2,
    number
FROM numbers({rows:UInt64})
"""
