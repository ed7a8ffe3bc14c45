"""Who runs which request, as an index says that outlives every scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.scheduler.jobs.scheduled_job import ScheduledJob


class RunningRequests(Protocol):
    """The index as a scheduler uses it; ``bus.running_requests`` has the one in Redis."""

    async def lookup(self, request_id: str) -> RunningRequest | None:
        """None: nothing is known, or nobody can say."""

    async def has_ended(self, tenant: str, request_id: str) -> bool | None:
        """Whether a tenant's request, whose job a service published, has ended. None: the tenant
        has no such request, or Redis is unreachable."""

    async def claim(
        self, request_id: str, mine: JobClaim, *, is_new: bool, void_sequence: int = 0
    ) -> JobClaim | None:
        """Take a request id for a message; the claim of the message that has it, if that is
        another. None also while the index cannot be reached."""

    async def note_cancels(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Services of the tenant cancelled these requests."""

    async def was_cancelled(self, tenant: str, request_id: str) -> bool:
        """Whether a service of the tenant cancelled a request; False while Redis is
        unreachable."""

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        """It is answered, by a worker or by none."""

    async def held_by(self, worker_id: str) -> dict[str, str]:
        """The leases of what a worker runs, by request id, as far as anybody can say. Of some
        another may be the holder by now."""

    async def settle_model(self, request_id: str, model: str, reason: str) -> tuple[str, str]:
        """The model that was first chosen for a request, and why: this one, if none was or nobody
        can say."""

    async def settle_adapter(self, request_id: str, version: str) -> str:
        """The version of its adapter that a request was first given: this one, if none was or
        nobody can say."""


async def last_worker(index: RunningRequests, scheduled: ScheduledJob) -> str | None:
    """The worker that ran a job last as far as the index knows, "" for nobody; None: it is answered
    already. The next epoch will be above the known one."""
    known = await index.lookup(scheduled.request_id)
    if known is None:
        return ""
    attempts = scheduled.attempts
    attempts.epoch_floor = max(attempts.epoch_floor, known.epoch)
    if known.finished:
        return None
    attempts.add_found(known.epoch, known.worker_id)
    return known.worker_id
