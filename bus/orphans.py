"""Detection of orphans: requests whose gateway is gone and whose clients did not return."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from millrace.bus.api import Bus
from millrace.runtime.clock import Clock, until_beat_s
from millrace.schemas.errors import BusForbiddenError, BusUnavailableError
from millrace.schemas.jobs import Job

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
_MIN_LOOK_S = 0.1
_ASK_TIMEOUT_S = 1.0
_NUM_LAST_LOOKS = 2


class OrphanWatch:
    """Orphan watch: asks every two seconds which gateways hold the requests in ``jobs``.

    It calls ``on_orphan`` with the id of each request that no gateway has held for ``grace_s``. Set
    ``grace_s`` before ``run`` (0: never).

    A gateway holds a request from before its job is published until its end, or until another
    gateway takes it over and answers in its place. A gateway that was restarted under the same id
    does not hold its former requests. Only jobs that await a client count (``Job.awaits_client``).

    Once a request of a gateway is an orphan, requests that this gateway accepted before it get a
    grace of only ``_NUM_LAST_LOOKS`` looks, as they belong to the same run of the gateway or an
    earlier one. So jobs that waited in the queue for a gateway that is long gone end soon after
    they were pulled.

    The grace starts again after a time in which this process could not ask: the bus was
    disconnected or forbade the question, or this process was paused.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        jobs: Callable[[], Iterable[Job]],
        on_orphan: Callable[[str], None],
    ) -> None:
        self.grace_s = 0.0
        self.num_found = 0
        self._bus = bus
        self._clock = clock
        self._jobs = jobs
        self._on_orphan = on_orphan
        self._lost_since_s: dict[str, float] = {}
        self._gone_until_ns: dict[str, int] = {}  # by gateway: receipt of its newest orphan
        self._may_ask = True

    async def run(self) -> None:
        """Run until cancelled; return at once if ``grace_s`` is 0."""
        if self.grace_s <= 0:
            return
        self._bus.on_reconnect(self.restart)
        while True:
            before_s = self._clock.monotonic()
            await self._clock.sleep(until_beat_s(self._clock, self._interval_s))
            stood_still = self._clock.monotonic() - before_s > 3 * self._interval_s
            if stood_still or not self._bus.connected:
                self.restart()
            elif self._may_ask:
                await self.look()

    @property
    def _interval_s(self) -> float:
        return max(min(_LOOK_S, self.grace_s / 4), _MIN_LOOK_S)

    def restart(self) -> None:
        """Restart the grace of every request, as messages were missed."""
        self._lost_since_s.clear()
        self._gone_until_ns.clear()
        self._may_ask = True

    async def look(self) -> None:
        """Ask once for all requests."""
        by_reply: dict[str, dict[str, Job]] = {}
        for job in self._jobs():
            if job.awaits_client:
                by_reply.setdefault(job.reply, {})[job.request_id] = job
        watched = {request_id for jobs in by_reply.values() for request_id in jobs}
        for request_id in self._lost_since_s.keys() - watched:
            del self._lost_since_s[request_id]
        await asyncio.gather(*(self._look_at(reply, jobs) for reply, jobs in by_reply.items()))

    async def _look_at(self, reply: str, jobs: Mapping[str, Job]) -> None:
        """Ask for the requests of one gateway."""
        control = self._bus.control
        try:
            held = await control.held_requests(reply, list(jobs), _ASK_TIMEOUT_S)
            late = self._note(held, jobs)
            # Gateways of an older version answer only this request.
            answers = await asyncio.gather(
                *(control.is_held(reply, job.request_id, _ASK_TIMEOUT_S) for job in late)
            )
        except BusUnavailableError as error:
            for request_id in jobs:
                self._lost_since_s.pop(request_id, None)
            self._note_refusal(error)
            return
        for job, is_answered in zip(late, answers, strict=True):
            # The bus may have been disconnected meanwhile.
            if self._lost_since_s.pop(job.request_id, None) is not None and not is_answered:
                self._end(job)

    def _note(self, held: frozenset[str], jobs: Mapping[str, Job]) -> list[Job]:
        """Return the requests that no gateway has held for their whole grace."""
        now_s, late = self._clock.monotonic(), []
        for request_id, job in jobs.items():
            if request_id in held:
                self._lost_since_s.pop(request_id, None)
            elif now_s - self._lost_since_s.setdefault(request_id, now_s) >= self._grace_of(job):
                late.append(job)
        return late

    def _grace_of(self, job: Job) -> float:
        if job.received_ns > self._gone_until_ns.get(job.reply, -1):
            return self.grace_s
        return min(self.grace_s, _NUM_LAST_LOOKS * self._interval_s)

    def _note_refusal(self, error: BusUnavailableError) -> None:
        if isinstance(error, BusForbiddenError) and self._may_ask:
            # The next connection may have other permissions.
            self._may_ask = False
            logger.warning(
                "orphaned requests are not cancelled: no permission to ask gateways",
                extra={"reason": error.message},
            )

    def _end(self, job: Job) -> None:
        self.num_found += 1
        newest_ns = self._gone_until_ns.get(job.reply, 0)
        self._gone_until_ns[job.reply] = max(newest_ns, job.received_ns)
        logger.warning(
            "cancelling an orphaned request: its gateway is gone and no client returned",
            extra={"request_id": job.request_id, "gateway_id": job.reply},
        )
        self._on_orphan(job.request_id)
