"""Pulls jobs that leave the model open, and gives each to the lane of the one that is chosen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from bus.api import LeasedJob
from registry.routing.router import ModelState, Router
from scheduler.dispatch.context import Parts
from scheduler.dispatch.dispatcher import Lane
from scheduler.dispatch.queue_estimate import Outlook
from scheduler.intake.model_cache import Shelf
from scheduler.intake.puller import Intake
from scheduler.intake.routing import AutoRouter, Choices
from scheduler.jobs.terminal_status import refused
from scheduler.placement import placement
from schemas.errors import MillraceError, ModelNotFoundError
from schemas.jobs import Tier

logger = logging.getLogger(__name__)

# Jobs of which the model is looked up count nowhere else so far.
_MAX_ROUTING = 64


class AutoIntake(Intake):
    """An ``Intake`` for a name that stands for several models. The choice is noted before the job
    is made ready, so whoever gets it after us runs the same model."""

    def __init__(
        self,
        parts: Parts,
        name: str,
        lanes: Mapping[str, Lane],
        shelf: Shelf,
        router: AutoRouter,
    ) -> None:
        models = [model for model in router.models_of(name) if model in lanes]
        super().__init__(parts, name, lanes, models, shelf)
        self._models = models
        self._router = router
        self._num_routing = 0

    def _pull_all(self) -> None:
        if self._num_routing < _MAX_ROUTING:
            super()._pull_all()

    def admit(self, leased: LeasedJob) -> None:
        if self._parts.table.get(leased.job.request_id) is not None:
            super().admit(leased)
        else:
            self._num_routing += 1
            routing = self._parts.tasks.spawn(self._route(leased), f"route {leased.job.request_id}")
            routing.add_done_callback(self._routed)

    def _routed(self, _routing: asyncio.Task[None]) -> None:
        self._num_routing -= 1
        self._wake.set()

    async def _route(self, leased: LeasedJob) -> None:
        entry = self._entry(leased)
        try:
            entry.job = await self._router.settled(self._router.route(leased.job))
            if entry.job.model not in self._models:
                raise ModelNotFoundError(
                    f"The model {entry.job.model!r} was chosen, which is not served here."
                )
        except MillraceError as error:
            await self._refuse(entry, refused(error))
            return
        if self._parts.table.get(entry.request_id) is None:
            self._take(entry, self._by_model[entry.job.model])
        else:
            # It was delivered again while its model was looked up.
            super().admit(leased)


def router_of(
    router: Router, outlooks: Mapping[str, Outlook], parts: Parts, choices: Choices
) -> AutoRouter:
    """Chooses by how the models stand as this scheduler sees them."""
    return AutoRouter(router, _state_of(outlooks, parts), choices)


def _state_of(
    outlooks: Mapping[str, Outlook], parts: Parts
) -> Callable[[str, Tier, str], ModelState]:
    def state_of(model: str, tier: Tier, tenant: str) -> ModelState:
        outlook = outlooks.get(model)
        if outlook is None:
            return ModelState()
        return ModelState(
            num_workers=parts.fleet.num_taking(model),
            ttft_ms=outlook.ttft_ms_of(tier, tenant),
            is_full=outlook.num_queued >= parts.config.max_queued_jobs,
            context_window_tokens=placement.longest_tokens(parts.fleet.of_model(model)),
        )

    return state_of
