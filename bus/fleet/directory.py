"""Worker directory: heartbeats over a transport, and a bucket for subscribers that start later."""

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

# Entries of workers without heartbeats leave the bucket after this time.
ENTRY_TTL_S = 5.0


class HeldName(NamedTuple):
    """Lease on a worker's name, as stored. ``revision`` changes with each write."""

    lease: NameLease
    revision: int


class WorkerBucket(Protocol):
    """Bucket of last values by key, each forgotten ``ENTRY_TTL_S`` after it was put."""

    async def put(self, subject: str, payload: bytes) -> None: ...

    async def entries(self) -> Sequence[bytes]:
        """Return the workers' entries."""

    async def ages(self) -> Sequence[tuple[bytes, float]]:
        """Return the workers' entries with their ages in seconds, by the bucket's clock.

        An age may be slightly too low. Raises BusUnavailableError.
        """

    async def put_after(self, subject: str, payload: bytes, after: int) -> int | None:
        """Put a value if the last one has the revision ``after`` (0: none).

        Returns the new revision, or None if the value was not put. Raises BusUnavailableError.
        """

    async def get(self, subject: str) -> tuple[bytes, int] | None:
        """Return a value and its revision. Raises BusUnavailableError."""


class WorkerDirectory:
    """Directory of workers: bucket ``workers``, heartbeats ``hb.<worker>``, reports
    ``prefix.<worker>``."""

    def __init__(self, transport: Transport, bucket: WorkerBucket) -> None:
        self._transport = transport
        self._bucket = bucket

    async def announce(self, status: WorkerStatus) -> None:
        """Send a heartbeat; a status with ``retired`` removes the worker at once."""
        payload = codec.encode(status)
        await self._transport.publish(subjects.heartbeat(status.worker_id), payload)
        await self._bucket.put(subjects.worker_entry(status.worker_id), payload)

    async def watch(self, on_status: Callable[[WorkerStatus], None]) -> Subscription:
        """Deliver the known workers first, then every heartbeat.

        The watcher must notice silence.
        """
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
        """Return the last status of each worker that has not retired; a dead one's until it
        expires."""
        statuses = map(self._read, await self._bucket.entries())
        # A retired worker's last status stays until it expires. A deletion could overtake the
        # status before it.
        return [status for status in statuses if status is not None and not status.retired]

    def _read(self, payload: bytes) -> WorkerStatus | None:
        try:
            return codec.WORKER_STATUS.decode(payload)
        except MalformedMessageError:
            logger.warning("dropped a heartbeat that could not be read")
            return None

    async def silences_s(self) -> dict[str, float]:
        """Return the seconds since each worker's last entry, by the bucket's clock.

        The value may be slightly too low. Raises BusUnavailableError.
        """
        silences_s: dict[str, float] = {}
        for payload, age_s in await self._bucket.ages():
            status = self._read(payload)
            if status is not None:
                silences_s[status.worker_id] = max(age_s, 0.0)
        return silences_s

    async def hold_name(self, name: str, lease: NameLease, after: int) -> int | None:
        """Write the holder of a worker's name if its entry has the revision ``after`` (0: none).

        Returns the new revision, or None if the entry had another one. The entry expires after
        ``ENTRY_TTL_S``.

        Raises BusUnavailableError: it is unknown whether the entry was written.
        """
        return await self._bucket.put_after(subjects.worker_name(name), codec.encode(lease), after)

    async def name_holder(self, name: str) -> HeldName | None:
        """Return the lease on a worker's name; None if it is free. Raises BusUnavailableError."""
        found = await self._bucket.get(subjects.worker_name(name))
        if found is None:
            return None
        payload, revision = found
        try:
            return HeldName(codec.NAME_LEASE.decode(payload), revision)
        except MalformedMessageError:
            logger.warning("a worker's name has an unreadable lease", extra={"worker": name})
            return HeldName(NameLease(holder=""), revision)

    async def take_role_turn(self, model: str) -> bool:
        """Take the turn to change the roles of a model's workers; return whether this caller got
        it.

        One caller gets it, and no other for ``ENTRY_TTL_S``. Raises BusUnavailableError.
        """
        return await self._bucket.put_after(subjects.role_turn(model), b"", 0) is not None

    async def report_prefixes(self, report: PrefixReport) -> None:
        """Report the contents of a worker's prefix cache to the schedulers, at most once.

        Raises PayloadTooLargeError.
        """
        subject = subjects.prefix_report(report.worker_id)
        await self._transport.publish(subject, codec.encode(report))

    async def watch_prefixes(self, on_report: Callable[[PrefixReport], None]) -> Subscription:
        return await listen(
            self._transport,
            subjects.ALL_PREFIX_REPORTS,
            lambda message: codec.PREFIX_REPORT.decode(message.payload),
            on_report,
        )


