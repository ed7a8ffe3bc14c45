"""The order of one tenant's jobs: by priority, and the most urgent of all is overtaken a few times
at most."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.scheduler.queues.fair_queue import MAX_OVERTAKING, TenantJobs
from tests.scheduler.scheduled_jobs import scheduled_job

_NEW = st.tuples(st.integers(-2, 2), st.integers(0, 5))
_STEPS = st.one_of(_NEW, st.sampled_from(["send", "pass over"]), st.integers(0, 20))


def urgency_of(scheduled: ScheduledJob) -> tuple[float, int]:
    return float(scheduled.job.deadline_ns or 0), scheduled.lease.stream_sequence


def by_priority(scheduled: ScheduledJob) -> tuple[int, tuple[float, int]]:
    return scheduled.job.priority, urgency_of(scheduled)


def jobs_of(*scheduled_jobs: ScheduledJob) -> TenantJobs:
    jobs = TenantJobs()
    for one in scheduled_jobs:
        jobs.push(one, urgency_of(one))
    return jobs


def send_all(jobs: TenantJobs) -> list[ScheduledJob]:
    sent = []
    while len(jobs):
        sent.append(jobs.head())
        jobs.remove(sent[-1])
    return sent


@settings(max_examples=200)
@given(st.lists(_STEPS, max_size=80))
def test_the_head_is_of_the_least_priority_or_due(steps: list[object]) -> None:
    """The queue matches a plain list while jobs come, go, or do not fit."""
    jobs = TenantJobs()
    here: list[ScheduledJob] = []
    passed: list[ScheduledJob] = []
    num_overtaking = 0
    for step in steps:
        ready = [one for one in here if one not in passed]
        if isinstance(step, tuple):
            priority, deadline_ns = step
            made = scheduled_job(priority=priority, deadline_ns=deadline_ns)
            jobs.push(made, urgency_of(made))
            here.append(made)
        elif isinstance(step, int):
            if step < len(here):
                gone = here.pop(step)
                if gone not in passed:
                    is_first = gone is min(ready, key=urgency_of)
                    num_overtaking = 0 if is_first else num_overtaking + 1
                jobs.remove(gone)
        elif ready:
            first = min(ready, key=urgency_of)
            is_due = num_overtaking >= MAX_OVERTAKING
            expected = first if is_due else min(ready, key=by_priority)
            assert jobs.head() is expected
            if step == "pass over":
                jobs.pass_over(expected)
                passed.append(expected)
                continue
            num_overtaking = 0 if expected is first else num_overtaking + 1
            jobs.remove(expected)
            here.remove(expected)
        elif step == "send":
            jobs.restore()
            passed.clear()
        assert len(jobs) == len(here)
        assert jobs.is_ready == any(one not in passed for one in here)
    jobs.restore()
    expected_order = jobs.in_order()
    assert sorted(expected_order, key=id) == sorted(here, key=id)
    assert send_all(jobs) == expected_order


@settings(max_examples=100)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_no_job_waits_longer_than_its_share(priorities: list[int], data: st.DataObject) -> None:
    """However many of a lower priority come, one of every four that are sent is the first."""
    waiting = [scheduled_job(priority=priority) for priority in priorities]
    jobs = jobs_of(*waiting)
    sent: list[ScheduledJob] = []
    while not set(waiting) <= set(sent):
        for _ in range(data.draw(st.integers(0, 2))):
            newcomer = scheduled_job(priority=data.draw(st.integers(-9, 3)))
            jobs.push(newcomer, urgency_of(newcomer))
        sent.append(jobs.head())
        jobs.remove(sent[-1])
    for place, one in enumerate(sorted(waiting, key=urgency_of), start=1):
        assert sent.index(one) < (MAX_OVERTAKING + 1) * place


def test_jobs_with_a_lower_priority_value_go_first() -> None:
    late, early, usual, urgent = (
        scheduled_job(priority=priority) for priority in (5, 5, 0, -(2**63))
    )
    assert send_all(jobs_of(late, early, usual, urgent)) == [urgent, usual, late, early]


@pytest.mark.parametrize("priority", [-7, 0, 7])
def test_among_equal_priorities_the_most_urgent_job_goes_first(priority: int) -> None:
    made = [scheduled_job(priority=priority, deadline_ns=ns) for ns in (5, 3, 9, 1, 3)]
    assert send_all(jobs_of(*made)) == sorted(made, key=urgency_of)


def test_every_fourth_job_sent_is_the_oldest() -> None:
    old = [scheduled_job(priority=1) for _ in range(2)]
    new = [scheduled_job(priority=0) for _ in range(8)]
    sent = send_all(jobs_of(*old, *new))
    assert sent == [*new[:3], old[0], *new[3:6], old[1], *new[6:]]
