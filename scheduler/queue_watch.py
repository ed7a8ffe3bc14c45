"""Watches one model's queue: keeps it within its bound, and tells the gateways how it stands."""

from __future__ import annotations

import logging

from scheduler.lane import Lane
from scheduler.parts import Parts
from scheduler.tasks import Tasks
from scheduler.throughput import eta_s, retry_after_s
from scheduler.verdicts import shed
from schemas.control import QueueStatus
from schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)

# Schedulers that shed at the same time look again after this many, so as not to shed twice.
_MAX_SHED_AT_ONCE = 64


class QueueWatch:
    """Looks every ``status_interval_s``. ``answers`` owns the answers to shed jobs, which exist
    nowhere else."""

    def __init__(self, parts: Parts, lane: Lane, answers: Tasks) -> None:
        self._parts = parts
        self._lane = lane
        self._answers = answers

    async def run(self) -> None:
        """Runs until it is cancelled."""
        failing = False
        while True:
            if self._parts.bus.connected:
                try:
                    await self.look()
                    failing = False
                except BusUnavailableError as error:
                    if not failing:
                        logger.warning(
                            "the queue cannot be watched",
                            extra={"model": self._lane.model, "reason": error.message},
                        )
                    failing = True
            await self._parts.clock.sleep(self._parts.config.status_interval_s)

    async def look(self) -> None:
        """Shed what is over the bound, then say how the queue stands. Raises
        BusUnavailableError."""
        parts, model, bound = self._parts, self._lane.model, self._parts.config.max_queued_jobs
        num_queued = (await parts.bus.jobs.depth(model)).num_queued
        per_s = self._lane.throughput.per_s(parts.clock.monotonic())
        if num_queued > bound:
            num_queued = await self._shed(num_queued, per_s)
        await parts.bus.control.publish_queue_status(
            QueueStatus(
                model=model,
                num_queued=num_queued,
                bound=bound,
                retry_after_s=retry_after_s(num_queued, bound, per_s),
                num_workers=parts.fleet.num_workers(model),
                eta_s=eta_s(num_queued, per_s),
                sent_ns=parts.clock.now_ns(),
            )
        )

    async def _shed(self, num_queued: int, per_s: float) -> int:
        """Shed the newest; how many jobs are left."""
        parts, model, bound = self._parts, self._lane.model, self._parts.config.max_queued_jobs
        num_shed = 0
        while num_queued > bound:
            count = min(num_queued - bound, _MAX_SHED_AT_ONCE)
            jobs = await parts.bus.jobs.shed_newest(model, count)
            verdict = shed(retry_after_s(num_queued, bound, per_s))
            for job in jobs:
                self._answers.spawn(parts.endings.end_taken(job, verdict), f"shed {job.request_id}")
            num_shed += len(jobs)
            num_queued = (await parts.bus.jobs.depth(model)).num_queued
            if not jobs:
                break
        logger.info("shed the newest jobs", extra={"model": model, "num_shed": num_shed})
        return num_queued
