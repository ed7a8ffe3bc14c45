"""Role balance: workers change roles where one kind of work waits for workers.

Under a constant load they change in one direction only, and each role keeps a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.scheduler.placement.role_balance import (
    LASTS_S,
    LONGEST_WAIT_S,
    MOST_OCCUPIED,
    MOST_SLOWED,
    REST_S,
    TURN_S,
    Need,
    RoleBalancer,
    RoleChange,
    RoleLoad,
    WorkerLoad,
    needed,
)
from millrace.schemas.engines import WorkerRole

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
_LOOK_S = 0.25
_LATE = RoleLoad(4, wait_s=2 * LONGEST_WAIT_S, busy=1.0)
_IDLE = RoleLoad(12)


# --- what is needed ---


def test_a_role_that_is_short_gets_workers_of_one_that_has_time() -> None:
    assert needed(_LATE, _IDLE) == Need(_PREFILL, 4)
    full = RoleLoad(4, occupied=MOST_OCCUPIED + 0.1)
    assert needed(_IDLE, full) == Need(_DECODE, 4)
    assert needed(_IDLE, _LATE) == Need(_DECODE, 4)
    slow = RoleLoad(4, growth=2.1)
    assert needed(_IDLE, slow) == Need(_DECODE, 4)
    assert needed(_IDLE, RoleLoad(4, hindered=0.3, growth=1.5)) == Need(_DECODE, 4)
    assert needed(_IDLE, RoleLoad(4, hindered=0.2, growth=1.5)) is None


def test_nothing_is_needed_where_neither_is_short_or_both_are() -> None:
    assert needed(_IDLE, _IDLE) is None
    assert needed(RoleLoad(4, wait_s=LONGEST_WAIT_S, busy=0.9), _IDLE) is None
    assert needed(_LATE, _LATE) is None


def test_workers_that_their_role_needs_stay() -> None:
    for busy in (RoleLoad(4, busy=0.6), RoleLoad(4, occupied=0.6)):
        assert needed(_LATE, busy) is None
    assert needed(_LATE, RoleLoad(4, busy=0.5)) == Need(_PREFILL, 1)
    assert needed(_LATE, RoleLoad(1)) is None


_SHARES = st.floats(0.0, 1.0)
_LOADS = st.builds(
    RoleLoad,
    st.integers(0, 200),
    st.floats(0.0, 10.0),
    _SHARES,
    _SHARES,
    st.floats(1.0, 5.0),
    _SHARES,
)


@given(_LOADS, _LOADS)
def test_a_role_that_gives_workers_keeps_enough(prefill: RoleLoad, decode: RoleLoad) -> None:
    need = needed(prefill, decode)
    if need is None:
        return
    giver = decode if need.role is _PREFILL else prefill
    left = giver.num_workers - need.num_workers
    assert left >= 1
    more = giver.num_workers / left
    assert giver.busy * more < 1
    if need.role is _PREFILL:
        assert giver.occupied * more < MOST_OCCUPIED
        assert giver.slowed * more < MOST_SLOWED


# --- over time ---


@dataclass
class _Fleet:
    """Workers under a constant load.

    Every second brings prompts of ``prompt_s`` to prefill workers and of ``short_s`` to decode
    workers, in seconds of one worker each. Streams use ``occupied_workers`` in all. ``work_s`` is
    the waiting work of each kind.
    """

    num_prefill: int
    num_decode: int
    prompt_s: float
    short_s: float
    occupied_workers: float
    balancer: RoleBalancer = field(default_factory=RoleBalancer)
    work_s: dict[WorkerRole, float] = field(default_factory=lambda: {_PREFILL: 0.0, _DECODE: 0.0})
    now_s: float = 100.0
    changes: list[tuple[float, RoleChange]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = {f"p{n}": _PREFILL for n in range(self.num_prefill)}
        self.roles |= {f"d{n}": _DECODE for n in range(self.num_decode)}

    def num_of(self, role: WorkerRole) -> int:
        return sum(one is role for one in self.roles.values())

    def pass_s(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self._come(_PREFILL, self.prompt_s)
            self._come(_DECODE, self.short_s)
            found = self.balancer.look(self._loads(), self.now_s)
            for change in found:
                assert self.roles[change.worker_id] is change.from_role
                self.roles[change.worker_id] = change.role
                self.changes.append((self.now_s, change))
            self.now_s += _LOOK_S

    def _come(self, role: WorkerRole, per_s: float) -> None:
        backlog_s = self.work_s[role] + (per_s - self.num_of(role)) * _LOOK_S
        self.work_s[role] = max(backlog_s, 0.0)

    def _loads(self) -> list[WorkerLoad]:
        loads = []
        seen = {_PREFILL: 0, _DECODE: 0}
        for worker_id, role in self.roles.items():
            count = self.num_of(role)
            per_s = self.prompt_s if role is _PREFILL else self.short_s
            # So many of them have a prompt at hand at any moment, and all where some wait.
            num_busy = count if self.work_s[role] else round(min(per_s / count, 1.0) * count)
            ahead_s = self.work_s[role] / count + 0.1 if seen[role] < num_busy else 0.0
            seen[role] += 1
            occupied = min(self.occupied_workers / count, 1.0) if role is _DECODE else 0.0
            loads.append(WorkerLoad(worker_id, role, ahead_s, occupied, num_streams=seen[role] + 1))
        return loads


_COUNTS = st.integers(1, 24)


@settings(max_examples=10, deadline=None)
@given(_COUNTS, _COUNTS, st.floats(0.0, 30.0), st.floats(0.0, 12.0), st.floats(0.0, 12.0))
def test_a_load_that_stays_as_it_is_moves_workers_one_way_and_then_none(
    num_prefill: int, num_decode: int, prompt_s: float, short_s: float, occupied: float
) -> None:
    fleet = _Fleet(num_prefill, num_decode, prompt_s, short_s, occupied)
    fleet.pass_s(150.0)
    assert len({change.role for _, change in fleet.changes}) <= 1
    assert fleet.num_of(_PREFILL) >= 1
    assert fleet.num_of(_DECODE) >= 1
    num_changes = len(fleet.changes)
    assert num_changes < num_prefill + num_decode
    fleet.pass_s(100.0)
    assert len(fleet.changes) == num_changes, "it has settled"


@settings(max_examples=30, deadline=None)
@given(_COUNTS, _COUNTS, st.floats(0.0, 0.9), st.floats(0.0, 0.7))
def test_a_fleet_with_enough_workers_changes_nothing(
    num_prefill: int, num_decode: int, busy: float, occupied: float
) -> None:
    fleet = _Fleet(num_prefill, num_decode, busy * num_prefill, 0.0, occupied * num_decode)
    fleet.pass_s(60.0)
    assert not fleet.changes


def test_a_wrong_split_becomes_one_that_carries_the_load() -> None:
    fleet = _Fleet(4, 12, prompt_s=10.0, short_s=0.0, occupied_workers=1.5)
    fleet.pass_s(60.0)
    assert fleet.num_of(_PREFILL) >= 10
    assert not fleet.work_s[_PREFILL]
    fleet = _Fleet(12, 4, prompt_s=1.0, short_s=0.0, occupied_workers=6.0)
    fleet.pass_s(60.0)
    assert fleet.num_of(_DECODE) >= 8


def test_a_need_has_to_last_and_changes_are_apart() -> None:
    fleet = _Fleet(4, 12, prompt_s=40.0, short_s=0.0, occupied_workers=0.0)
    fleet.pass_s(40.0)
    times_s = sorted({at_s for at_s, _ in fleet.changes})
    assert times_s[0] - 100.0 >= LASTS_S
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert gaps_s
    assert all(gap_s >= REST_S for gap_s in gaps_s)


def test_a_load_that_turns_is_followed_later() -> None:
    fleet = _Fleet(4, 4, prompt_s=6.0, short_s=0.0, occupied_workers=0.0)
    fleet.pass_s(30.0)
    last_s = fleet.changes[-1][0]
    fleet.prompt_s, fleet.occupied_workers = 0.0, 3.0
    fleet.work_s[_PREFILL] = 0.0
    num_changes = len(fleet.changes)
    fleet.pass_s(60.0)
    at_s, change = fleet.changes[num_changes]
    assert change.role is _DECODE
    assert at_s - last_s >= TURN_S


def test_a_change_by_another_scheduler_is_waited_for() -> None:
    ahead = [WorkerLoad("p", _PREFILL, 9.0, 0.0)]
    others = [WorkerLoad(f"d{n}", _DECODE, 0.0, 0.0) for n in range(3)]
    balancer = RoleBalancer()
    balancer.look([*ahead, *others], 0.0)
    ahead.append(others.pop()._replace(role=_PREFILL, ahead_s=9.0))
    assert not balancer.look([*ahead, *others], LASTS_S + 0.1)
    assert not balancer.look([*ahead, *others], LASTS_S + REST_S)
    (change,) = balancer.look([*ahead, *others], LASTS_S + REST_S + 0.2)
    assert change == RoleChange("d0", _PREFILL, _DECODE)


def test_the_workers_that_lose_least_change() -> None:
    balancer = RoleBalancer()
    ahead = WorkerLoad("p", _PREFILL, 9.0, 0.0)
    streams = {"a": 3, "b": 1, "c": 1}
    others = [
        WorkerLoad(name, _DECODE, 0.0, 0.1, num_streams=count) for name, count in streams.items()
    ]
    balancer.look([ahead, *others], 0.0)
    (change,) = balancer.look([ahead, *others], LASTS_S)
    assert change.worker_id == "b"
    balancer = RoleBalancer()
    full = WorkerLoad("d", _DECODE, 0.0, 1.0)
    tokens = {"a": 30, "b": 20, "c": 10}
    others = [
        WorkerLoad(name, _PREFILL, 0.0, 0.0, num_prompt_tokens=count)
        for name, count in tokens.items()
    ]
    balancer.look([full, *others], 0.0)
    (change,) = balancer.look([full, *others], LASTS_S)
    assert change == RoleChange("c", _DECODE, _PREFILL)


def test_workers_for_both_are_left_alone() -> None:
    balancer = RoleBalancer()
    loads = [WorkerLoad("p", _PREFILL, 9.0, 0.0), WorkerLoad("b", WorkerRole.BOTH, 0.0, 0.0)]
    balancer.look(loads, 0.0)
    assert not balancer.look(loads, LASTS_S)
