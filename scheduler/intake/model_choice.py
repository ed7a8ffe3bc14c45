"""Routing of jobs whose model or version is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.bus.job_queue import LeasedJob
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.rollouts.versions import REASON, Versions
from millrace.registry.routing.router import ModelState, Router, check_routable, question_of, routed
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.stages import prepare
from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import SchedulerState
from millrace.schemas.errors import BusUnavailableError, MillraceError, ModelNotFoundError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.tools import ToolMode

logger = logging.getLogger(__name__)

# Jobs whose model is being chosen are not counted elsewhere yet.
_MAX_ROUTING = 64


class VersionChooser:
    """Version chooser: picks a version by the rollouts, once for each job.

    Every later scheduler runs the same version, as the client may have its tokens. A job keeps its
    model if it names a version, if a gateway published it (gateways choose themselves), or if it
    has an adapter, which fits one version only.
    """

    reads_bodies = False

    def __init__(self, versions: Versions, rollouts: RolloutDirectory) -> None:
        self._versions = versions
        self._rollouts = rollouts

    def leaves_open(self, leased: LeasedJob) -> bool:
        """Return whether a version is to be chosen for the job."""
        job = leased.job
        if not self._versions.stands_for_several(job.model):
            return False
        is_one = job.model in self._versions.of(job.model)
        return not (is_one and (leased.tenant_queue.reserved or job.adapter))

    def choose(self, leased: LeasedJob, asked: GenerationRequest | None = None) -> Job:  # noqa: ARG002
        """Return the job with a version.

        Raises:
            ModelNotFoundError: No version is available, or the version that the job's gateway chose
                is gone and the job may have run with it.
        """
        if not self.leaves_open(leased):
            return leased.job
        if leased.tenant_queue.reserved and leased.num_deliveries > 1:
            raise ModelNotFoundError(f"The model {leased.job.model!r:.300} is no longer served.")
        return self.with_version(leased.job)

    def with_version(self, job: Job) -> Job:
        """Choose a version of a model that was already chosen for the job. See ``choose``."""
        if not self._versions.stands_for_several(job.model):
            return job
        key = job.session_id or job.request_id
        version = self._versions.resolve(job.model, key, self._rollouts.rollouts)
        if version is None:
            raise ModelNotFoundError(f"There is no model {job.model!r:.300} just now.")
        return msgspec.structs.replace(
            job,
            model=version,
            model_requested=job.model_requested or job.model,
            route_reason=job.route_reason or REASON,
        )


class ModelChooser:
    """Model chooser: routes a job by its content and by the models' state.

    ``state_of`` returns a model's state for the job's tier and tenant.
    """

    reads_bodies = True

    def __init__(
        self,
        router: Router,
        state_of: Callable[[str, Tier, str], ModelState],
        versions: VersionChooser,
    ) -> None:
        """Create a chooser. ``versions`` picks a version where a routed model has several."""
        self._router = router
        self._state_of = state_of
        self._versions = versions

    def leaves_open(self, leased: LeasedJob) -> bool:
        """Return whether the job names a route instead of a model."""
        return leased.job.model in self._router.routes

    def choose(self, leased: LeasedJob, asked: GenerationRequest | None = None) -> Job:
        """Return the job with a model; a job that names a model is unchanged.

        Raises:
            ParameterError: The job has a parameter that fits one model only. The error names the
                field.
        """
        job = leased.job
        if not self.leaves_open(leased):
            return job
        said = job if asked is None else asked
        has_tools = bool(said.tools)
        if asked is not None and asked.tool_choice.mode is ToolMode.NONE:
            has_tools = False
        check_routable(
            job.model,
            (said.prompt_token_ids,),
            said.sampling,
            is_embedding=job.pooling is not None,
        )
        question = question_of(
            said.prompt, said.messages, said.sampling, job.tier, has_tools=has_tools
        )
        chosen = self._router.choose(
            job.model, question, lambda model, tier: self._state_of(model, tier, job.tenant)
        )
        return self._versions.with_version(routed(job, chosen))


class RoutingPuller(JobPuller):
    """Puller of jobs for a name that stands for several models.

    The choice is stored before the job is prepared, so a later scheduler runs the same model.
    """

    def __init__(
        self,
        state: SchedulerState,
        name: str,
        models: Sequence[str],
        chooser: VersionChooser | ModelChooser,
    ) -> None:
        """Create a puller.

        ``models`` are the served models of the name. The model with exactly that name comes first,
        if there is one: it gets jobs that leave nothing open.
        """
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
        """Start a job at the model that is chosen for it.

        Its tenant's line counts the job as undecided meanwhile.
        """
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
            # The queue redelivered the job during the choice.
            super().accept(leased)

    async def _with_model(self, leased: LeasedJob) -> Job:
        asked = None
        if leased.job.body and self._chooser.reads_bodies:
            asked = await self._state.model_cache.read(leased.job)
        job = await settle(self._state.running_requests, self._chooser.choose(leased, asked))
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


async def settle(index: RunningRequests, job: Job) -> Job:
    """Return the job with the model that some scheduler first chose for it.

    Its client may have tokens of that model, which no other model can continue.
    """
    model, reason = await index.settle_model(job.request_id, job.model, job.route_reason)
    return msgspec.structs.replace(job, model=model, route_reason=reason)
