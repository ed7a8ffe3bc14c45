"""What analytics is made of. No prompt or completion text is in any of these."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum

import msgspec

from schemas.jobs import Source, Tier

RECORD_VERSION = 1


class Status(StrEnum):
    """How a request ended, one for each terminal frame."""

    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SHED = "shed"
    FAILED = "failed"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One finished request. Times are UTC epoch in ns, 0 where the request did not get so far.

    ``queue_ms`` is from receipt to the worker's start, ``ttft_ms`` from receipt to the first
    token, ``tpot_us`` the mean time per token after the first, ``cost`` in ``currency`` by the
    price book's ``price_version``.
    """

    request_id: str
    tenant: str
    user: str = ""
    session_id: str = ""
    source: Source = Source.NATS
    tier: Tier = Tier.FREE
    model_requested: str = ""
    model_served: str = ""
    route_reason: str = ""
    worker_id: str = ""
    adapter: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_us: float = 0.0
    total_ms: float = 0.0
    finish_reason: str = ""
    status: Status = Status.DONE
    error_code: str = ""
    cost: Decimal = Decimal(0)
    currency: str = "USD"
    price_version: str = ""
    received_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    done_ns: int = 0
    epoch: int = 0
    num_preemptions: int = 0
    version: int = RECORD_VERSION


class DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True, tag="delivery"):
    """What the client really saw of a request, as the gateway that held the stream measured it."""

    request_id: str
    gateway_id: str
    tenant: str
    source: Source
    first_byte_ms: float = 0.0
    total_ms: float = 0.0
    tokens_delivered: int = 0
    num_replays: int = 0
    num_epochs: int = 0
    outcome: str = ""
    done_ns: int = 0
    version: int = RECORD_VERSION


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """A worker's state over one sampling period that ended at ``sampled_ns``."""

    worker_id: str
    name: str
    model: str
    sampled_ns: int
    period_ms: float
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    step_ms_mean: float = 0.0
    busy_share: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    queue_depth: int = 0
    version: int = RECORD_VERSION


Record = RequestRecord | DeliveryRecord | WorkerSample
