"""Jobs as a scheduler holds them, for tests of what orders them."""

from __future__ import annotations

import itertools

from bus.api import Line
from scheduler.jobs.entry import Entry, State
from scheduler.jobs.tenant_queues import TenantQueueCounts
from schemas.jobs import Job, Tier
from schemas.sampling import SamplingParams

_numbers = itertools.count(1)


def entry(
    tenant: str = "t",
    tier: Tier = Tier.FREE,
    tokens: float = 10.0,
    *,
    deadline_ns: int | None = None,
    interrupted: bool = False,
    pulled_s: float = 0.0,
) -> Entry:
    """A job that waits; ``tokens`` is the service that is expected of it."""
    number = next(_numbers)
    job = Job(
        request_id=f"r{number}",
        model="m",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=16, seed=7),
        tenant=tenant,
        tier=tier,
        deadline_ns=deadline_ns,
    )
    return Entry(
        job=job,
        lease=f"lease-{number}",
        num_deliveries=1,
        stream_sequence=number,
        line=Line("m", tier, tenant),
        queue_counts=TenantQueueCounts(),
        pulled_s=pulled_s,
        state=State.WAITING,
        ran_before=interrupted,
        interrupted=interrupted,
        expected_tokens=tokens,
        expected_output_tokens=tokens,
    )
