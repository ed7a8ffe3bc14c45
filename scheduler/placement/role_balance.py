"""Which workers change roles, where one kind of work waits for want of workers, and those of the
other role have time. Pure: the caller passes the time in.

A role is *short* of workers while its prompts wait too long, or, of ``decode``, while streams
are more than twice as slow as one alone would be, by prompts or by one another, or slots or KV
cache are nearly used up. The other one gives as many as leave it
calm: what its workers do then fills no more than ``_CALM`` of them. As this is less than makes a
role short, a load that stays as it is moves workers one way only, until nobody is short or those
of the other role are needed where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millrace.schemas.engines import WorkerRole

# A role is short of workers beyond so much work ahead of a prompt in the mean, and ``decode``
# beyond such a share of its slots or of its KV cache.
LONGEST_WAIT_S = 0.5
MOST_OCCUPIED = 0.75
# Of the time of streams such a share is others', beyond which ``decode`` is short, too. Unlike how
# slow they are it grows as load does, as slower streams are more at a time.
MOST_SLOWED = 0.5
# Workers are left so busy at most by those that go.
_CALM = 0.7
# Loads are means of about so long, and a need has to be there for so long.
_MEAN_S = 2.0
LASTS_S = 2.0
# Between two changes, and where the second one goes the other way.
REST_S = 5.0
TURN_S = 30.0
# At most such a share of the workers with roles changes at a time, and at least one.
_STEP_SHARE = 1 / 4

_OTHER = {WorkerRole.PREFILL: WorkerRole.DECODE, WorkerRole.DECODE: WorkerRole.PREFILL}


class WorkerLoad(NamedTuple):
    """A worker that takes work, with a role: it computes and pulls prompts for ``ahead_s`` before
    it comes to a new one, and uses a share ``occupied`` of its slots or of its KV cache, whichever
    is more; its steps are ``growth`` times as long as with one stream. By its own word alone it has
    ``num_streams`` and ``num_prompt_tokens`` to compute, so that all schedulers choose the same
    workers."""

    worker_id: str
    role: WorkerRole
    ahead_s: float
    occupied: float
    growth: float = 1.0
    num_streams: int = 0
    num_prompt_tokens: int = 0


class RoleLoad(NamedTuple):
    """The workers of one role in the mean: a prompt waits ``wait_s``, such a share is ``busy`` with
    prompts, such a share of slots or KV cache is ``occupied``, and steps are ``growth`` times as
    long as with one stream. ``hindered`` are those busy ones that others decode at."""

    num_workers: int
    wait_s: float = 0.0
    busy: float = 0.0
    occupied: float = 0.0
    growth: float = 1.0
    hindered: float = 0.0

    @property
    def slowed(self) -> float:
        """Which share of the time of streams is that of prompts and of other streams."""
        return 1 - (1 - self.hindered) / max(self.growth, 1.0)


class RoleChange(NamedTuple):
    """A worker gets another role."""

    worker_id: str
    role: WorkerRole
    from_role: WorkerRole


class Need(NamedTuple):
    """So many workers of the other one should have this role."""

    role: WorkerRole
    num_workers: int


def needed(prefill: RoleLoad, decode: RoleLoad) -> Need | None:
    """Which role is short of workers that the other can spare; None where neither is, or both."""
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
    """How much of its workers a load fills that decodes: prompts, slots, KV cache, or the time of
    streams, of which as much as makes ``decode`` short counts as much as that of slots."""
    return max(decode.busy, decode.occupied, decode.slowed / MOST_SLOWED * MOST_OCCUPIED)


class RoleBalancer:
    """Watches the workers of one model. ``look`` is to be called a few times a second."""

    def __init__(self) -> None:
        self._means = {role: RoleLoad(0) for role in _OTHER}
        self._looked_s: float | None = None
        self._roles: dict[str, WorkerRole] = {}
        self._need: tuple[WorkerRole, float] | None = None
        self._changed: tuple[WorkerRole, float] | None = None

    def look(self, workers: Iterable[WorkerLoad], now_s: float) -> list[RoleChange]:
        """Who should change now: those that lose least by it. A change that anybody made, as it
        shows in the workers' roles, makes all wait for the next one."""
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
        """Workers were given a role."""
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
    """Those with the fewest streams compute prompts, those with the least prompt work decode."""
    givers = [worker for worker in workers if worker.role is _OTHER[need.role]]
    key = _by_streams if need.role is WorkerRole.PREFILL else _by_prompt_tokens
    chosen = sorted(givers, key=key)[: min(need.num_workers, len(givers) - 1)]
    return [RoleChange(worker.worker_id, need.role, worker.role) for worker in chosen]


def _by_streams(worker: WorkerLoad) -> tuple[int, str]:
    return worker.num_streams, worker.worker_id


def _by_prompt_tokens(worker: WorkerLoad) -> tuple[int, str]:
    return worker.num_prompt_tokens, worker.worker_id
