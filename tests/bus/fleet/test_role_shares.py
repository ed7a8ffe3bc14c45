"""Number of workers of each role as the fleet grows and shrinks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millrace.bus.fleet.role_shares import RoleShares
from millrace.schemas.engines import WorkerRole

BOTH, PREFILL, DECODE = WorkerRole.BOTH, WorkerRole.PREFILL, WorkerRole.DECODE
MIXES = st.lists(st.sampled_from(WorkerRole), min_size=1, max_size=12).map(tuple)


def test_without_roles_all_have_both() -> None:
    assert RoleShares().next([]) is BOTH
    assert RoleShares().next([PREFILL]) is BOTH
    assert RoleShares().spare([BOTH, BOTH]) is BOTH


def test_shares_of_one_to_three_hold_as_workers_come_and_go() -> None:
    shares = RoleShares((PREFILL, DECODE, DECODE, DECODE))
    present: list[WorkerRole] = []
    for _ in range(8):
        present.append(shares.next(present))
    assert [role is PREFILL for role in present].count(True) == 2
    assert Counter(present[:4]) == {PREFILL: 1, DECODE: 3}
    left = list(present)
    while len(left) > 1:
        left.remove(shares.spare(left))
        if len(left) >= 2:
            assert set(left) == {PREFILL, DECODE}, left


@given(mix=MIXES, number=st.integers(1, 60))
def test_each_role_is_within_one_worker_of_its_share(
    mix: tuple[WorkerRole, ...], number: int
) -> None:
    shares = RoleShares(mix)
    present: list[WorkerRole] = []
    for _ in range(number):
        present.append(shares.next(present))
    _check(mix, present)
    while len(present) > 1:
        present.remove(shares.spare(present))
        _check(mix, present)


def _check(mix: tuple[WorkerRole, ...], present: list[WorkerRole]) -> None:
    there, wanted = Counter(present), Counter(mix)
    for role in WorkerRole:
        share = wanted[role] / len(mix) * len(present)
        assert abs(there[role] - share) <= 1.0 + 1e-9, (role, there)


def test_a_role_that_nobody_asked_for_goes_first() -> None:
    assert RoleShares((PREFILL, DECODE)).spare([PREFILL, BOTH, DECODE]) is BOTH


def test_where_roles_change_the_shares_of_now_count() -> None:
    present = [PREFILL, DECODE, DECODE, DECODE]
    assert RoleShares((PREFILL, DECODE)).next(present) is PREFILL
    assert RoleShares((PREFILL, DECODE), may_change=True).next(present) is DECODE
    assert RoleShares((PREFILL, DECODE), may_change=True).spare(present) is DECODE
    assert RoleShares((PREFILL, DECODE), may_change=True).next([DECODE]) is PREFILL
