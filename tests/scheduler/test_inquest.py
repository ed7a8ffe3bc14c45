"""Which request is blamed for the death of workers."""

from __future__ import annotations

from scheduler.jobs.poison_pills import MAX_STRIKES, Inquest
from tests.scheduler.entries import entry


def test_the_only_one_that_did_not_go_on_is_to_blame_at_the_second_death() -> None:
    bad, good = entry(), entry()
    for death in (1, 2):
        inquest = Inquest([bad, good])
        inquest.report(bad, progressed=False)
        assert not inquest.closed.is_set()
        inquest.report(good, progressed=True)
        assert inquest.closed.is_set()
        assert bad.strikes == death
    assert bad.strikes >= MAX_STRIKES
    assert good.strikes == 0


def test_several_suspects_share_the_blame() -> None:
    suspects = [entry(), entry()]
    for _ in range(3):
        inquest = Inquest(suspects)
        for suspect in suspects:
            inquest.report(suspect, progressed=False)
    assert all(suspect.strikes == 1.5 for suspect in suspects)


def test_going_on_clears_of_all() -> None:
    one = entry()
    Inquest([one]).report(one, progressed=False)
    assert one.strikes == 1
    Inquest([one]).report(one, progressed=True)
    assert one.strikes == 0


def test_a_later_death_closes_the_earlier_case() -> None:
    one, other = entry(), entry()
    first = Inquest([one, other])
    first.report(other, progressed=True)
    second = Inquest([one])
    assert first.closed.is_set()
    second.report(one, progressed=False)
    second.report(one, progressed=False)
    assert one.strikes == 1
