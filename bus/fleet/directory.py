"""Who works: heartbeats over a transport, and a bucket that newcomers read first."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from millrace.bus import codec, subjects
from millrace.bus.transport import Message, Subscription, Transport, listen
from millrace.runtime.clock import Clock, until_beat_s
from millrace.schemas.control import NameLease, PrefixReport, WorkerStatus
from millrace.schemas.errors import BusUnavailableError, MalformedMessageError, NameTakenError

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
        return await listen(
            self._transport,
            subjects.ALL_PREFIX_REPORTS,
            lambda message: codec.PREFIX_REPORT.decode(message.payload),
            on_report,
        )


# A lease is written anew with every second heartbeat of a worker that has something to do.
RENEWAL_BEATS = 2
# A holder that has not written its lease anew for this many times as long as it should is gone: not
# before the schedulers think so too.
MISSED_RENEWALS = 2.5
_RETRY_S = 0.25
_POLL_S = 0.1


def new_worker_name() -> str:
    """Return a name for a worker that was given none: this machine's, and a random part."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


class WorkerName:
    """The lease of one process on a worker's name; ``held`` is set while it is known to be ours.

    ``claim`` waits for nobody who is there, and only as long as it takes to see that nobody is: a
    worker that starts again after a kill -9 finds the lease of its former life, which is not
    renewed any more. Writes are checked against the revision that was read, so of several that
    claim at a time one gets it.
    """

    def __init__(self, workers: WorkerDirectory, clock: Clock, name: str, renew_s: float) -> None:
        self.held = asyncio.Event()
        self._workers = workers
        self._clock = clock
        self._name = name
        self._lease = NameLease(holder=f"{name}-{secrets.token_hex(4)}", renew_s=renew_s)
        self._revision = 0

    async def claim(self) -> None:
        """Take the name. Raises NameTakenError if another has it who is there."""
        while not self.held.is_set():
            try:
                found = await self._workers.name_holder(self._name)
                if found is None or await self._is_free(found):
                    await self._write(0 if found is None else found.revision)
            except BusUnavailableError as error:
                logger.warning("a name cannot be claimed yet", extra={"reason": error.message})
                await self._clock.sleep(_RETRY_S)

    async def run(self) -> None:
        """Renew the lease until it is cancelled. Raises NameTakenError once another has the name:
        this process stood still, or was cut off, for longer than anybody waits."""
        while True:
            await self._clock.sleep(until_beat_s(self._clock, self._lease.renew_s))
            try:
                if not await self._write(self._revision):
                    await self._regain()
            except BusUnavailableError:
                continue  # the workers' heartbeats, which are lost as well, say so

    async def give_back(self) -> None:
        """Whoever starts under this name next need not wait. Raises BusUnavailableError."""
        if self.held.is_set():
            self.held.clear()
            await self._workers.hold_name(self._name, NameLease(holder=""), self._revision)

    async def _is_free(self, found: HeldName) -> bool:
        """Whether a lease is not renewed any more, once that can be told. Raises NameTakenError."""
        holder, revision = found.lease.holder, found.revision
        if holder in ("", self._lease.holder):
            return True
        # Looks are counted, not only time: it may have been us who stood still.
        poll_s = min(_POLL_S, found.lease.renew_s / 2)
        for _ in range(math.ceil(MISSED_RENEWALS * found.lease.renew_s / poll_s) if poll_s else 0):
            await self._clock.sleep(poll_s)
            now = await self._workers.name_holder(self._name)
            if now is None:
                return False  # it was forgotten: look again
            if now.revision != revision:
                if now.lease.holder not in ("", self._lease.holder):
                    raise NameTakenError(self._name, now.lease.holder)
                return False
        logger.info("a name is taken over", extra={"worker": self._name, "from": holder})
        return True

    async def _regain(self) -> None:
        """The entry is not as it was left: it was forgotten meanwhile, or is another's."""
        found = await self._workers.name_holder(self._name)
        if found is None:
            await self._write(0)
        elif found.lease.holder == self._lease.holder:
            self._revision = found.revision
        else:
            self.held.clear()
            raise NameTakenError(self._name, found.lease.holder or "another")

    async def _write(self, after: int) -> bool:
        revision = await self._workers.hold_name(self._name, self._lease, after)
        if revision is None:
            return False
        self._revision = revision
        self.held.set()
        return True
