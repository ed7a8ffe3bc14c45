"""Who works: heartbeats over a transport, and a bucket that newcomers read first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from millrace.bus import codec, subjects
from millrace.bus.transport import Message, Subscription, Transport
from millrace.schemas.control import NameLease, PrefixReport, WorkerStatus
from millrace.schemas.errors import MalformedMessageError

logger = logging.getLogger(__name__)

# A worker that stopped its heartbeats leaves the bucket after this.
ENTRY_TTL_S = 5.0


class HeldName(NamedTuple):
    """A lease as it is in the bucket; ``revision`` changes when it is written."""

    lease: NameLease
    revision: int


class WorkerBucket(Protocol):
    """Last values by key, each forgotten ``ENTRY_TTL_S`` after it was put."""

    async def put(self, subject: str, payload: bytes) -> None: ...

    async def entries(self) -> Sequence[bytes]:
        """The workers'."""

    async def ages(self) -> Sequence[tuple[bytes, float]]:
        """The workers', each with how long ago it was put, in seconds by the bucket's own clock, or
        a little less. Raises BusUnavailableError."""

    async def put_after(self, subject: str, payload: bytes, after: int) -> int | None:
        """Put a value if the last one has the revision ``after``, 0 for none; its revision, or None
        if it was not put. Raises BusUnavailableError."""

    async def get(self, subject: str) -> tuple[bytes, int] | None:
        """A value and its revision. Raises BusUnavailableError."""


class WorkerDirectory:
    """The bucket ``workers`` for newcomers; heartbeats ``hb.<worker>`` and reports
    ``prefix.<worker>`` for those who watch."""

    def __init__(self, transport: Transport, bucket: WorkerBucket) -> None:
        self._transport = transport
        self._bucket = bucket

    async def announce(self, status: WorkerStatus) -> None:
        """Send a heartbeat; a status with ``retired`` removes the worker at once."""
        payload = codec.encode(status)
        await self._transport.publish(subjects.heartbeat(status.worker_id), payload)
        await self._bucket.put(subjects.worker_entry(status.worker_id), payload)

    async def watch(self, on_status: Callable[[WorkerStatus], None]) -> Subscription:
        """The known workers first, then every heartbeat. Silence is for the watcher to notice."""
        early: list[WorkerStatus] = []
        live = False

        def deliver(status: WorkerStatus) -> None:
            try:
                on_status(status)
            except Exception:
                logger.exception("a watcher failed", extra={"worker_id": status.worker_id})

        def on_message(message: Message) -> None:
            status = self._read(message.payload)
            if status is None:
                return
            if live:
                deliver(status)
            else:
                early.append(status)

        subscription = await self._transport.subscribe(subjects.ALL_HEARTBEATS, on_message)
        try:
            known = await self.known()
        except BaseException:
            await subscription.close()
            raise
        for status in (*known, *early):
            deliver(status)
        live = True
        return subscription

    async def known(self) -> list[WorkerStatus]:
        """The last status of each worker that has not retired; a dead one's until it expires."""
        statuses = map(self._read, await self._bucket.entries())
        # A retired worker's last status stays until it expires: unlike a deletion, it cannot
        # overtake the status before it.
        return [status for status in statuses if status is not None and not status.retired]

    def _read(self, payload: bytes) -> WorkerStatus | None:
        try:
            return codec.WORKER_STATUS.decode(payload)
        except MalformedMessageError:
            logger.warning("dropped a heartbeat that could not be read")
            return None

    async def silences_s(self) -> dict[str, float]:
        """For how long each worker in the bucket has not announced itself there, by the bucket's
        own clock, or a little less. Raises BusUnavailableError."""
        silences_s: dict[str, float] = {}
        for payload, age_s in await self._bucket.ages():
            status = self._read(payload)
            if status is not None:
                silences_s[status.worker_id] = max(age_s, 0.0)
        return silences_s

    async def hold_name(self, name: str, lease: NameLease, after: int) -> int | None:
        """Write who holds a worker's name, if its entry has the revision ``after`` (0: if it has
        none); its revision now, or None if it was another. It is forgotten after ``ENTRY_TTL_S``.

        Raises BusUnavailableError: nobody knows whether it was written.
        """
        return await self._bucket.put_after(subjects.worker_name(name), codec.encode(lease), after)

    async def name_holder(self, name: str) -> HeldName | None:
        """Who holds a worker's name, by the last word of it. Raises BusUnavailableError."""
        found = await self._bucket.get(subjects.worker_name(name))
        if found is None:
            return None
        payload, revision = found
        try:
            return HeldName(codec.NAME_LEASE.decode(payload), revision)
        except MalformedMessageError:
            logger.warning(
                "a worker's name has a lease that cannot be read", extra={"worker": name}
            )
            return HeldName(NameLease(holder=""), revision)

    async def take_role_turn(self, model: str) -> bool:
        """Whether the caller may change the roles of a model's workers now: of several who ask one
        may, and then nobody for ``ENTRY_TTL_S``. Raises BusUnavailableError."""
        return await self._bucket.put_after(subjects.role_turn(model), b"", 0) is not None

    async def report_prefixes(self, report: PrefixReport) -> None:
        """Tell the schedulers what a worker's prefix cache holds; at most once. Raises
        PayloadTooLargeError for a report that the server would not take."""
        subject = subjects.prefix_report(report.worker_id)
        await self._transport.publish(subject, codec.encode(report))

    async def watch_prefixes(self, on_report: Callable[[PrefixReport], None]) -> Subscription:
        def on_message(message: Message) -> None:
            try:
                report = codec.PREFIX_REPORT.decode(message.payload)
            except MalformedMessageError:
                logger.warning("dropped a report of prefixes that could not be read")
                return
            try:
                on_report(report)
            except Exception:
                logger.exception("a watcher failed", extra={"worker_id": report.worker_id})

        return await self._transport.subscribe(subjects.ALL_PREFIX_REPORTS, on_message)
