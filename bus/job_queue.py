"""The work queue as the other packages see it: tenant queues, and jobs under a lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import msgspec

from millrace.bus.transport import Subscription
from millrace.schemas.jobs import DeadJob, Job, Tier

# Whether frames of a tenant's job (the first argument) must not go to a listener (the second).
IsForeignReply = Callable[[str, str], Awaitable[bool]]


class TenantQueue(NamedTuple):
    """Where the jobs of one tenant for one model in one tier wait, in order of arrival.

    A job that was published without a tenant in its subject is the keyless tenant's, and waits in
    the tenant queue of ``tenant`` None. ``reserved``: gateways published them, which keep their
    callers' limits; all others count against their tenant's when they are pulled. Who may say so is
    up to the permissions of the server: the tenant queue is the subject.
    """

    model: str
    tier: Tier
    tenant: str | None
    reserved: bool = False

    @classmethod
    def of(cls, job: Job, *, reserved: bool = False) -> TenantQueue:
        """Where a job waits that ``JobQueue.publish`` stored."""
        return cls(job.model, job.tier, job.tenant, reserved)

    @property
    def twin(self) -> TenantQueue:
        """The other tenant queue of the same tenant."""
        return self._replace(reserved=not self.reserved)


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that this process now holds, and the lease to keep it by.

    The holder extends the lease well within AckWait, or hands the lease string to another process
    which does. ``num_deliveries`` is 1 for a job that nobody held before, unless ``uncertain``:
    then the queue may have lost count. That is so for jobs that are older than this process's
    first pull from their tenant queue, or the first since the server was unreachable. ``stored_ns``
    is when the queue got it, UTC epoch.
    """

    job: Job
    lease: str
    num_deliveries: int
    stream_sequence: int
    tenant_queue: TenantQueue
    uncertain: bool = False
    stored_ns: int = 0


class PublishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The queue has stored the job; ``duplicate``: it had it already, nothing was added."""

    stream_sequence: int
    duplicate: bool


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a tenant queue that wait in the stream, and jobs that somebody holds."""

    num_queued: int
    num_leased: int


class JobQueue(Protocol):
    """The work queue ``JOBS`` and its leases."""

    async def publish(self, job: Job, *, reserved: bool = False) -> PublishedJob:
        """Store a job; once this returns the job will be answered. ``reserved``: what it may use
        was set aside, and its publisher settles that; a service may not publish so.

        Raises PayloadTooLargeError, QueueFullError or BusUnavailableError: nothing was stored.
        """

    async def pull(
        self, tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        """Up to ``max_jobs`` jobs of a tenant queue, as soon as there is one; an empty list after
        ``timeout_s``, which may be 0.

        A message that cannot be decoded, and a job that was delivered too often, is moved to the
        dead letters and never returned; its owner, as far as it can be told, gets a Failed frame,
        and a job its record. An empty list is also what a server that is unreachable gives.
        """

    async def watch(self, on_published: Callable[[TenantQueue], None]) -> Subscription:
        """Tell the tenant queue of each job that is stored. Those of an outage are not told:
        ``tenant_queues`` is what counts."""

    def guard_replies(self, is_foreign: IsForeignReply) -> None:
        """From now on send no refusal to a listener that is another tenant's by ``is_foreign``."""

    async def recover_dropped(self) -> Subscription:
        """Until it is closed, store a service's job anew that the queue drops because its message
        id was used: under an id of its own, so that its publisher is answered by ``pull``'s caller.

        A copy of a job that is still in the queue is left dropped. Jobs that are published while
        the server or this process is away are not heard. Raises BusForbiddenError if this process
        may not hear jobs.
        """

    async def tenant_queues(self) -> dict[TenantQueue, int]:
        """The tenant queues with jobs, waiting or held, and how many; the models may be unknown.

        Messages under subjects that name no tenant queue are moved to the dead letters, some at a
        time.
        """

    async def forget_tenant_queue(self, tenant_queue: TenantQueue) -> bool:
        """Free what the server keeps for a tenant queue that has no job, waiting or held; False if
        it has one. Jobs that come later are found again."""

    async def depth(self, tenant_queue: TenantQueue) -> QueueDepth: ...

    async def is_open(self, stream_sequence: int) -> bool:
        """Whether the job is still in the queue, waiting or held; False once it was acked.

        Raises BusUnavailableError when nobody can say.
        """

    async def shed_newest(self, tenant_queue: TenantQueue, count: int) -> list[Job]:
        """Take up to ``count`` of the newest waiting jobs out of a tenant queue; each job is handed
        to one caller only, who must answer it."""

    async def extend(self, lease: str) -> None:
        """Hold the job for another AckWait. Any process may, by the lease alone.

        Never raises for a server that is unreachable: the job then lasts until its lease ends.
        """

    async def ack(self, lease: str) -> None:
        """The job is answered; it leaves the queue for good. Returns when the server knows.

        May be called again. Raises BusUnavailableError if the server cannot be told.
        """

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        """Give the job back, to be delivered again after ``delay_s``; if the server is unreachable,
        its lease ends by itself."""

    async def dead_letter(self, dead: DeadJob, lease: str) -> None:
        """Store a job among the dead letters, then take it out of the queue."""
