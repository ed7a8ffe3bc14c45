"""Index of running requests, which outlives every scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.scheduler.jobs.scheduled_job import ScheduledJob


class RunningRequests(Protocol):
    """Index of running requests as a scheduler uses it.

    Implementation: ``bus.running_requests``.
    """

    async def lookup(self, request_id: str) -> RunningRequest | None:
        """Return the entry of a request; None if it is unknown or Redis is unreachable."""

    async def has_ended(self, tenant: str, request_id: str) -> bool | None:
        """Return whether a tenant's published request has ended.

        None: the tenant has no such request, or Redis is unreachable.
        """

    async def claim(
        self, request_id: str, mine: JobClaim, *, is_new: bool, void_sequence: int = 0
    ) -> JobClaim | None:
        """Claim a request id for a message; return another message's claim if it has the id.

        None also while the index is unreachable.
        """

    async def note_cancels(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Store cancels by the tenant's services."""

    async def was_cancelled(self, tenant: str, request_id: str) -> bool:
        """Return whether a tenant's service cancelled a request; False while Redis is
        unreachable."""

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        """Mark a request as answered; ``worker_id`` may be empty."""

    async def held_by(self, worker_id: str) -> dict[str, str]:
        """Return the known leases of a worker's requests, by request id.

        Some may have moved since.
        """

    async def settle_model(self, request_id: str, model: str, reason: str) -> tuple[str, str]:
        """Return the model first chosen for a request, and why.

        That is the given one if none was chosen or Redis is unreachable.
        """

    async def settle_adapter(self, request_id: str, version: str) -> str:
        """Return the adapter version first chosen for a request.

        That is the given one if none was chosen or Redis is unreachable.
        """


async def last_worker(index: RunningRequests, scheduled: ScheduledJob) -> str | None:
    """Return the worker that last ran a job, "" if unknown, None if the job is answered.

    Raises the epoch floor, so the next epoch is above the known one.
    """
    known = await index.lookup(scheduled.request_id)
    if known is None:
        return ""
    attempts = scheduled.attempts
    attempts.epoch_floor = max(attempts.epoch_floor, known.epoch)
    if known.finished:
        return None
    attempts.add_found(known.epoch, known.worker_id)
    return known.worker_id
