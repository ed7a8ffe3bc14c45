"""Rollouts of versions in Redis, and each process's copy of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from millrace.bus import redis_keys
from millrace.bus.fleet.watched_store import WatchedStore
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, Script
from millrace.schemas.models.rollouts import (
    Rollout,
    RolloutConflictError,
    RolloutNotFoundError,
    RolloutReport,
    VersionFigures,
)

# KEYS: the rollouts, the change counter, the figures. ARGV: model, JSON, former revision.
_PUT = Script(
    """
local former = redis.call('HGET', KEYS[1], ARGV[1])
local revision = former and cjson.decode(former).revision or 0
if revision ~= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('INCR', KEYS[2])
return 1
"""
)
# KEYS: the rollouts, the figures. ARGV: model, JSON, the revision that they belong to.
_PUT_FIGURES = Script(
    """
local rollout = redis.call('HGET', KEYS[1], ARGV[1])
if not rollout or cjson.decode(rollout).revision ~= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
)
_KEYS = [redis_keys.ROLLOUTS_KEY, redis_keys.ROLLOUT_CHANGES_KEY, redis_keys.ROLLOUT_FIGURES_KEY]

_decoder = msgspec.json.Decoder(Rollout)
_figures_decoder = msgspec.json.Decoder(tuple[VersionFigures, ...])


class RolloutStore:
    """Store of the latest rollout of each model.

    Calls raise RedisUnreachableError. It does not own the link.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def start(self, rollout: Rollout, former: Rollout | None = None) -> Rollout:
        """Start a rollout in place of ``former`` and return it as stored.

        Raises RolloutConflictError if ``former`` is open, or if another rollout was stored
        meanwhile.
        """
        if former is not None and former.is_open:
            raise RolloutConflictError(
                f"A rollout of {rollout.model} to {former.candidate} goes on; turn it back first, "
                "or wait for its end."
            )
        started = await self.change(former, rollout)
        if started is None:
            raise RolloutConflictError(
                f"Another rollout of {rollout.model} has just begun, or ended. Look at it, and try "
                "again."
            )
        return started

    async def change(self, before: Rollout | None, after: Rollout) -> Rollout | None:
        """Replace ``before`` by ``after`` and return it as stored; None if it was changed
        meanwhile."""
        revision = 0 if before is None else before.revision
        stored = msgspec.structs.replace(after, revision=revision + 1)
        encoded = msgspec.json.encode(stored)
        kept = await self._link.evaluate(_PUT, _KEYS, [after.model, encoded, revision])
        return stored if kept else None

    async def apply(self, model: str, change: Callable[[Rollout], Rollout | None]) -> Rollout:
        """Apply ``change`` to the latest rollout of a model and return the result as stored.

        Raises RolloutNotFoundError, or RolloutConflictError if ``change`` returns None.
        """
        while True:
            known = await self.find(model)
            if known is None:
                raise RolloutNotFoundError(model)
            changed = change(known)
            if changed is None:
                raise RolloutConflictError(f"There is nothing to turn back to of {model!r:.200}.")
            stored = await self.change(known, changed)
            if stored is not None:
                return stored

    async def find(self, model: str) -> Rollout | None:
        """Return the latest rollout of a model."""
        found: bytes | None = await self._link.call("HGET", redis_keys.ROLLOUTS_KEY, model)
        return None if found is None else _decoder.decode(found)

    async def all(self) -> list[Rollout]:
        """Return all rollouts, sorted by model."""
        found: list[bytes] = await self._link.call("HVALS", redis_keys.ROLLOUTS_KEY)
        return sorted(map(_decoder.decode, found), key=lambda one: one.model)

    async def number_of_changes(self) -> int:
        """Return a number that differs after each change."""
        found: bytes | None = await self._link.call("GET", redis_keys.ROLLOUT_CHANGES_KEY)
        return int(found or 0)

    async def put_figures(self, rollout: Rollout, figures: Sequence[VersionFigures]) -> None:
        """Store the figures of a rollout's versions, unless it was changed meanwhile."""
        keys = [redis_keys.ROLLOUTS_KEY, redis_keys.ROLLOUT_FIGURES_KEY]
        encoded = msgspec.json.encode(figures)
        await self._link.evaluate(_PUT_FIGURES, keys, [rollout.model, encoded, rollout.revision])

    async def report(self, model: str) -> RolloutReport | None:
        """Return the latest rollout of a model with its figures."""
        rollout = await self.find(model)
        if rollout is None:
            return None
        found: bytes | None = await self._link.call("HGET", redis_keys.ROLLOUT_FIGURES_KEY, model)
        figures = () if found is None else _figures_decoder.decode(found)
        return RolloutReport(rollout=rollout, figures=figures)

    async def reports(self) -> list[RolloutReport]:
        """Return the reports of all models, sorted by name."""
        found = [await self.report(one.model) for one in await self.all()]
        return [one for one in found if one is not None]


class RolloutDirectory(WatchedStore[Rollout]):
    """Rollouts that one process knows."""

    def __init__(self, link: RedisLink | None, clock: Clock) -> None:
        """Create a directory; empty without a link."""
        self.store = None if link is None else RolloutStore(link)
        super().__init__(self.store, clock, "rollouts", lambda one: one.model)

    @property
    def rollouts(self) -> Mapping[str, Rollout]:
        """Latest rollouts by model."""
        return self._items
