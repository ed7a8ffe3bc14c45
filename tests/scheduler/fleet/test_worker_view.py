"""Room of a worker, by its heartbeats and by the jobs sent to it since."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ResourceRequest
from millrace.schemas.jobs import Tier
from tests.scheduler.integrity import check_integrity
from tests.scheduler.statuses import NOW_NS, status, view, view_of


def test_room_counts_what_was_sent_since_the_heartbeat() -> None:
    fleet = Fleet(2.0)
    fleet.observe(status(num_running=1), 0.0, NOW_NS)
    assert fleet.capacity("m") == 3
    view_of(fleet, "w-1").reserve("r1", ResourceRequest(10, 10))
    view_of(fleet, "w-1").reserve("r2", ResourceRequest(10, 10))
    assert fleet.capacity("m") == 1
    view_of(fleet, "w-1").confirm("r1")
    fleet.observe(status(num_running=3), 0.5, NOW_NS)
    assert fleet.capacity("m") == 1, "one of them is another scheduler's"
    fleet.release("w-1", "r1")
    assert fleet.capacity("m") == 2
    check_integrity(fleet)


@pytest.mark.parametrize(
    ("step_ms", "output_tokens", "waiting"),
    [
        (0.0, 100, 8),  # nothing was measured
        (50.0, 100, 1),  # an end every 1.25 s
        (10.0, 4, 8),  # an end every 10 ms
        (10.0, 10, 5),  # an end every 25 ms
    ],
)
def test_no_more_wait_at_a_worker_than_keep_it_busy(
    step_ms: float, output_tokens: int, waiting: int
) -> None:
    worker = view(max_num_waiting=8, num_running=4, decode_step_ms=step_ms)
    for number in range(4):
        worker.reserve(f"r{number}", ResourceRequest(10, output_tokens), output_tokens)
        worker.confirm(f"r{number}")
    worker.observe(status(max_num_waiting=8, num_running=4, decode_step_ms=step_ms), 0.5)
    assert worker.capacity_for(Tier.BATCH) == waiting


def test_a_refusal_holds_until_the_next_heartbeat_for_that_tier_and_below() -> None:
    fleet = Fleet(2.0)
    fleet.observe(status(), 0.0, NOW_NS)
    fleet.refuse("w-1", Tier.FREE)
    assert [fleet.capacity("m", tier) for tier in Tier] == [4, 4, 0, 0]
    fleet.refuse("w-1")
    assert fleet.capacity("m", Tier.ENTERPRISE) == 0
    fleet.observe(status(), 0.5, NOW_NS)
    assert fleet.capacity("m") == 4


def test_lower_tiers_make_way_up_to_twice_the_capacity() -> None:
    full = view(num_running=4, max_num_waiting=2, num_held_by_tier={Tier.FREE: 1, Tier.BATCH: 3})
    assert [full.capacity_for(tier) for tier in Tier] == [6, 6, 5, 2]
    for number in range(6):
        full.reserve(f"r{number}", ResourceRequest(10, 10, Tier.BATCH))
    assert full.capacity_for(Tier.BATCH) == 0
    assert full.capacity_for(Tier.PRO) == 2, "there are ten of at most twelve"


def test_nobody_makes_way_where_tiers_are_not_told() -> None:
    full = view(num_running=4)
    assert full.capacity_for(Tier.ENTERPRISE) == 0


def test_blocks_of_lower_tiers_can_be_had() -> None:
    held = {Tier.BATCH: 2}
    short = view(num_running=2, num_free_blocks=0, num_held_by_tier=held)
    assert short.capacity_for(Tier.BATCH) == 0
    assert not short.fits(ResourceRequest(100, 10, Tier.BATCH))
    assert short.fits(ResourceRequest(100, 10, Tier.PRO))
    assert not short.fits(ResourceRequest(1_600, 10, Tier.PRO)), "more than there are"


def test_prompts_that_were_sent_are_pending_until_they_are_done() -> None:
    worker = view(prefill_tokens_per_s=1_000.0, outstanding_prompt_tokens=50)
    worker.reserve("r1", ResourceRequest(400, 10), num_cached_tokens=150)
    assert worker.pending_prompt_tokens == 300
    worker.advance(0.2)
    assert worker.pending_prompt_tokens == pytest.approx(100)
    worker.advance(9.0)
    assert worker.pending_prompt_tokens == 0
    worker.reserve("r2", ResourceRequest(400, 10))
    assert worker.release("r2")
    assert worker.pending_prompt_tokens == 0
    worker.observe(status(prefill_tokens_per_s=1_000.0, outstanding_prompt_tokens=70), 10.0)
    assert worker.pending_prompt_tokens == 70 + 250, "the first was not confirmed so far"


class AttemptHistory(RuleBasedStateMachine):
    """Requests come and go, of every tier, and heartbeats tell less or more of it."""

    tiers = st.sampled_from(list(Tier))

    def __init__(self) -> None:
        super().__init__()
        self.worker: WorkerView = view(max_num_waiting=2)
        self.number = 0
        self.now_s = 0.0

    @rule(tier=tiers, context=st.integers(1, 400))
    def send(self, tier: Tier, context: int) -> None:
        resources = ResourceRequest(context, 20, tier)
        if self.worker.fits(resources):
            capacity = self.worker.capacity_for(tier)
            self.number += 1
            self.worker.reserve(f"r{self.number}", resources)
            assert self.worker.capacity_for(tier) < capacity

    @rule(index=st.integers(0, 20), confirm=st.booleans())
    def follow(self, index: int, confirm: bool) -> None:
        ids = list(self.worker.runs)
        if ids and confirm:
            self.worker.confirm(ids[index % len(ids)])
        elif ids:
            assert self.worker.release(ids[index % len(ids)])

    @rule(held=st.dictionaries(tiers, st.integers(0, 3)), free=st.integers(0, 100))
    def hear(self, held: dict[Tier, int], free: int) -> None:
        self.now_s += 0.5
        self.worker.observe(
            status(
                num_running=sum(held.values()),
                num_held_by_tier=held,
                num_free_blocks=free,
                max_num_waiting=2,
            ),
            self.now_s,
        )

    @invariant()
    def agrees(self) -> None:
        worker = self.worker
        check_integrity(worker)
        rooms = [worker.capacity_for(tier) for tier in Tier]
        assert rooms == sorted(rooms, reverse=True), "a higher tier never has less room"
        assert worker.capacity_for(Tier.BATCH) == rooms[-1]
        assert worker.pending_prompt_tokens >= 0


AttemptHistory.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestLives = AttemptHistory.TestCase
