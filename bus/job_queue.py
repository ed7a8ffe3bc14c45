"""Job queue interface: tenant queues, and jobs under a lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import msgspec

from millrace.bus.transport import Subscription
from millrace.schemas.jobs import DeadJob, Job, Tier

# Function that returns whether frames of a tenant's job must not go to a listener. Arguments:
# tenant, listener.
IsForeignReply = Callable[[str, str], Awaitable[bool]]


class TenantQueue(NamedTuple):
    """Tenant queue: the waiting jobs of one tenant, model and tier, in order of arrival.

    A job published without a tenant in its subject belongs to the keyless tenant. It waits in the
    queue with ``tenant`` None. ``reserved``: gateways published the jobs and keep their callers'
    limits. All other jobs count against their tenant's limits when they are pulled. The subject
    names the queue, so the server's permissions decide which client may publish to it.
    """

    model: str
    tier: Tier
    tenant: str | None
    reserved: bool = False

    @classmethod
    def of(cls, job: Job, *, reserved: bool = False) -> TenantQueue:
        """Return the tenant queue of a job that ``JobQueue.publish`` stored."""
        return cls(job.model, job.tier, job.tenant, reserved)

    @property
    def twin(self) -> TenantQueue:
        """Other tenant queue of the same tenant: reserved or not."""
        return self._replace(reserved=not self.reserved)


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job that this process holds, with its lease.

    The holder extends the lease well within AckWait, or passes the lease string to another process
    that does. ``num_deliveries`` is 1 for the first delivery. With ``uncertain`` the queue may have
    lost count: the job is older than this process's first pull from the tenant queue, or the first
    pull since the server was unreachable. ``stored_ns`` is when the queue stored it, UTC epoch.
    """

    job: Job
    lease: str
    num_deliveries: int
    stream_sequence: int
    tenant_queue: TenantQueue
    uncertain: bool = False
    stored_ns: int = 0


class PublishedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Result of publishing: the queue has stored the job. ``duplicate``: it had it already."""

    stream_sequence: int
    duplicate: bool


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Number of jobs of a tenant queue that wait, and that are leased."""

    num_queued: int
    num_leased: int


class JobQueue(Protocol):
    """Work queue ``JOBS`` and its leases."""

    async def publish(self, job: Job, *, reserved: bool = False) -> PublishedJob:
        """Store a job. Once this returns, the job will be answered.

        ``reserved``: the publisher has reserved the job's usage and settles it. Services must not
        set it. Raises PayloadTooLargeError, QueueFullError or BusUnavailableError: nothing was
        stored.
        """

    async def pull(
        self, tenant_queue: TenantQueue, max_jobs: int, timeout_s: float
    ) -> list[LeasedJob]:
        """Return up to ``max_jobs`` jobs of a tenant queue as soon as there is one.

        Returns an empty list after ``timeout_s``, which may be 0, and while the server is
        unreachable.

        A message that cannot be decoded, or a job that was delivered too often, is moved to the
        dead letters and never returned. Its owner, as far as it is known, gets a Failed frame. A
        job also gets its record.
        """

    async def watch(self, on_published: Callable[[TenantQueue], None]) -> Subscription:
        """Call ``on_published`` with the tenant queue of each stored job.

        Jobs stored during an outage are not announced: ``tenant_queues`` is authoritative.
        """

    def guard_replies(self, is_foreign: IsForeignReply) -> None:
        """Send no refusal to listeners that are another tenant's by ``is_foreign``."""

    async def recover_dropped(self) -> Subscription:
        """Store services' jobs again that the queue drops as their message id was used, until
        closed.

        They get a new id, so the caller of ``pull`` answers their publisher. A copy of a job that
        is still in the queue stays dropped. Jobs published while the server or this process is down
        are missed. Raises BusForbiddenError if this process may not hear jobs.
        """

    async def tenant_queues(self) -> dict[TenantQueue, int]:
        """Return the tenant queues with jobs, waiting or leased, and their number.

        The models may be unknown. Messages under subjects that name no tenant queue are moved to
        the dead letters, some at a time.
        """

    async def forget_tenant_queue(self, tenant_queue: TenantQueue) -> bool:
        """Free the server's state of a tenant queue without jobs; return False if it has jobs.

        Later jobs are found again.
        """

    async def depth(self, tenant_queue: TenantQueue) -> QueueDepth: ...

    async def is_open(self, stream_sequence: int) -> bool:
        """Return whether a job is still in the queue, waiting or leased; False once it was acked.

        Raises BusUnavailableError if that is unknown.
        """

    async def shed_newest(self, tenant_queue: TenantQueue, count: int) -> list[Job]:
        """Remove up to ``count`` of the newest waiting jobs from a tenant queue.

        Each job is returned to one caller only, who must answer it.
        """

    async def extend(self, lease: str) -> None:
        """Extend a lease by another AckWait. Any process with the lease may do so.

        Never raises if the server is unreachable: the job then stays until its lease lapses.
        """

    async def ack(self, lease: str) -> None:
        """Acknowledge an answered job, which leaves the queue. Returns once the server knows.

        May be called again. Raises BusUnavailableError if the server cannot be told.
        """

    async def release(self, lease: str, delay_s: float = 0.0) -> None:
        """Give the job back for redelivery after ``delay_s``.

        If the server is unreachable, the lease lapses by itself.
        """

    async def dead_letter(self, dead: DeadJob, lease: str) -> None:
        """Store a job among the dead letters, then remove it from the queue."""
