"""Records as the system makes them."""

from __future__ import annotations

import random
import time
from datetime import datetime
from decimal import Decimal

from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import (
    DeliveryRecord,
    LossCause,
    LossObserver,
    RefusalRecord,
    RequestRecord,
    Status,
    WorkerLossRecord,
    WorkerSample,
)

# Rows older than a table keeps them would vanish, so records are of today.
NOW_NS = time.time_ns()


def request_record(number: int, *, done_ns: int = NOW_NS, seed: int = 0) -> RequestRecord:
    """A finished request that looks like a real one; the same number, the same record."""
    draw = random.Random(f"{seed}:{number}")
    completion_tokens = draw.randint(2, 400)
    ttft_ms = draw.lognormvariate(4.0, 0.5)
    tpot_us = draw.lognormvariate(8.5, 0.3)
    total_ms = ttft_ms + tpot_us * (completion_tokens - 1) / 1000
    received_ns = done_ns - int(total_ms * 1e6)
    prompt_tokens = draw.randint(5, 900)
    return RequestRecord(
        request_id=f"req-{seed}-{number:08d}",
        tenant=draw.choice(("acme", "globex", "initech")),
        user=f"user-{draw.randint(1, 20)}",
        session_id=f"session-{draw.randint(1, 60)}",
        source=draw.choice(list(Source)),
        tier=draw.choice(list(Tier)),
        model_requested="demo",
        model_served=draw.choice(("demo", "demo", "demo-large")),
        adapter="sql" if number % 4 == 0 else "",
        worker_id=f"worker-{draw.randint(1, 2)}",
        prompt_tokens=prompt_tokens,
        cached_tokens=draw.choice((0, prompt_tokens // 2)),
        completion_tokens=completion_tokens,
        proposed_tokens=completion_tokens // 2,
        accepted_tokens=completion_tokens // 4,
        queue_ms=ttft_ms / 3,
        ttft_ms=ttft_ms,
        tpot_us=tpot_us,
        total_ms=total_ms,
        finish_reason=draw.choice(("stop", "length")),
        status=Status.DONE,
        cost=Decimal(prompt_tokens) * Decimal("0.00000015")
        + Decimal(completion_tokens) * Decimal("0.0000006"),
        price_version="2026-01",
        received_ns=received_ns,
        started_ns=received_ns + int(ttft_ms / 3 * 1e6),
        first_token_ns=received_ns + int(ttft_ms * 1e6),
        done_ns=done_ns,
        epoch=1,
    )


def delivery_record(number: int, *, done_ns: int = NOW_NS, seed: int = 0) -> DeliveryRecord:
    return DeliveryRecord(
        request_id=f"req-{seed}-{number:08d}",
        gateway_id="gateway-1",
        tenant="acme",
        source=Source.HTTP,
        first_byte_ms=12.5,
        total_ms=800.0,
        tokens_delivered=64,
        num_epochs=1,
        outcome="done",
        done_ns=done_ns,
    )


def worker_sample(number: int, *, sampled_ns: int = NOW_NS, worker: str = "w-1") -> WorkerSample:
    draw = random.Random(f"{worker}:{number}")
    return WorkerSample(
        worker_id=worker,
        name=worker,
        model="demo",
        sampled_ns=sampled_ns,
        period_ms=1000.0,
        num_running=draw.randint(4, 24),
        num_waiting=draw.randint(0, 4),
        num_blocks=1024,
        num_free_blocks=draw.randint(200, 900),
        num_steps=draw.randint(30, 60),
        step_ms_mean=draw.uniform(8.0, 22.0),
        busy_share=draw.uniform(0.5, 0.95),
        prefill_tokens=draw.randint(0, 900),
        decode_tokens=draw.randint(200, 1200),
        queue_depth=draw.randint(0, 12),
    )


def refusal_record(
    recorded_ns: int = NOW_NS,
    number: int = 0,
    *,
    count: int = 1,
    tenant: str = "",
    status: int = 0,
    code: str = "",
    limit: str = "",
) -> RefusalRecord:
    """A kind of refusal of one second; a limit's has its name as the code."""
    return RefusalRecord(
        gateway_id="gateway-1",
        number=number,
        recorded_ns=recorded_ns,
        tenant=tenant,
        key_id="5f0c2e9b71aa" if tenant else "",
        door="/v1/chat/completions",
        status=status or (429 if limit else 400),
        code=code or limit,
        limit=limit,
        count=count,
        first_ns=recorded_ns - 500_000_000,
        last_ns=recorded_ns - 1_000_000,
        request_id=f"chatcmpl-{number}",
        request_ids=(f"chatcmpl-{number}",),
    )


def unix_s(time: str) -> float:
    """Convert a time of an answer, in UTC with a Z, to Unix seconds."""
    assert time.endswith("Z")
    return datetime.fromisoformat(time).timestamp()


def loss_record(
    cause: LossCause,
    lost_ns: int = NOW_NS,
    *,
    worker: str = "w-1",
    observer: LossObserver = LossObserver.SCHEDULER,
    detail: str = "",
) -> WorkerLossRecord:
    return WorkerLossRecord(
        worker_id=worker,
        name=worker,
        model="demo",
        lost_ns=lost_ns,
        cause=cause,
        observer=observer,
        detail=detail,
        num_requests=3,
    )
