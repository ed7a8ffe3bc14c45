"""Background work makes way: an arrival begins with the next step, and no sequence starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.scheduling.planner import MAX_PREEMPTIONS, Planner
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import EngineOutput, EngineRequest
from tests.engine.conftest import MakeEngine
from tests.engine.scheduling.test_planner import make_planner, sequence, step, warm_costs
from tests.engine.support import drain, last_by_request, prompt, request, tokens_by_request

RUNNERS = ("host", "device")

BATCH = -1


def _fill(planner: Planner, num: int, num_prompt_tokens: int = 6, max_tokens: int = 60) -> None:
    for _ in range(num):
        planner.add(sequence(num_prompt_tokens, max_tokens, BATCH))
    for _ in range(4):
        step(planner)


def test_an_arrival_begins_at_once_where_batch_work_has_every_slot() -> None:
    planner = make_planner(num_blocks=200, max_num_sequences=4)
    _fill(planner, 12)
    assert len(planner.running) == 4
    arrivals = [sequence(5) for _ in range(4)]
    for arrival in arrivals:
        planner.add(arrival)
        assert arrival in step(planner)
    assert planner.running == arrivals


def test_however_long_batch_work_has_waited_it_is_behind() -> None:
    now_s = 1e6
    planner = make_planner(max_num_sequences=1, ageing_s=10.0, monotonic=lambda: now_s)
    old, older = (sequence(3, 20, BATCH, added_s=0.0) for _ in range(2))
    planner.add(old)
    step(planner)
    planner.add(older)
    late, later = sequence(3, 1, added_s=now_s), sequence(3, 1, added_s=now_s + 1)
    planner.add(later)
    planner.add(late)
    assert list(step(planner)) == [late]
    assert list(step(planner)) == [later]
    assert list(step(planner)) == [old]


def test_arrival_begins_though_running_sequences_lack_blocks_in_each_step() -> None:
    planner = make_planner(num_blocks=32, max_num_sequences=16)
    for _ in range(16):
        planner.add(sequence(4, 100, BATCH))
    for _ in range(10):
        step(planner)
    short = planner.num_preemptions
    for _ in range(4):
        step(planner)
    assert planner.num_preemptions > short, "the pool is too large to tell"
    arrival = sequence(20, 4)
    planner.add(arrival)
    assert arrival in step(planner)


def test_arrival_begins_though_a_sequence_ends_in_each_step() -> None:
    """A sequence leaves one step after its last token is made, if steps overlap; the arrival waits
    for its slot and blocks if these are enough."""
    planner = make_planner(num_blocks=52, max_num_sequences=5)
    _fill(planner, 5, num_prompt_tokens=30, max_tokens=60)
    assert len(planner.running) == 5
    ending = planner.running[0]
    ending.max_total_tokens = ending.num_tokens + 1
    ending.token_ids.append(-1)
    ending.num_computed_tokens = ending.num_tokens - 1
    planner.outstanding_tokens = sum(s.outstanding_tokens for s in planner.running)
    small, large = sequence(8, 4), sequence(60, 4)
    planner.add(small)
    assert small not in dict(planner.plan())
    planner.remove(small)
    planner.add(large)
    assert large in dict(planner.plan())
    assert ending.state is SequenceState.RUNNING


def test_a_long_prompt_of_batch_work_leaves_the_step_to_an_arrival() -> None:
    planner = make_planner(num_blocks=200, max_batch_tokens=32)
    long = sequence(500, 4, BATCH)
    planner.add(long)
    assert step(planner) == {long: 32}
    arrival = sequence(20, 4)
    planner.add(arrival)
    assert step(planner) == {arrival: 20, long: 12}


def test_decoding_batch_work_leaves_half_a_short_step_to_an_arrival() -> None:
    planner = make_planner(num_blocks=200, max_batch_tokens=8, max_num_sequences=20)
    _fill(planner, 12, num_prompt_tokens=1)
    assert set(step(planner).values()) == {1}
    arrival = sequence(20, 4)
    planner.add(arrival)
    planned = step(planner)
    assert planned[arrival] == 4
    assert len(planned) == 5


def test_steps_are_not_bounded_for_the_sake_of_decoding_batch_work() -> None:
    for priority, is_bounded in ((BATCH, False), (0, True)):
        planner = make_planner(num_blocks=200, itl_bound_s=0.004, costs=warm_costs())
        planner.add(sequence(4, 60, priority))
        step(planner)
        arrival = sequence(60, 4)
        planner.add(arrival)
        assert (step(planner)[arrival] < 60) == is_bounded


def test_batch_work_that_was_preempted_often_gets_on_and_leaves_room() -> None:
    planner = make_planner(num_blocks=400, max_num_sequences=8)
    jobs = [sequence(6, 30, BATCH) for _ in range(8)]
    for job in jobs:
        planner.add(job)
    while min(job.num_preemptions for job in jobs) < MAX_PREEMPTIONS:
        for _ in range(8):
            planner.add(sequence(4, 1))
        step(planner)
        step(planner)
    assert all(job.guaranteed for job in planner.running)
    # All slots are guaranteed; two of them for good, the others give way.
    arrivals = [sequence(4, 100) for _ in range(8)]
    for arrival in arrivals:
        planner.add(arrival)
    step(planner)
    assert [s for s in planner.running if s.request.priority < 0] == jobs[:2]
    assert sum(arrival in planner.running for arrival in arrivals) == 6
    for _ in range(40):
        step(planner)
    assert all(job.state is SequenceState.FINISHED for job in jobs[:2])
    # While there is other work for every slot, the rest waits.
    assert set(planner.running) == set(arrivals)


ARRIVALS = st.lists(
    st.tuples(
        st.booleans(),  # batch work
        st.integers(1, 20),  # prompt tokens
        st.integers(1, 20),  # max_tokens
        st.integers(0, 6),  # steps before the next one arrives
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(arrivals=ARRIVALS, num_blocks=st.integers(40, 60), ageing_s=st.sampled_from([None, 0.05]))
def test_sequence_that_fits_beside_urgent_ones_begins_at_once(
    arrivals: list[tuple[bool, int, int, int]], num_blocks: int, ageing_s: float | None
) -> None:
    ticks = iter(range(10**9))
    planner = make_planner(
        num_blocks, 64, 6, ageing_s=ageing_s, monotonic=lambda: next(ticks) * 0.01
    )
    urgent: list[Sequence] = []
    for is_batch, num_prompt_tokens, max_tokens, gap in arrivals:
        priority = BATCH if is_batch else 0
        item = sequence(num_prompt_tokens, max_tokens, priority, added_s=next(ticks) * 0.01)
        urgent = [other for other in urgent if other.state is not SequenceState.FINISHED]
        needed = [-(-one.max_total_tokens // 4) for one in (*urgent, item)]
        at_once = not is_batch and len(needed) <= 3 and sum(needed) <= num_blocks // 2 - 3
        planner.add(item)
        if not is_batch:
            urgent.append(item)
        for number in range(gap):
            planned = step(planner)
            assert number or not at_once or item in planned
    for _ in range(3_000):
        if not planner.num_live:
            break
        assert step(planner), "there is work, but nothing is planned"
    assert not planner.num_live
    assert planner.tables.pool.num_free_blocks == num_blocks


# --- the engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 26])
@pytest.mark.parametrize("num_blocks", [64, 20])
def test_an_arrival_starts_with_the_next_step_of_an_engine_full_of_batch_work(
    make_engine: MakeEngine, num_blocks: int, host_cache_bytes: int
) -> None:
    def load() -> list[EngineRequest]:
        return [
            request(f"b{i}", prompt(i, 12 + i), max_tokens=60, priority=BATCH, ignore_eos=True)
            for i in range(8)
        ]

    settings = {"max_num_sequences": 8, "ageing_s": 0.001}
    undisturbed = make_engine(num_blocks=200, **settings)
    for job in load():
        undisturbed.add(job)
    expected = tokens_by_request(drain(undisturbed))

    engine = make_engine(num_blocks=num_blocks, host_cache_bytes=host_cache_bytes, **settings)
    for job in load():
        engine.add(job)
    outputs: list[EngineOutput] = []
    for _ in range(25):
        outputs += engine.step()
    for number in range(20):
        name = f"urgent{number}"
        engine.add(request(name, prompt(100 + number, 20), max_tokens=3, ignore_eos=True))
        made = engine.step()
        engine.check_integrity()
        assert any(output.request_id == name and output.started for output in made), number
        outputs += made
        for _ in range(2):
            outputs += engine.step()
    outputs += drain(engine)
    tokens = tokens_by_request(outputs)
    assert {name: tokens[name] for name in expected} == expected
    last = last_by_request(outputs)
    assert sum(last[name].num_preemptions for name in expected) > 0
    assert all(last[f"urgent{number}"].num_preemptions == 0 for number in range(20))
