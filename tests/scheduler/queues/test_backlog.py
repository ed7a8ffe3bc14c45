"""Backlog: a scheduler's estimate of the tenant queues of a model."""

from __future__ import annotations

from millrace.bus.job_queue import TenantQueue
from millrace.scheduler.queues.backlog import Backlog
from millrace.schemas.jobs import Tier
from tests.scheduler.scheduled_jobs import scheduled_job

TENANT_QUEUE = TenantQueue("m", Tier.FREE, "t")


def to_pull(backlog: Backlog) -> int:
    found = {
        pullable.tenant_queue: pullable.num_to_pull for pullable in backlog.to_pull(tuple(Tier))
    }
    assert all(type(count) is int for count in found.values()), "it goes into a request as it is"
    return found.get(TENANT_QUEUE, 0)


def test_news_are_not_undone_by_an_older_count() -> None:
    backlog = Backlog()
    backlog.published(TENANT_QUEUE)
    backlog.counted({}, 0.0)
    assert to_pull(backlog) == 1


def test_news_during_a_pull_that_finds_nothing_are_kept() -> None:
    backlog = Backlog()
    backlog.published(TENANT_QUEUE)
    backlog.pulling(TENANT_QUEUE)
    backlog.published(TENANT_QUEUE)
    backlog.pulled(TENANT_QUEUE, 1, 0, 0.0)
    assert to_pull(backlog) == 1
    backlog.pulling(TENANT_QUEUE)
    backlog.pulled(TENANT_QUEUE, 1, 0, 0.0)
    assert to_pull(backlog) == 0


def test_what_a_pull_does_not_find_is_somebody_elses() -> None:
    backlog = Backlog()
    backlog.counted({TENANT_QUEUE: 3}, 0.0)
    assert to_pull(backlog) == 3
    backlog.pulling(TENANT_QUEUE)
    assert to_pull(backlog) == 0
    backlog.pulled(TENANT_QUEUE, 3, 0, 0.0)
    backlog.counted({TENANT_QUEUE: 3}, 0.5)
    assert to_pull(backlog) == 0
    backlog.counted({TENANT_QUEUE: 4}, 0.6)
    assert to_pull(backlog) == 1, "one more than the others have"


def test_leases_may_lapse_so_a_line_with_jobs_is_tried_now_and_then() -> None:
    backlog = Backlog()
    for second in range(1, 6):
        backlog.counted({TENANT_QUEUE: 1}, float(second))
        assert to_pull(backlog) == 1
        backlog.pulled(TENANT_QUEUE, 1, 0, float(second))
        backlog.counted({TENANT_QUEUE: 1}, second + 0.5)
        assert to_pull(backlog) == 0


def test_what_is_ours_is_not_pulled_again() -> None:
    backlog = Backlog()
    backlog.published(TENANT_QUEUE)
    mine = scheduled_job()
    mine.lease.tenant_queue, mine.queue_counts = TENANT_QUEUE, backlog.of(TENANT_QUEUE)
    backlog.pulled(TENANT_QUEUE, 1, 1, 0.0)
    mine.queue_counts.num_ours += 1
    mine.start_waiting_here()
    backlog.counted({TENANT_QUEUE: 1}, 0.5)
    assert to_pull(backlog) == 0
    assert backlog.of(TENANT_QUEUE).num_here == 1
    mine.stop_waiting_here()
    mine.stop_waiting_here()
    mine.queue_counts.num_ours -= 1
    assert backlog.of(TENANT_QUEUE).num_here == 0


def test_a_line_without_jobs_is_idle_after_a_while() -> None:
    backlog = Backlog()
    backlog.counted({TENANT_QUEUE: 1}, 0.0)
    backlog.counted({}, 10.0)
    assert backlog.idle(100.0, 100.0) == []
    backlog.counted({}, 110.0)
    assert backlog.idle(110.0, 100.0) == [TENANT_QUEUE]
    backlog.forget(TENANT_QUEUE)
    assert len(backlog) == 0


def test_a_pull_that_waited_may_be_faster_than_the_news() -> None:
    backlog = Backlog()
    backlog.pulling(TENANT_QUEUE)
    backlog.waited(TENANT_QUEUE, 1, 0.0)
    assert not backlog.published(TENANT_QUEUE), "it was brought already"
    assert to_pull(backlog) == 0
    assert backlog.published(TENANT_QUEUE), "another one"
    assert to_pull(backlog) == 1


def test_news_that_a_waiting_pull_answers_for_need_no_other() -> None:
    backlog = Backlog()
    backlog.pulling(TENANT_QUEUE)
    assert not backlog.published(TENANT_QUEUE)
    assert not backlog.published(TENANT_QUEUE)
    backlog.waited(TENANT_QUEUE, 1, 0.0)
    assert to_pull(backlog) == 1


def test_news_that_never_come_hide_no_later_job_behind_the_next_count() -> None:
    backlog = Backlog()
    backlog.pulling(TENANT_QUEUE)
    backlog.waited(TENANT_QUEUE, 1, 0.0)
    backlog.counted({}, 0.1)
    assert backlog.published(TENANT_QUEUE)
    assert to_pull(backlog) == 1
