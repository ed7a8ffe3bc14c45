"""The planning rule, and that under any load nobody is forgotten and no block is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.support import FakeMemory, request
from workers.engine.block_tables import BlockTables
from workers.engine.planner import Planner
from workers.engine.sequence import Sequence, SequenceState


def make_planner(
    num_blocks: int = 64,
    max_batch_tokens: int = 64,
    max_num_sequences: int = 8,
    *,
    prefix_cache: bool = False,
    memory: FakeMemory | None = None,
) -> Planner:
    return Planner(
        BlockTables.make(num_blocks, 4, memory or FakeMemory(), shared=prefix_cache),
        max_batch_tokens=max_batch_tokens,
        max_num_sequences=max_num_sequences,
    )


_arrivals = iter(range(1_000_000_000))


def sequence(num_prompt_tokens: int, max_tokens: int = 8, priority: int = 0) -> Sequence:
    arrival = next(_arrivals)
    return Sequence(
        request(str(arrival), [1] * num_prompt_tokens, priority=priority),
        arrival=arrival,
        key=0,
        max_total_tokens=num_prompt_tokens + max_tokens,
    )


def step(planner: Planner) -> dict[Sequence, int]:
    """Plan, and do as the engine does without a model; what was planned."""
    plan = planner.plan()
    planned = dict(plan)
    planner.check_integrity()
    for item, num_tokens in plan:
        assert 0 < num_tokens <= item.num_uncomputed_tokens
        capacity = len(item.block_table) * planner.tables.pool.block_size_tokens
        assert item.num_computed_tokens + num_tokens <= capacity
    planner.advance(plan)
    for item in planned:
        planner.tables.seal(item)
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


def test_what_is_not_known_to_be_finite_is_scrubbed() -> None:
    memory = FakeMemory()
    planner = make_planner(num_blocks=8, max_batch_tokens=6, memory=memory)
    half = sequence(20)
    planner.add(half)
    step(planner)  # one full block, which is sealed, and half of another
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
def test_everyone_ends_and_nothing_leaks(
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
