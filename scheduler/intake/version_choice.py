"""Chooses a version for jobs that were published under a name that stands for several."""

from __future__ import annotations

import msgspec

from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.bus.job_queue import LeasedJob
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.rollouts.versions import REASON, Versions
from millrace.scheduler.jobs.running_requests import RunningRequests
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.jobs import Job


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
