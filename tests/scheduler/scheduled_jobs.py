"""Jobs as a scheduler holds them, for tests of their order."""

from __future__ import annotations

import itertools

from millrace.bus.job_queue import TenantQueue
from millrace.bus.running_requests import JobClaim
from millrace.scheduler.jobs.scheduled_job import (
    ExpectedService,
    JobPhase,
    JobTiming,
    Lease,
    ScheduledJob,
    TenantQueueCounts,
)
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.sampling import SamplingParams

_numbers = itertools.count(1)


def scheduled_job(
    tenant: str = "t",
    tier: Tier = Tier.FREE,
    tokens: float = 10.0,
    *,
    deadline_ns: int | None = None,
    priority: int = 0,
    interrupted: bool = False,
    pulled_s: float = 0.0,
) -> ScheduledJob:
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
        priority=priority,
    )
    return ScheduledJob(
        job=job,
        lease=Lease(f"lease-{number}", 1, number, TenantQueue("m", tier, tenant)),
        queue_counts=TenantQueueCounts(),
        timing=JobTiming(pulled_s=pulled_s),
        claim=JobClaim.of(job, number),
        ran_before=interrupted,
        interrupted=interrupted,
        phase=JobPhase.WAITING,
        service=ExpectedService(tokens, tokens),
    )
