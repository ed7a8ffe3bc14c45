"""Rollout watch: advance, complete or abort rollouts by the observed outcomes of their versions."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from millrace.bus.fleet.rollouts import RolloutStore
from millrace.registry.rollouts.abort_rule import Seen, VersionOutcome
from millrace.registry.rollouts.decisions import Situation, decide
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.runtime.tasks import Tasks
from millrace.scheduler.dispatch.queue_estimate import QueueEstimate
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import AnswerTimes
from millrace.schemas.models.rollouts import Rollout, RolloutState, VersionFigures
from millrace.schemas.records import Status

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# Outcomes kept of each version: enough for percentiles, an hour at one request a second.
_MAX_OUTCOMES = 4_096
_ERRORS = frozenset({Status.FAILED, Status.EXPIRED, Status.SHED})
# Ends without a worker that count against a version. Other codes are the caller's fault.
_CODES = frozenset({"queue_full", "overloaded", "poison"})


class RolloutWatch:
    """Rollout watch of one scheduler.

    Every scheduler hears how requests end and decides by itself. It changes a rollout in the store
    only if the store still has the revision that it read. A scheduler that sees too few requests
    aborts nothing, and any scheduler that sees a breach aborts the rollout. Jobs that end in
    another scheduler without a worker are not seen here. Jobs that end here without a worker count
    only if the version is to blame. Times are this machine's: a rollout's age counts from when this
    scheduler first saw its present revision.

    ``num_ended`` counts the rollouts that this scheduler ended, by model and state. ``start`` makes
    the task, ``close`` ends it.
    """

    def __init__(self, state: SchedulerState, estimates: Mapping[str, QueueEstimate]) -> None:
        self._state = state
        self._rollouts = state.directories.rollouts
        self._estimates = estimates
        self._clock = state.clock
        self._outcomes: dict[str, deque[VersionOutcome]] = {}
        self._num_finished: Counter[tuple[str, Status, str]] = Counter()
        self._stranded_since_s: dict[str, float] = {}
        # Time at which each (model, revision) was first seen, by this machine's clock.
        self._seen_ns: dict[tuple[str, int], int] = {}
        self.num_ended: Counter[tuple[str, RolloutState]] = Counter()
        self._tasks = Tasks()

    def start(self) -> None:
        if self._rollouts.store is not None:
            self._tasks.repeat(self.look, _LOOK_EVERY_S, self._clock, "drive rollouts")

    async def close(self) -> None:
        await self._tasks.close()

    def open(self) -> Iterator[Rollout]:
        """Yield open rollouts."""
        return (one for one in self._rollouts.rollouts.values() if one.is_open)

    def note(self, version: str, answer: AnswerTimes | None) -> None:
        """Record how a worker of ``version`` ended a request.

        None: an attempt ended, not the request.
        """
        if not self._rollouts.rollouts or answer is None:
            return
        if answer.status is Status.CANCELLED or not self._is_watched(version):
            return
        is_error = answer.status in _ERRORS
        times = (answer.ttft_ms or None, answer.tpot_ms or None, answer.total_ms or None)
        self._add(version, VersionOutcome(self._clock.now_ns(), is_error, *times))

    async def look(self) -> None:
        """Decide on every open rollout."""
        await self._rollouts.look()
        self._count_finished()
        rollouts, store = list(self.open()), self._rollouts.store
        watched = {name for one in rollouts for name in (one.stable, one.candidate)}
        for version in self._outcomes.keys() - watched:
            del self._outcomes[version]
        current = {(one.model, one.revision) for one in rollouts}
        self._seen_ns = {key: at_ns for key, at_ns in self._seen_ns.items() if key in current}
        assert store is not None
        try:
            for rollout in rollouts:
                await self._decide(store, rollout)
        except RedisUnreachableError:
            return  # the link logs it once

    async def _decide(self, store: RolloutStore, rollout: Rollout) -> None:
        now_ns = self._clock.now_ns()
        seen_ns = self._seen_ns.setdefault((rollout.model, rollout.revision), now_ns)
        situation = self._situation(rollout, seen_ns)
        changed = decide(replace(rollout, stepped_ns=seen_ns), situation, now_ns)
        if changed is None:
            seen = {rollout.candidate: situation.candidate, rollout.stable: situation.stable}
            figures = [_figures(version, one) for version, one in seen.items()]
            await store.put_figures(rollout, figures)
            return
        stored = await store.change(rollout, changed)
        await self._rollouts.look()
        if stored is None:
            return
        log = logger.warning if stored.state is RolloutState.ABORTED else logger.info
        log(
            "a rollout has changed",
            extra={
                "model": stored.model,
                "candidate": rollout.candidate,
                "state": stored.state.value,
                "percent": stored.percent,
                "reason": stored.reason,
            },
        )
        if not stored.is_open:
            self.num_ended[stored.model, stored.state] += 1

    def _situation(self, rollout: Rollout, since_ns: int) -> Situation:
        has_worker = self._state.fleet.num_accepting(rollout.candidate) > 0
        now_s = self._clock.monotonic()
        estimate = self._estimates.get(rollout.candidate)
        if has_worker or estimate is None or not estimate.num_queued:
            self._stranded_since_s.pop(rollout.candidate, None)
            stranded_s = 0.0
        else:
            since_s = self._stranded_since_s.setdefault(rollout.candidate, now_s)
            stranded_s = now_s - since_s
        candidate = Seen.of(self._since(rollout.candidate, since_ns))
        stable = Seen.of(self._since(rollout.stable, since_ns))
        if stable.num_requests < max(rollout.min_requests, 1):
            # The candidate gets nearly all requests: older outcomes are better than a few new ones.
            stable = Seen.of(self._since(rollout.stable, 0))
        return Situation(has_worker, stranded_s, candidate, stable)

    def _since(self, version: str, since_ns: int) -> list[VersionOutcome]:
        return [one for one in self._outcomes.get(version, ()) if one.at_ns >= since_ns]

    def _count_finished(self) -> None:
        """Count the jobs that ended here without a worker since the last look."""
        now_ns = self._clock.now_ns()
        for key, count in self._state.num_ended.items():
            version, _, code = key
            num_new, self._num_finished[key] = count - self._num_finished[key], count
            if code in _CODES and self._is_watched(version):
                for _ in range(min(num_new, _MAX_OUTCOMES)):
                    self._add(version, VersionOutcome(now_ns, is_error=True))

    def _add(self, version: str, outcome: VersionOutcome) -> None:
        self._outcomes.setdefault(version, deque(maxlen=_MAX_OUTCOMES)).append(outcome)

    def _is_watched(self, version: str) -> bool:
        return any(version in (one.stable, one.candidate) for one in self.open())


def _figures(version: str, seen: Seen) -> VersionFigures:
    times = {name: value for name, value in seen.figures.items() if name != "error_rate"}
    return VersionFigures(
        version=version,
        num_requests=seen.num_requests,
        error_rate=seen.figures.get("error_rate", 0.0),
        percentiles_ms=times,
    )
