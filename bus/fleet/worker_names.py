"""One worker to a name: a lease on it, held by whoever was first."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket

from millrace.bus.fleet.directory import HeldName, WorkerDirectory
from millrace.runtime.clock import Clock, until_beat_s
from millrace.schemas.control import NameLease
from millrace.schemas.errors import BusUnavailableError, NameTakenError

logger = logging.getLogger(__name__)

# A lease is written anew with every second heartbeat of a worker that has something to do.
RENEWAL_BEATS = 2
# A holder that has not written its lease anew for this many times as long as it should is gone: not
# before the schedulers think so too.
MISSED_RENEWALS = 2.5
_RETRY_S = 0.25
_POLL_S = 0.1


def new_worker_name() -> str:
    """For a worker that was given none: this machine's, and a random part."""
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
