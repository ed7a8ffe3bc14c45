"""Served models of one scheduler: a queue, an estimate and a puller for each.

Models come and go with the catalogue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain

from millrace.registry.rollouts.versions import Versions
from millrace.registry.routing.router import ModelState, Router
from millrace.runtime.tasks import Tasks
from millrace.scheduler.dispatch.queue_estimate import QueueEstimate
from millrace.scheduler.intake.model_choice import ModelChooser, RoutingPuller, VersionChooser
from millrace.scheduler.jobs.model_cache import Preparer
from millrace.scheduler.stages import place
from millrace.scheduler.stages.pull import JobPuller
from millrace.scheduler.state import ModelQueue, SchedulerState
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.jobs import Tier


@dataclass(frozen=True)
class ModelCatalogue:
    """Catalogue as the scheduler uses it.

    ``names`` are all models. ``load`` may block. ``router`` chooses for names that stand for
    several models. ``trusts_templates``: jobs may bring chat templates.
    """

    names: Collection[str]
    load: Callable[[str], Preparer]
    router: Router | None = None
    trusts_templates: bool = False


class ServedModels:
    """Served models: the configured models with all their versions, by default the whole catalogue.

    ``known_names`` are all names of the catalogue. ``queue_estimates`` has the models that are
    served now. ``pullers`` has them and the names that leave the model or its version open. Jobs of
    a removed model are ended as soon as they are seen. Owns the tasks that pull and estimate.
    Raises ModelNotFoundError if a configured model is not in the catalogue.
    """

    def __init__(self, state: SchedulerState, catalogue: ModelCatalogue) -> None:
        self._versions = Versions(catalogue.names)
        unknown = set(state.config.models) - set(catalogue.names)
        if unknown:
            raise ModelNotFoundError(
                f"scheduler.models names {', '.join(sorted(unknown))}, which the catalogue does "
                f"not have. The models are: {', '.join(sorted(catalogue.names))}."
            )
        self._state = state
        self._rollouts = state.directories.rollouts
        self._model_queues = state.model_queues
        self.queue_estimates: dict[str, QueueEstimate] = {}
        self.pullers: dict[str, JobPuller] = {}
        self.known_names = _all_names(catalogue)
        self._tasks: dict[str, Tasks] = {}  # by the name of a puller, or of a model
        self._is_running = False
        self._failure: asyncio.Future[None] | None = None
        for model in sorted(self._wanted(catalogue)):
            self._add(model)
        self._pull_all(catalogue.router)

    def model_state(self, model: str, tier: Tier, tenant: str) -> ModelState:
        """Return a model's state for a tenant; of several versions, that of the stable one.

        A model that is not served here counts as idle.
        """
        if model in self._versions.models():
            model = self._versions.stable(model, self._rollouts.rollouts)
        queue_estimate = self.queue_estimates.get(model)
        return ModelState() if queue_estimate is None else queue_estimate.model_state(tier, tenant)

    async def run(self) -> None:
        """Pull until it is cancelled. Raises the error that ends one of the loops."""
        self._failure = asyncio.get_running_loop().create_future()
        self._is_running = True
        for name in self.pullers:
            self._start(name)
        await self._failure

    async def close(self) -> None:
        """Stop pulling."""
        self._is_running = False
        for tasks in self._tasks.values():
            await tasks.close()

    async def follow(self, catalogue: ModelCatalogue, changed: Collection[str]) -> None:
        """Apply a changed catalogue.

        ``changed`` names the models that are new, removed or different. Jobs of removed models are
        ended.
        """
        self._state.model_cache.change(catalogue.load, changed)
        self.known_names = _all_names(catalogue)
        before, self._versions = self._versions, Versions(catalogue.names)
        # All pullers are in place before the first await.
        closing = [
            self._remove(model)
            for model in list(self._model_queues)
            if model not in catalogue.names
        ]
        for model in sorted(self._wanted(catalogue) - self._model_queues.keys()):
            self._add(model)
        outdated = [
            name
            for name in self.pullers
            if name not in self._model_queues or self._versions.of(name) != before.of(name)
        ]
        closing += map(self._detach, outdated)
        self._pull_all(catalogue.router)
        for tasks in closing:
            await tasks.close()

    def waits_for(self, puller: JobPuller) -> ModelQueue:
        """Return the queue in which jobs under a puller's name will probably wait.

        That is the stable version's queue if the name stands for several.
        """
        if puller.model in self._versions.models():
            stable = self._versions.stable(puller.model, self._rollouts.rollouts)
            return self._model_queues.get(stable, puller.model_queue)
        return puller.model_queue

    def has_versions(self, model: str) -> bool:
        """Return whether a model is one of several versions, whose jobs come under other names."""
        return self._versions.family(model) != (model,)

    def is_candidate(self, model: str) -> bool:
        """Return whether a model is the candidate of an open rollout."""
        every = self._rollouts.rollouts.values()
        return any(one.is_open and one.candidate == model for one in every)

    def _wanted(self, catalogue: ModelCatalogue) -> set[str]:
        """Return the models to serve.

        All versions of a model are served, as jobs name the model.
        """
        names = self._state.config.models or catalogue.names
        family = self._versions.family
        return {one for name in names for one in family(name)} & set(catalogue.names)

    def _add(self, model: str) -> None:
        self.queue_estimates[model] = QueueEstimate(self._state, self._state.add_model(model))

    def _remove(self, model: str) -> Tasks:
        del self.queue_estimates[model]
        self._state.remove_model(model)
        place.finish_unwanted(self._state, self._state.gone_queues[model])
        return self._detach(model)

    def _pull_all(self, router: Router | None) -> None:
        """Add missing pullers for every name that jobs may have."""
        versions = self._versions
        chooser = VersionChooser(versions, self._rollouts)
        for model in versions.models():
            served = [one for one in versions.of(model) if one in self._model_queues]
            for name in versions.names_of(model) if served else ():
                if name not in self.pullers:
                    self._add_puller(RoutingPuller(self._state, name, served, chooser))
        for name in self._model_queues.keys() - self.pullers.keys():
            self._add_puller(JobPuller(self._state, name, [name]))
        self._route(router, chooser)

    def _route(self, router: Router | None, versions: VersionChooser) -> None:
        """Add pullers for routes that may lead to a served model."""
        if router is None:
            return
        chooser = ModelChooser(router, self.model_state, versions)
        for name, route in router.routes.items():
            every = chain.from_iterable(map(self._versions.family, route.models))
            models = [one for one in every if one in self._model_queues]
            if models:
                self._add_puller(RoutingPuller(self._state, name, models, chooser))

    def _add_puller(self, puller: JobPuller) -> None:
        self.pullers[puller.model] = puller
        if self._is_running:
            self._start(puller.model)

    def _start(self, name: str) -> None:
        tasks = self._tasks[name] = Tasks()
        loops = [tasks.spawn(self.pullers[name].run(), "pull")]
        if name in self.queue_estimates:
            loops.append(tasks.spawn(self.queue_estimates[name].run(), "publish positions"))
        for loop in loops:
            loop.add_done_callback(self._note_failure)

    def _detach(self, name: str) -> Tasks:
        """Remove a puller and return its tasks, which the caller closes."""
        self.pullers.pop(name).detach()
        return self._tasks.pop(name, None) or Tasks()

    def _note_failure(self, loop: asyncio.Task[None]) -> None:
        assert self._failure is not None
        if not loop.cancelled() and not self._failure.done():
            error = loop.exception()
            if error is None:
                self._failure.set_result(None)
            else:
                self._failure.set_exception(error)


def _all_names(catalogue: ModelCatalogue) -> frozenset[str]:
    routes = () if catalogue.router is None else catalogue.router.routes
    versions = Versions(catalogue.names)
    several = chain.from_iterable(map(versions.names_of, versions.models()))
    return frozenset((*catalogue.names, *several, *routes))
