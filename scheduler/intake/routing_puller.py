"""Pulls jobs that leave the model open, and gives each to the lane of the one that is chosen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from bus.api import LeasedJob
from registry.routing.router import ModelState, Router
from scheduler.dispatch.context import SchedulerContext
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.queue_estimate import QueueEstimate
from scheduler.intake.model_cache import ModelCache
from scheduler.intake.model_choice import AutoRouter, Choices
from scheduler.intake.puller import Puller
from scheduler.jobs.terminal_status import refused
from scheduler.placement import placement
from schemas.errors import MillraceError, ModelNotFoundError
from schemas.jobs import Tier

logger = logging.getLogger(__name__)

# Jobs of which the model is looked up count nowhere else so far.
_MAX_ROUTING = 64


class RoutingPuller(Puller):
    """An ``Puller`` for a name that stands for several models. The choice is noted before the job
    is made ready, so whoever gets it after us runs the same model."""

    def __init__(
        self,
        context: SchedulerContext,
        name: str,
        dispatchers: Mapping[str, Dispatcher],
        model_cache: ModelCache,
        router: AutoRouter,
    ) -> None:
        models = [model for model in router.models_of(name) if model in dispatchers]
        super().__init__(context, name, dispatchers, models, model_cache)
        self._models = models
        self._router = router
        self._num_routing = 0

    def _pull_all(self) -> None:
        if self._num_routing < _MAX_ROUTING:
            super()._pull_all()

    def admit(self, leased: LeasedJob) -> None:
        if self._context.job_table.get(leased.job.request_id) is not None:
            super().admit(leased)
        else:
            self._num_routing += 1
            routing = self._context.tasks.spawn(
                self._route(leased), f"route {leased.job.request_id}"
            )
            routing.add_done_callback(self._routed)

    def _routed(self, _routing: asyncio.Task[None]) -> None:
        self._num_routing -= 1
        self._wake.set()

    async def _route(self, leased: LeasedJob) -> None:
        scheduled = self._scheduled_job(leased)
        try:
            scheduled.job = await self._router.settled(self._router.route(leased.job))
            if scheduled.job.model not in self._models:
                raise ModelNotFoundError(
                    f"The model {scheduled.job.model!r} was chosen, which is not served here."
                )
        except MillraceError as error:
            await self._refuse(scheduled, refused(error))
            return
        if self._context.job_table.get(scheduled.request_id) is None:
            self._take(scheduled, self._by_model[scheduled.job.model])
        else:
            # It was delivered again while its model was looked up.
            super().admit(leased)


def router_of(
    router: Router,
    queue_estimates: Mapping[str, QueueEstimate],
    context: SchedulerContext,
    choices: Choices,
) -> AutoRouter:
    """Chooses by how the models stand as this scheduler sees them."""
    return AutoRouter(router, _state_of(queue_estimates, context), choices)


def _state_of(
    queue_estimates: Mapping[str, QueueEstimate], context: SchedulerContext
) -> Callable[[str, Tier, str], ModelState]:
    def state_of(model: str, tier: Tier, tenant: str) -> ModelState:
        queue_estimate = queue_estimates.get(model)
        if queue_estimate is None:
            return ModelState()
        return ModelState(
            num_workers=context.fleet.num_accepting(model),
            ttft_ms=queue_estimate.ttft_ms_of(tier, tenant),
            is_full=queue_estimate.num_queued >= context.config.max_queued_jobs,
            context_window_tokens=placement.longest_tokens(context.fleet.of_model(model)),
        )

    return state_of