# A lease is renewed with every second heartbeat of a busy worker.
RENEWAL_BEATS = 2
# A holder that missed this many renewals is gone. The schedulers give it up no later.
MISSED_RENEWALS = 2.5
_RETRY_S = 0.25
_POLL_S = 0.1


def new_worker_name() -> str:
    """Return a default worker name: this machine's name and a random part."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


class WorkerName:
    """Lease of a process on a worker's name; ``held`` is set while the lease is known to be ours.

    ``claim`` waits only until a lease is known not to be renewed: a worker that restarts after a
    kill -9 finds the lease of its former process. Writes are checked against the revision that was
    read, so one of several claimants gets the name.
    """

    def __init__(self, workers: WorkerDirectory, clock: Clock, name: str, renew_s: float) -> None:
        self.held = asyncio.Event()
        self._workers = workers
        self._clock = clock
        self._name = name
        self._lease = NameLease(holder=f"{name}-{secrets.token_hex(4)}", renew_s=renew_s)
        self._revision = 0

    async def claim(self) -> None:
        """Take the name. Raises NameTakenError if a live worker has it."""
        while not self.held.is_set():
            try:
                found = await self._workers.name_holder(self._name)
                if found is None or await self._is_free(found):
                    await self._write(0 if found is None else found.revision)
            except BusUnavailableError as error:
                logger.warning(
                    "a worker's name could not be claimed; retrying",
                    extra={"reason": error.message},
                )
                await self._clock.sleep(_RETRY_S)

    async def run(self) -> None:
        """Renew the lease until cancelled.

        Raises NameTakenError once another worker has the name: this process was paused or
        disconnected for too long.
        """
        while True:
            await self._clock.sleep(until_beat_s(self._clock, self._lease.renew_s))
            try:
                if not await self._write(self._revision):
                    await self._regain()
            except BusUnavailableError:
                continue  # the workers' heartbeats fail as well and log it

    async def give_back(self) -> None:
        """Release the name, so its next user need not wait. Raises BusUnavailableError."""
        if self.held.is_set():
            self.held.clear()
            await self._workers.hold_name(self._name, NameLease(holder=""), self._revision)

    async def _is_free(self, found: HeldName) -> bool:
        """Return whether a lease is no longer renewed, after waiting for that.

        Raises NameTakenError.
        """
        holder, revision = found.lease.holder, found.revision
        if holder in ("", self._lease.holder):
            return True
        # Count polls as well as time: this process may have been paused.
        poll_s = min(_POLL_S, found.lease.renew_s / 2)
        for _ in range(math.ceil(MISSED_RENEWALS * found.lease.renew_s / poll_s) if poll_s else 0):
            await self._clock.sleep(poll_s)
            now = await self._workers.name_holder(self._name)
            if now is None:
                return False  # the entry expired: look again
            if now.revision != revision:
                if now.lease.holder not in ("", self._lease.holder):
                    raise NameTakenError(self._name, now.lease.holder)
                return False
        logger.info("took over a worker's name", extra={"worker": self._name, "from": holder})
        return True

    async def _regain(self) -> None:
        """Handle an entry that was not as this process left it: it expired, or another worker has
        it."""
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
