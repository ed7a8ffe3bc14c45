"""Planning rule: under any load no sequence starves and no block is lost."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.scheduling.cost_model import CostModel, StepWork
from millrace.engine.scheduling.planner import MAX_PREEMPTIONS, Planner
from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.sequence import Sequence, SequenceState
from tests.engine.support import FakeMemory, request, resolved

_CONFIG = msgspec.structs.replace(resolved(device="cpu"), ageing_s=None)
_NO_ADAPTERS = AdapterPool(0, lambda _adapter, _slot: None, lambda: None)
_BOUNDS = ("ageing_s", "itl_bound_s")


def make_planner(
    num_blocks: int = 64,
    max_batch_tokens: int = 64,
    max_num_sequences: int = 8,
    *,
    prefix_cache: bool = False,
    memory: FakeMemory | None = None,
    **settings: Any,
) -> Planner:
    bounds = {name: settings.pop(name) for name in _BOUNDS if name in settings}
    config = msgspec.structs.replace(
        _CONFIG, max_batch_tokens=max_batch_tokens, max_num_sequences=max_num_sequences, **bounds
    )
    tables = BlockTables(num_blocks, 4, memory or FakeMemory(), shared=prefix_cache)
    own: dict[str, Any] = {
        "costs": CostModel(),
        "monotonic": time.monotonic,
        "adapters": _NO_ADAPTERS,
    }
    return Planner(tables, config, **(own | settings))


_arrivals = iter(range(1_000_000_000))


def sequence(
    num_prompt_tokens: int,
    max_tokens: int = 8,
    priority: int = 0,
    *,
    added_s: float = 0.0,
    token: int = 1,
) -> Sequence:
    arrival = next(_arrivals)
    return Sequence(
        request(str(arrival), [token] * num_prompt_tokens, priority=priority),
        arrival=arrival,
        key=0,
        max_total_tokens=num_prompt_tokens + max_tokens,
        added_s=added_s,
    )


def step(planner: Planner) -> dict[Sequence, int]:
    """Plan a step and play the engine without a model; return the plan."""
    plan = planner.plan()
    planned = dict(plan)
    planner.check_integrity()
    for item, num_tokens in plan:
        assert 0 < num_tokens <= item.num_uncomputed_tokens
        capacity = len(item.block_table) * planner.tables.pool.block_size_tokens
        assert item.num_computed_tokens + num_tokens <= capacity
    planner.advance(plan)
    for item in planned:
        planner.tables.cache_full_blocks(item, item.num_computed_tokens)
        if item.num_uncomputed_tokens == 0:
            item.token_ids.append(1)
            if item.num_tokens == item.max_total_tokens:
                planner.remove(item)
    assert sum(planned.values()) <= planner.max_batch_tokens
    return planned


def test_decodes_come_first_then_chunks_then_newcomers() -> None:
    planner = make_planner(max_batch_tokens=10)
    decoding, chunked, newcomer = sequence(4), sequence(14), sequence(5)
    planner.add(decoding)
    step(planner)
    planner.add(chunked)
    planner.add(newcomer)
    assert step(planner) == {decoding: 1, chunked: 9}
    assert list(step(planner).items()) == [(decoding, 1), (chunked, 5), (newcomer, 4)]
    assert list(step(planner).items()) == [(decoding, 1), (chunked, 1), (newcomer, 1)]


def test_the_batch_is_bounded_in_sequences() -> None:
    planner = make_planner(max_num_sequences=2)
    for _ in range(5):
        planner.add(sequence(3))
    assert len(step(planner)) == 2
    assert (len(planner.running), planner.num_waiting) == (2, 3)


def test_admission_leaves_the_watermark_free() -> None:
    planner = make_planner(num_blocks=20)
    first, second = sequence(60, max_tokens=4), sequence(20, max_tokens=4)
    planner.add(first)
    planner.add(second)  # 15 + 5 blocks of 20, one of which is the watermark
    assert step(planner).keys() == {first}
    planner.remove(first)
    assert step(planner).keys() == {second}


def test_the_latest_of_the_lowest_priority_is_preempted_and_comes_back() -> None:
    planner = make_planner(num_blocks=6, max_batch_tokens=64)
    urgent, early, late = (sequence(7, 9, priority=1), sequence(7, 9), sequence(3, 9))
    for item in (late, early, urgent):
        planner.add(item)
    ended: list[Sequence] = []
    preempted: list[Sequence] = []
    for _ in range(100):
        step(planner)
        for item in (urgent, early, late):
            if item.state is SequenceState.FINISHED and item not in ended:
                ended.append(item)
            if item.num_preemptions and item not in preempted:
                preempted.append(item)
    assert ended == [urgent, early, late]
    assert preempted[0] is late
    assert urgent not in preempted
    assert planner.num_preemptions == sum(s.num_preemptions for s in (urgent, early, late))
    assert planner.tables.pool.num_free_blocks == 6


def test_waiting_sequence_gains_a_level_in_each_ageing_s() -> None:
    planner = make_planner(max_num_sequences=1, ageing_s=10.0)
    running = sequence(3, 2)
    planner.add(running)
    step(planner)
    old, urgent, young = sequence(3, 1), sequence(3, 1, 2), sequence(3, 1)
    old.added_s, urgent.added_s, young.added_s = 5.0, 24.0, 26.0
    for item in (young, urgent, old):
        planner.add(item)
    order: list[Sequence] = []
    while planner.num_live:
        order += [item for item in step(planner) if item not in order]
    # Two levels are worth 20 s: less than the old one has waited longer, more than the young one.
    assert [order.index(item) for item in (urgent, old, young)] == [1, 2, 3]
    later = sequence(3, 1, 2, added_s=26.0)
    older = sequence(3, 1, added_s=5.0)
    planner.add(later)
    planner.add(older)
    assert list(step(planner)) == [older]


def test_an_arrival_of_higher_priority_takes_slot_and_blocks_from_the_lowest() -> None:
    planner = make_planner(num_blocks=12, max_num_sequences=3)
    low, lower, equal = sequence(8, 30), sequence(8, 30, -1), sequence(8, 30, 1)
    for item in (low, lower, equal):
        planner.add(item)
    step(planner)
    assert set(planner.running) == {low, lower, equal}
    urgent = sequence(16, 4, 1)
    planner.add(urgent)
    assert urgent in step(planner)
    # The slot of the lowest is enough, and his blocks and the free ones are.
    assert set(planner.running) == {low, equal, urgent}
    assert lower.num_preemptions == 1
    another = sequence(3, 4, 1)
    planner.add(another)
    step(planner)
    assert set(planner.running) == {equal, urgent, another}
    last = sequence(3, 4, 1)
    planner.add(last)
    assert last not in step(planner)  # no sequence has lower priority


def test_no_sequence_is_preempted_for_one_that_does_not_fit_anyway() -> None:
    planner = make_planner(num_blocks=12, max_num_sequences=3)
    held, low = sequence(20, 4, 2), sequence(8, 10)
    planner.add(held)
    planner.add(low)
    step(planner)
    planner.add(sequence(32, 8, 1))
    step(planner)
    assert set(planner.running) == {held, low}


def test_preemptions_are_bounded_by_giving_all_blocks_for_good() -> None:
    planner = make_planner(num_blocks=12, max_num_sequences=1)
    low = sequence(4, 40)
    planner.add(low)
    for _ in range(3 * MAX_PREEMPTIONS):
        step(planner)
        planner.add(sequence(4, 1, 1))
        step(planner)
    assert low.num_preemptions == MAX_PREEMPTIONS
    assert low in planner.running
    assert low.guaranteed


def test_a_sequence_that_is_not_ready_waits_beside_the_others() -> None:
    planner = make_planner()
    unready, other = sequence(3), sequence(3)
    unready.ready = False
    planner.add(unready)
    planner.add(other)
    assert step(planner).keys() == {other}
    assert (planner.num_unready, planner.num_waiting) == (1, 1)
    unready.ready = True
    assert step(planner).keys() == {other, unready}
    assert planner.num_unready == 0
    gone = sequence(3)
    gone.ready = False
    planner.add(gone)
    planner.remove(gone)
    planner.check_integrity()
    assert planner.num_waiting == 0


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    planner = make_planner(max_batch_tokens=12, prefix_cache=True)
    first, second, stranger = sequence(20), sequence(20), sequence(4, token=2)
    for item in (first, second, stranger):
        planner.add(item)
    assert step(planner) == {first: 12}
    assert step(planner) == {first: 8, stranger: 4}
    # Four of five blocks are there; the last token is always computed.
    assert step(planner) == {first: 1, stranger: 1, second: 4}
    planner.remove(first)
    planner.check_integrity()


def warm_costs() -> CostModel:
    """Set the costs to 1 ms a step, 0.1 ms a prefill token and 0.5 ms a decode."""
    costs = CostModel()
    for i in range(200):
        work = StepWork(8 * (i % 9), i % 5, 10 * (i % 5), 0)
        costs.observe(work, 1e-3 + 1e-4 * work.prefill_tokens + 5e-4 * work.decodes)
    return costs


@pytest.mark.parametrize(("bound_ms", "chunk"), [(None, 63), (4.5, 30), (1.0, 4)])
def test_chunks_beside_decodes_keep_the_step_under_the_bound(
    bound_ms: float | None, chunk: int
) -> None:
    bound_s = None if bound_ms is None else bound_ms / 1e3
    planner = make_planner(itl_bound_s=bound_s, costs=warm_costs())
    decoding = sequence(4)
    planner.add(decoding)
    step(planner)
    long = sequence(120)
    planner.add(long)
    planned = step(planner)
    assert planned[decoding] == 1
    assert planned[long] == pytest.approx(chunk, abs=2)
    planner.remove(decoding)
    assert step(planner)[long] == min(64, 120 - planned[long])  # no decode waits


def test_choices_share_blocks_until_they_write() -> None:
    memory = FakeMemory()
    planner = make_planner(num_blocks=16, memory=memory)
    parent, child = sequence(6), sequence(6)
    parent.forks = [child]
    planner.add(parent)
    plan = planner.plan()
    planner.advance(plan)
    planner.tables.cache_full_blocks(parent, parent.num_computed_tokens)
    parent.forks = []
    planner.fork(parent, child)
    assert child.block_table == parent.block_table
    shared = list(parent.block_table)
    for item in (parent, child):
        item.token_ids.append(1)
    planner.check_integrity()
    assert step(planner) == {parent: 1, child: 1}
    # The first that writes copies the last block; the other has it for itself then.
    assert memory.copied == [(shared[1], parent.block_table[1])]
    assert child.block_table == shared
    assert parent.block_table[0] == child.block_table[0]


def test_blocks_not_known_to_be_finite_are_scrubbed() -> None:
    memory = FakeMemory()
    planner = make_planner(num_blocks=8, max_batch_tokens=6, memory=memory)
    half = sequence(20)
    planner.add(half)
    step(planner)  # one full block, which is cached, and half of another
    assert planner.plan()
    half.contents_finite = False
    blocks = list(half.block_table)
    planner.remove(half)
    assert memory.scrubbed == blocks[1:]
    assert planner.tables.pool.num_free_blocks == 8


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # max_tokens
        st.integers(-1, 1),  # priority
        st.integers(0, 6),  # steps before the next one arrives
        st.none() | st.integers(0, 12),  # cancelled after so many steps
    ),
    min_size=1,
    max_size=15,
)


@settings(deadline=None, max_examples=150)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(13, 24),
    max_batch_tokens=st.integers(1, 40),
    max_num_sequences=st.integers(1, 6),
)
def test_every_sequence_ends_and_no_block_leaks(
    arrivals: list[tuple[int, int, int, int, int | None]],
    num_blocks: int,
    max_batch_tokens: int,
    max_num_sequences: int,
) -> None:
    planner = make_planner(num_blocks, max_batch_tokens, max_num_sequences)
    due: list[tuple[int, Sequence]] = []
    everyone: list[Sequence] = []
    for num_prompt_tokens, max_tokens, priority, gap, cancel_after in arrivals:
        item = sequence(num_prompt_tokens, max_tokens, priority)
        everyone.append(item)
        planner.add(item)
        if cancel_after is not None:
            due.append((cancel_after, item))
        for _ in range(gap):
            step(planner)
            due = [(left - 1, other) for left, other in due]
            for left, other in due:
                if left <= 0:
                    planner.remove(other)
            planner.check_integrity()
    for _, item in due:
        planner.remove(item)
    num_steps = 0
    while planner.num_live:
        assert step(planner), "there is work, but nothing is planned"
        num_steps += 1
        assert num_steps < 20_000
    assert all(item.state is SequenceState.FINISHED for item in everyone)
    assert planner.tables.pool.num_free_blocks == num_blocks
