"""The queue in memory against a model of it: any order of publishing, pulling and letting go."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millrace.bus.memory.queue import StoredJob, StoredJobs, sequence_of
from millrace.schemas.config import NatsConfig

ACK_WAIT_S = 6.0
SUBJECTS = ("jobs.m.free.a", "jobs.m.free.b", "jobs.m.free")
subjects = st.sampled_from(SUBJECTS)
seconds = st.sampled_from((0.0, 0.5, 2.0, ACK_WAIT_S, 9.0))


class SetClock:
    """Clock that shows the time set by a test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


class QueueMachine(RuleBasedStateMachine):
    """``waiting`` are sequences in order by subject, ``due_s`` the times of the held ones."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SetClock()
        self.queue = StoredJobs(self.clock, NatsConfig(ack_wait_s=ACK_WAIT_S))
        self.waiting: dict[str, list[int]] = {subject: [] for subject in SUBJECTS}
        self.due_s: dict[str, dict[int, float]] = {subject: {} for subject in SUBJECTS}
        self.deliveries: dict[int, int] = {}
        self.leases: dict[str, tuple[str, int]] = {}
        self.newest = 0
        self.message_ids = itertools.count()

    @rule(subject=subjects)
    def publish(self, subject: str) -> None:
        sequence, duplicate = self.queue.add(subject, b"", None, f"{next(self.message_ids)}")
        assert not duplicate
        assert sequence > self.newest
        self.newest = sequence
        self.waiting[subject].append(sequence)
        self.deliveries[sequence] = 0

    @rule(subject=subjects, max_jobs=st.integers(1, 4))
    def pull(self, subject: str, max_jobs: int) -> None:
        now_s, held = self.clock.now_s, self.due_s[subject]
        lapsed = {sequence for sequence, due_s in held.items() if due_s <= now_s}
        pulled = self.queue.take(subject, max_jobs)
        again = [job for job in pulled if job.sequence in lapsed]
        assert len(again) == min(len(lapsed), max_jobs), "those delivered before come first"
        assert pulled[: len(again)] == again
        fresh = self.waiting[subject][: max_jobs - len(again)]
        assert [job.sequence for job in pulled[len(again) :]] == fresh
        del self.waiting[subject][: len(fresh)]
        for job in pulled:
            self.hold(subject, job)

    def hold(self, subject: str, job: StoredJob) -> None:
        self.deliveries[job.sequence] += 1
        assert job.num_deliveries == self.deliveries[job.sequence]
        self.due_s[subject][job.sequence] = self.clock.now_s + ACK_WAIT_S
        self.leases[job.lease] = (subject, job.sequence)

    @rule(data=st.data(), wait_s=seconds)
    def extend_or_release(self, data: st.DataObject, wait_s: float) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(sorted(self.leases)))
            subject, sequence = self.leases[lease]
            self.queue.hold(lease, wait_s)
            if sequence in self.due_s[subject]:
                self.due_s[subject][sequence] = self.clock.now_s + wait_s

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(sorted(self.leases)))
            subject, sequence = self.leases[lease]
            self.queue.remove(sequence_of(lease))
            self.due_s[subject].pop(sequence, None)
            if sequence in self.waiting[subject]:
                self.waiting[subject].remove(sequence)

    @rule(subject=subjects)
    def shed(self, subject: str) -> None:
        job = self.queue.take_newest(subject)
        expected = self.waiting[subject].pop() if self.waiting[subject] else None
        assert (job.sequence if job else None) == expected

    @rule(subject=subjects)
    def forget(self, subject: str) -> None:
        is_idle = not self.waiting[subject] and not self.due_s[subject]
        assert self.queue.forget(subject) == is_idle

    @rule()
    def lose_deliveries(self) -> None:
        self.queue.lose_deliveries()
        for subject in SUBJECTS:
            lost = self.due_s[subject]
            self.deliveries.update(dict.fromkeys(lost, 0))
            self.waiting[subject] = sorted([*self.waiting[subject], *lost])
            self.due_s[subject] = {}

    @rule(passed_s=seconds)
    def wait(self, passed_s: float) -> None:
        self.clock.now_s += passed_s

    @invariant()
    def counts_agree(self) -> None:
        counts = {s: len(self.waiting[s]) + len(self.due_s[s]) for s in SUBJECTS}
        assert self.queue.subjects() == {s: count for s, count in counts.items() if count}
        assert len(self.queue) == sum(counts.values())
        for subject in SUBJECTS:
            depth = self.queue.depth(subject)
            assert depth.num_queued == len(self.waiting[subject])
            assert depth.num_leased == len(self.due_s[subject])
            look_s, held = self.queue.next_due_s(subject), self.due_s[subject].values()
            assert not held or (look_s is not None and look_s <= max(min(held), self.clock.now_s))


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase
