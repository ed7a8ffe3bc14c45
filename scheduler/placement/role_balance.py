"""Role balance: which workers change between prefill and decode. Pure: the caller passes the time.

A role is *short* of workers while its prompts wait too long. ``decode`` is also short while streams
take more than twice their time alone, or while slots or KV cache are nearly used up. The other role
then gives workers as long as the rest of it stays calm: its load fills at most ``_CALM`` of the
remaining workers. This bound is below the bounds for a shortage. So under a constant load workers
move in one direction only, until no role is short or the other role can spare none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millrace.schemas.engines import WorkerRole

# A role is short of workers if the mean work ahead of a prompt exceeds this time. ``decode`` is
# also short if this share of its slots or KV cache is used.
LONGEST_WAIT_S = 0.5
MOST_OCCUPIED = 0.75
# ``decode`` is also short if prompts and other streams take more than this share of a stream's
# time. This share grows in proportion to the load. The slowdown does not, as slower streams also
# overlap more.
MOST_SLOWED = 0.5
# Highest load of a role's workers after it has given some.
_CALM = 0.7
# Time constant of the mean loads, and the time for which a need must last.
_MEAN_S = 2.0
LASTS_S = 2.0
# Minimum time between two changes, and between changes in opposite directions.
REST_S = 5.0
TURN_S = 30.0
# Highest share of the workers with roles that changes at a time. At least one changes.
_STEP_SHARE = 1 / 4

_OTHER = {WorkerRole.PREFILL: WorkerRole.DECODE, WorkerRole.DECODE: WorkerRole.PREFILL}


class WorkerLoad(NamedTuple):
    """Load of a worker that has a role and takes work.

    It computes and pulls prompts for ``ahead_s`` before it starts a new one. ``occupied`` is the
    used share of its slots or of its KV cache, whichever is higher. Its steps are ``growth`` times
    as long as with one stream. ``num_streams`` and ``num_prompt_tokens`` (still to compute) are
    exactly as reported, so all schedulers choose the same workers.
    """

    worker_id: str
    role: WorkerRole
    ahead_s: float
    occupied: float
    growth: float = 1.0
    num_streams: int = 0
    num_prompt_tokens: int = 0


class RoleLoad(NamedTuple):
    """Mean load of a role's workers.

    A prompt waits ``wait_s``. The share ``busy`` of the workers has prompts to compute. The share
    ``occupied`` of slots or KV cache is used. Steps are ``growth`` times as long as with one
    stream. ``hindered`` is the share of workers that are busy and also decode several streams.
    """

    num_workers: int
    wait_s: float = 0.0
    busy: float = 0.0
    occupied: float = 0.0
    growth: float = 1.0
    hindered: float = 0.0

    @property
    def slowed(self) -> float:
        """Share of a stream's time that prompts and other streams take."""
        return 1 - (1 - self.hindered) / max(self.growth, 1.0)


class RoleChange(NamedTuple):
    """Role change of a worker."""

    worker_id: str
    role: WorkerRole
    from_role: WorkerRole


class Need(NamedTuple):
    """Need for ``num_workers`` more workers in a role, taken from the other role."""

    role: WorkerRole
    num_workers: int


def needed(prefill: RoleLoad, decode: RoleLoad) -> Need | None:
    """Return the role that needs workers the other can spare; None if neither or both are short."""
    is_prefill_short = prefill.wait_s > LONGEST_WAIT_S
    is_decode_short = (
        decode.wait_s > LONGEST_WAIT_S
        or decode.occupied > MOST_OCCUPIED
        or decode.slowed > MOST_SLOWED
    )
    if is_prefill_short == is_decode_short:
        return None
    if is_prefill_short:
        role, share, num_workers = WorkerRole.PREFILL, decode_share(decode), decode.num_workers
    else:
        role, share, num_workers = WorkerRole.DECODE, prefill.busy, prefill.num_workers
    step = max(1, int(_STEP_SHARE * (prefill.num_workers + decode.num_workers)))
    num_spare = math.floor(num_workers * (1 - share / _CALM) + 1e-9)
    count = min(step, num_spare, num_workers - 1)
    return Need(role, count) if count > 0 else None


def decode_share(decode: RoleLoad) -> float:
    """Return the share of its workers that a decode load fills.

    It is the maximum of prompts, slots or KV cache, and the streams' lost time. The latter is
    scaled so that its bound for a shortage equals that of the slots.
    """
    return max(decode.busy, decode.occupied, decode.slowed / MOST_SLOWED * MOST_OCCUPIED)


class RoleBalancer:
    """Role balancer of one model's workers. Call ``look`` a few times a second."""

    def __init__(self) -> None:
        self._means = {role: RoleLoad(0) for role in _OTHER}
        self._looked_s: float | None = None
        self._roles: dict[str, WorkerRole] = {}
        self._need: tuple[WorkerRole, float] | None = None
        self._changed: tuple[WorkerRole, float] | None = None

    def look(self, workers: Iterable[WorkerLoad], now_s: float) -> list[RoleChange]:
        """Return the role changes to make now, of the workers with the least load.

        A change by any scheduler, seen in the workers' roles, starts the rest period.
        """
        workers = [worker for worker in workers if worker.role in _OTHER]
        self._note_changes(workers, now_s)
        self._mean(workers, now_s)
        need = needed(self._means[WorkerRole.PREFILL], self._means[WorkerRole.DECODE])
        if need is None:
            self._need = None
            return []
        if self._need is None or self._need[0] is not need.role:
            self._need = (need.role, now_s)
        if now_s - self._need[1] < LASTS_S or now_s < self._rests_until_s(need.role):
            return []
        return _changes(workers, need)

    def note_change(self, role: WorkerRole, now_s: float) -> None:
        """Record the latest change of roles, by an operator or this process: its role and time."""
        self._changed = (role, now_s)

    def _note_changes(self, workers: Sequence[WorkerLoad], now_s: float) -> None:
        roles = {worker.worker_id: worker.role for worker in workers}
        for worker_id, role in roles.items():
            if self._roles.get(worker_id, role) is not role:
                self.note_change(role, now_s)
        self._roles = roles

    def _rests_until_s(self, role: WorkerRole) -> float:
        if self._changed is None:
            return -math.inf
        before, changed_s = self._changed
        return changed_s + (REST_S if before is role else TURN_S)

    def _mean(self, workers: Sequence[WorkerLoad], now_s: float) -> None:
        passed_s = math.inf if self._looked_s is None else now_s - self._looked_s
        self._looked_s, weight = now_s, -math.expm1(-passed_s / _MEAN_S)
        for role, mean in self._means.items():
            now = _load_of([worker for worker in workers if worker.role is role])
            self._means[role] = RoleLoad(
                now.num_workers,
                mean.wait_s + weight * (now.wait_s - mean.wait_s),
                mean.busy + weight * (now.busy - mean.busy),
                mean.occupied + weight * (now.occupied - mean.occupied),
                mean.growth + weight * (now.growth - mean.growth),
                mean.hindered + weight * (now.hindered - mean.hindered),
            )


def _load_of(workers: Sequence[WorkerLoad]) -> RoleLoad:
    count = len(workers)
    if not count:
        return RoleLoad(0)
    return RoleLoad(
        count,
        sum(worker.ahead_s for worker in workers) / count,
        sum(worker.ahead_s > 0 for worker in workers) / count,
        sum(worker.occupied for worker in workers) / count,
        sum(worker.growth for worker in workers) / count,
        sum(worker.ahead_s > 0 and worker.num_streams > 1 for worker in workers) / count,
    )


def _changes(workers: Sequence[WorkerLoad], need: Need) -> list[RoleChange]:
    """Choose workers: those with the fewest streams to prefill, the fewest prompt tokens to
    decode."""
    givers = [worker for worker in workers if worker.role is _OTHER[need.role]]
    key = _by_streams if need.role is WorkerRole.PREFILL else _by_prompt_tokens
    chosen = sorted(givers, key=key)[: min(need.num_workers, len(givers) - 1)]
    return [RoleChange(worker.worker_id, need.role, worker.role) for worker in chosen]


def _by_streams(worker: WorkerLoad) -> tuple[int, str]:
    return worker.num_streams, worker.worker_id


def _by_prompt_tokens(worker: WorkerLoad) -> tuple[int, str]:
    return worker.num_prompt_tokens, worker.worker_id
