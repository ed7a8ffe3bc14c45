"""Chooses a model for jobs that were published without one."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.bus.job_queue import LeasedJob
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.rollouts.versions import REASON, Versions
from millrace.registry.routing.router import ModelState, Router, check_routable, routed
from millrace.registry.routing.score import question_of
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.tools import ToolMode


class VersionChooser:
    """Chooses as rollouts say, once for each job: whoever gets it later runs the same version, of
    which its client may have tokens. A job that names a version, that a gateway has published, as
    these choose themselves, or that has an adapter, which fits one version only, is left as it is.
    """

    def __init__(
        self, versions: Versions, rollouts: RolloutDirectory, index: RunningRequests
    ) -> None:
        self._versions = versions
        self._rollouts = rollouts
        self._index = index

    def leaves_open(self, leased: LeasedJob) -> bool:
        """Whether a version is to be chosen for the job."""
        job = leased.job
        if not self._versions.stands_for_several(job.model):
            return False
        is_one = job.model in self._versions.of(job.model)
        return not (is_one and (leased.tenant_queue.reserved or job.adapter))

    @property
    def reads_bodies(self) -> bool:
        return False

    def choose(self, leased: LeasedJob, asked: GenerationRequest | None = None) -> Job:  # noqa: ARG002
        """The job with a version. Raises ModelNotFoundError if there is none that it could get, and
        for one that may have run with the version that its gateway chose, which has gone."""
        if not self.leaves_open(leased):
            return leased.job
        if leased.tenant_queue.reserved and leased.num_deliveries > 1:
            raise ModelNotFoundError(f"The model {leased.job.model!r:.300} is served no more.")
        return self.with_version(leased.job)

    def with_version(self, job: Job) -> Job:
        """As ``choose``, for a model that was chosen for the job."""
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

    async def settle(self, job: Job) -> Job:
        """The job with the version that was first chosen for it, by whichever scheduler."""
        model, reason = await self._index.settle_model(job.request_id, job.model, job.route_reason)
        return msgspec.structs.replace(job, model=model, route_reason=reason)


class ModelChooser:
    """Chooses by what a job asks and how the models stand for its tier and tenant, as ``state_of``
    says."""

    def __init__(
        self,
        router: Router,
        state_of: Callable[[str, Tier, str], ModelState],
        index: RunningRequests,
        versions: VersionChooser,
    ) -> None:
        """``versions`` chooses one where a model of a route has several."""
        self._router = router
        self._state_of = state_of
        self._index = index
        self._versions = versions

    @property
    def names(self) -> Collection[str]:
        """What stands in place of a model in the subjects of such jobs."""
        return self._router.routes.keys()

    def models_of(self, name: str) -> tuple[str, str]:
        """Those that jobs of a name may go to."""
        return self._router.routes[name].models

    def leaves_open(self, leased: LeasedJob) -> bool:
        """Whether the job names no model."""
        return leased.job.model in self._router.routes

    @property
    def reads_bodies(self) -> bool:
        return True

    def choose(self, leased: LeasedJob, asked: GenerationRequest | None = None) -> Job:
        """The job with a model; one that has a model already is left as it is.

        Raises ParameterError, naming the field, for a job that has a meaning with one model only.
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

        def state_of(model: str, tier: Tier) -> ModelState:
            return self._state_of(model, tier, job.tenant)

        chosen = self._router.choose(job.model, question, state_of)
        return self._versions.with_version(routed(job, chosen))

    async def settle(self, job: Job) -> Job:
        """A routed job with the model that was first chosen for it, by whichever scheduler. Its
        client may have tokens of that one, which no other model can go on with; so ask this of a
        job that was delivered before, and have it noted for each that was not."""
        model, reason = await self._index.settle_model(job.request_id, job.model, job.route_reason)
        return msgspec.structs.replace(job, model=model, route_reason=reason)
