"""The models that one scheduler serves: for each a queue, an estimate of its waits, and a puller.
Models come and go as the catalogue says."""

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
    """The ``names`` of all models that there are. ``load`` may block; ``router`` chooses for the
    names that stand for several models. ``trusts_templates``: jobs may bring chat templates."""

    names: Collection[str]
    load: Callable[[str], Preparer]
    router: Router | None = None
    trusts_templates: bool = False


class ServedModels:
    """Of the catalogue the models that the configuration names, with all versions of each, or all
    models if it names none.

    ``known_names`` are all names that the catalogue knows. ``queue_estimates`` and ``pullers`` have
    the models that are served now; pullers are also by the names that leave the model, or its
    version, open. The jobs of a model that has gone are ended as soon as they are seen. Owns the
    tasks that pull and estimate. Raises ModelNotFoundError if a model of the configuration is not
    there.
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
        """How a model stands for a tenant, of several versions the stable one; what is not served
        here as if it were idle."""
        if model in self._versions.models():
            model = self._versions.stable(model, self._rollouts.rollouts)
        queue_estimate = self.queue_estimates.get(model)
        return ModelState() if queue_estimate is None else queue_estimate.model_state(tier, tenant)

    async def run(self) -> None:
        """Pull until it is cancelled. Raises what ends one of the loops."""
        self._failure = asyncio.get_running_loop().create_future()
        self._is_running = True
        for name in self.pullers:
            self._start(name)
        await self._failure

    async def close(self) -> None:
        """Pull nothing any more."""
        self._is_running = False
        for tasks in self._tasks.values():
            await tasks.close()

    async def follow(self, catalogue: ModelCatalogue, changed: Collection[str]) -> None:
        """Serve what the catalogue says from now on; ``changed`` are the names of models that are
        new in it, gone from it, or not as they were. The jobs of those that have gone are ended."""
        self._state.model_cache.change(catalogue.load, changed)
        self.known_names = _all_names(catalogue)
        before, self._versions = self._versions, Versions(catalogue.names)
        # All are in place again before anything is waited for.
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
        """The queue that jobs wait for which are in the queue under the name of a puller, as
        far as anybody knows: that of the stable version, where the name stands for several."""
        if puller.model in self._versions.models():
            stable = self._versions.stable(puller.model, self._rollouts.rollouts)
            return self._model_queues.get(stable, puller.model_queue)
        return puller.model_queue

    def has_versions(self, model: str) -> bool:
        """Whether a model is one version of several, so that jobs of it come under other names."""
        return self._versions.family(model) != (model,)

    def is_candidate(self, model: str) -> bool:
        """Whether a rollout is to give a model its requests."""
        every = self._rollouts.rollouts.values()
        return any(one.is_open and one.candidate == model for one in every)

    def _wanted(self, catalogue: ModelCatalogue) -> set[str]:
        """Who serves a version serves all of its model's: jobs come under the model's name."""
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
        """Have a puller by every name that jobs may have, where there is none."""
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
        """Pull what leaves the model open, if any model that it may get is served here."""
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
        """Pull under a name no more; what did so is to be closed."""
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
