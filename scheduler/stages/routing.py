"""Pulls jobs that leave the model open, and chooses a model for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from millrace.bus.job_queue import LeasedJob
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.stages import prepare
from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import SchedulerState
from millrace.schemas.errors import BusUnavailableError, MillraceError, ModelNotFoundError
from millrace.schemas.jobs import Job

logger = logging.getLogger(__name__)

# Jobs of which the model is looked up count nowhere else so far.
_MAX_ROUTING = 64


class Chooser(Protocol):
    """Chooses a model for a job that leaves it open."""

    def leaves_open(self, leased: LeasedJob) -> bool:
        """Whether there is something to choose."""

    @property
    def reads_bodies(self) -> bool:
        """Whether it chooses by what a job asks."""

    def choose(self, leased: LeasedJob, asked: GenerationRequest | None = None) -> Job:
        """The job with a model; ``asked`` is what its body says, if it has one and that is read.
        Raises MillraceError for one that can have none."""

    async def settle(self, job: Job) -> Job:
        """The job with the model that was first chosen for it, by whichever scheduler. Its client
        may have tokens of that one, which no other model can go on with."""


class RoutingPuller(JobPuller):
    """Pulls jobs for a name that stands for several models. The choice is noted before the job is
    made ready, so the next scheduler that gets the job runs the same model."""

    def __init__(
        self,
        state: SchedulerState,
        name: str,
        models: Sequence[str],
        chooser: Chooser,
    ) -> None:
        """``models`` are those of the name that are served here, the one of that very name first,
        if there is one: it gets what leaves nothing open."""
        super().__init__(state, name, models)
        self._models = models
        self._chooser = chooser
        self._num_routing = 0

    def _pull_all(self) -> None:
        if self._num_routing < _MAX_ROUTING:
            super()._pull_all()

    def accept(self, leased: LeasedJob) -> None:
        is_here = self._state.job_table.get(leased.job.request_id) is not None
        if is_here or not self._chooser.leaves_open(leased):
            super().accept(leased)
        else:
            self._num_routing += 1
            scheduled = self._scheduled_job(leased)
            self._state.lines.undecided(scheduled)
            routing = self._route(leased, scheduled)
            name = f"route {leased.job.request_id}"
            self._state.tasks.spawn(routing, name).add_done_callback(self._routed)

    def _routed(self, _routing: asyncio.Task[None]) -> None:
        self._num_routing -= 1
        self._wake.set()

    async def _route(self, leased: LeasedJob, scheduled: ScheduledJob) -> None:
        """Start a job at the model that is chosen for it. Its tenant's line counts it as undecided
        meanwhile."""
        try:
            await self._start(leased, scheduled)
        finally:
            if self._state.job_table.get(scheduled.request_id) is not scheduled:
                self._state.lines.decided(scheduled)

    async def _start(self, leased: LeasedJob, scheduled: ScheduledJob) -> None:
        try:
            scheduled.job = await self._with_model(leased)
        except MillraceError as error:
            await self._refuse(scheduled, error)
            return
        except Exception as error:
            logger.exception(
                "a job could not be given a model", extra={"request_id": scheduled.request_id}
            )
            message = f"The job could not be given a model: {type(error).__name__}."
            await self._refuse(scheduled, MillraceError(message))
            return
        if self._state.job_table.get(scheduled.request_id) is None:
            prepare.start(self._state, scheduled)
        else:
            # It was delivered again while its model was looked up.
            super().accept(leased)

    async def _with_model(self, leased: LeasedJob) -> Job:
        asked = None
        if leased.job.body and self._chooser.reads_bodies:
            asked = await self._state.model_cache.read(leased.job)
        job = await self._chooser.settle(self._chooser.choose(leased, asked))
        if job.model not in self._models:
            raise ModelNotFoundError(
                f"The model {job.model!r} was chosen, which is not served here."
            )
        return job

    async def _refuse(self, scheduled: ScheduledJob, error: MillraceError) -> None:
        try:
            await prepare.refuse(self._state, scheduled, error)
        except BusUnavailableError as outage:
            logger.warning("a job will be refused later", extra={"reason": outage.message})
