"""Poison pills: the request that is blamed for the death of workers."""

from __future__ import annotations

from millrace.scheduler.jobs.scheduled_job import MAX_FAILURES, PoisonPillDetector, PoisonSuspicion


def test_the_only_job_without_progress_is_blamed_at_the_second_death() -> None:
    bad, good = PoisonSuspicion(), PoisonSuspicion()
    for death in (1, 2):
        detector = PoisonPillDetector([bad, good])
        detector.report(bad, progressed=False)
        assert not detector.closed.is_set()
        detector.report(good, progressed=True)
        assert detector.closed.is_set()
        assert bad.failures == death
    assert bad.failures >= MAX_FAILURES
    assert good.failures == 0


def test_several_suspects_share_the_blame() -> None:
    suspects = [PoisonSuspicion(), PoisonSuspicion()]
    for _ in range(3):
        detector = PoisonPillDetector(suspects)
        for suspect in suspects:
            detector.report(suspect, progressed=False)
    assert all(suspect.failures == 1.5 for suspect in suspects)


def test_progress_clears_a_suspect() -> None:
    one = PoisonSuspicion()
    PoisonPillDetector([one]).report(one, progressed=False)
    assert one.failures == 1
    PoisonPillDetector([one]).report(one, progressed=True)
    assert one.failures == 0


def test_a_later_death_closes_the_earlier_case() -> None:
    one, other = PoisonSuspicion(), PoisonSuspicion()
    first = PoisonPillDetector([one, other])
    first.report(other, progressed=True)
    second = PoisonPillDetector([one])
    assert first.closed.is_set()
    second.report(one, progressed=False)
    second.report(one, progressed=False)
    assert one.failures == 1
