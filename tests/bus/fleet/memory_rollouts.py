"""Rollouts as Redis would keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from millrace.bus.fleet.rollouts import RolloutDirectory, RolloutStore
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.models.rollouts import Rollout, RolloutReport, VersionFigures


class MemoryRolloutStore(RolloutStore):
    """Rollout store in this process's memory."""

    def __init__(self) -> None:
        super().__init__(cast("RedisLink", None))
        self._rollouts: dict[str, Rollout] = {}
        self._figures: dict[str, tuple[VersionFigures, ...]] = {}
        self._num_changes = 0

    async def change(self, before: Rollout | None, after: Rollout) -> Rollout | None:
        known = self._rollouts.get(after.model)
        revision = 0 if before is None else before.revision
        if (0 if known is None else known.revision) != revision:
            return None
        stored = self._rollouts[after.model] = replace(after, revision=revision + 1)
        self._figures.pop(after.model, None)
        self._num_changes += 1
        return stored

    async def find(self, model: str) -> Rollout | None:
        return self._rollouts.get(model)

    async def all(self) -> list[Rollout]:
        return [self._rollouts[model] for model in sorted(self._rollouts)]

    async def number_of_changes(self) -> int:
        return self._num_changes

    async def put_figures(self, rollout: Rollout, figures: Sequence[VersionFigures]) -> None:
        if self._rollouts[rollout.model].revision == rollout.revision:
            self._figures[rollout.model] = tuple(figures)

    async def report(self, model: str) -> RolloutReport | None:
        rollout = self._rollouts.get(model)
        if rollout is None:
            return None
        return RolloutReport(rollout=rollout, figures=self._figures.get(model, ()))


class MemoryRollouts(RolloutDirectory):
    """A directory over a ``MemoryRolloutStore``."""

    def __init__(self, store: MemoryRolloutStore, clock: Clock) -> None:
        super().__init__(None, clock)
        self.store = self._watched = store
