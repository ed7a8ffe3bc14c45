"""Requests go where they are predicted to end first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ResourceRequest
from millrace.scheduler.placement import placement
from millrace.schemas.control import WorkerStatus
from millrace.schemas.jobs import Tier
from millrace.schemas.models.adapters import LoadedAdapter
from tests.scheduler.statuses import NOW_NS, status, view

_NEED = ResourceRequest(1_000, 100)
_SPEEDS = {"prefill_tokens_per_s": 10_000.0, "decode_step_ms": 10.0}
_SIZE = {"max_num_sequences": 64, "num_blocks": 10_000, "num_free_blocks": 10_000}


def chosen(
    workers: list[WorkerView],
    resources: ResourceRequest = _NEED,
    cached: dict[str, int] | None = None,
    policy: placement.Policy = "affine",
) -> str:
    worker = placement.choose(workers, resources, cached or {}, 100.0, policy)
    assert worker is not None
    return worker.worker_id


def pair(**changes: object) -> list[WorkerView]:
    """Two large workers, of whom the first is as ``changes`` say."""
    return [view("a-1", **(_SIZE | _SPEEDS | changes)), view("b-1", **(_SIZE | _SPEEDS))]


def busier_by(num_more: int) -> list[WorkerView]:
    """Two workers, of whom the first decodes so many more."""
    workers = pair()
    for number in range(num_more):
        workers[0].reserve(f"r{number}", ResourceRequest(1, 100))
    workers[0].advance(1.0)
    return workers


def test_ties_go_to_the_lowest_id() -> None:
    assert chosen(pair()) == "a-1"
    assert chosen(pair()[::-1]) == "a-1"


def test_prompts_that_wait_and_running_requests_count() -> None:
    assert chosen(pair(outstanding_prompt_tokens=2_000)) == "b-1"
    assert chosen(busier_by(4)) == "b-1"
    assert chosen(pair(prefill_tokens_per_s=5_000.0)) == "b-1"
    assert chosen(pair(decode_step_ms=20.0)) == "b-1"


def test_what_is_cached_is_worth_its_computation() -> None:
    cached = {"a-1": 900}
    assert chosen(pair(outstanding_prompt_tokens=500), cached=cached) == "a-1"
    assert chosen(pair(outstanding_prompt_tokens=1_500), cached=cached) == "b-1"
    assert chosen(busier_by(4), cached=cached) == "a-1"
    assert chosen(busier_by(40), cached=cached) == "b-1"
    assert chosen(pair(outstanding_prompt_tokens=500), cached=cached, policy="least_loaded") == (
        "b-1"
    )


def test_a_free_slot_is_worth_more_than_a_short_prefix() -> None:
    full = pair(num_running=64, max_num_waiting=8)
    assert chosen(full, ResourceRequest(1_000, 100), {"a-1": 16}) == "b-1"


def test_waiting_room_is_used_after_free_slots() -> None:
    full = view("a-1", num_running=4, max_num_waiting=2)
    free = view("b-1", num_running=3, outstanding_tokens=10_000)
    assert chosen([full, free]) == "b-1"


def test_a_worker_with_preemptible_streams_is_the_second_choice() -> None:
    size = {"max_num_sequences": 4, **_SPEEDS}
    batch = view("a-1", num_running=4, num_held_by_tier={Tier.BATCH: 4}, **size)
    free = view("b-1", num_running=3, num_held_by_tier={Tier.FREE: 3}, **size)
    assert chosen([batch, free], ResourceRequest(100, 100, Tier.PRO)) == "b-1"
    assert chosen([batch], ResourceRequest(100, 100, Tier.PRO)) == "a-1"
    assert placement.choose([batch], ResourceRequest(100, 100, Tier.BATCH), {}, 100.0) is None


def test_a_worker_without_measurements_is_taken_to_be_like_the_others() -> None:
    workers = pair(prefill_tokens_per_s=0.0, decode_step_ms=0.0)
    assert chosen(workers) == "a-1", "a tie, nearly"
    workers[0].reserve("r1", ResourceRequest(1_000, 100))
    assert chosen(workers) == "b-1"


def test_what_workers_did_meanwhile_counts() -> None:
    workers = pair()
    workers[0].reserve("r1", ResourceRequest(1_000, 100))
    worker = placement.choose(
        workers, ResourceRequest(1_000, 100), {"a-1": 900}, 100.0, "affine", 0.05
    )
    assert worker is workers[0]
    assert worker.pending_prompt_tokens == pytest.approx(500)


def test_the_first_token_is_predicted() -> None:
    idle = pair()[0]
    alone_s = placement.predicted_ttft_s(idle, ResourceRequest(1_000, 100))
    assert 0.1 < alone_s < 0.15
    assert placement.predicted_ttft_s(idle, ResourceRequest(1_000, 100), 900) < 0.05
    busy = pair(outstanding_prompt_tokens=10_000)[0]
    assert placement.predicted_ttft_s(busy, ResourceRequest(1_000, 100)) == pytest.approx(
        alone_s + 1.0
    )
    full = pair(num_running=64)[0]
    assert placement.predicted_ttft_s(full, ResourceRequest(1_000, 100)) > alone_s


def test_a_prefix_that_everybody_shares_is_copied_to_those_who_are_idle() -> None:
    """All prompts share a prefix that one worker has cached.

    Other workers compute it as soon as that is faster than the wait for the first, and have it from
    then on.
    """
    workers = [view(f"w{number}", **_SIZE, **_SPEEDS) for number in range(8)]
    cached = {"w0": 2_000}
    counts: Counter[str] = Counter()
    for number in range(320):
        resources = ResourceRequest(2_100, 200)
        worker = placement.choose(workers, resources, cached, 100.0, "affine", 0.0)
        assert worker is not None
        worker.reserve(f"r{number}", resources, 100.0, cached.get(worker.worker_id, 0))
        cached[worker.worker_id] = 2_000
        counts[worker.worker_id] += 1
    assert len(counts) == 8
    # A prefix is worth about 20 of these requests, and no more than that is unfair.
    assert max(counts.values()) - min(counts.values()) <= 24


def test_equal_workers_take_turns() -> None:
    workers = [*pair(), view("c-1", **_SIZE, **_SPEEDS)]
    order = []
    for number in range(9):
        worker = placement.choose(workers, _NEED)
        assert worker is not None
        worker.reserve(f"r{number}", _NEED)
        worker.release(f"r{number}")
        order.append(worker.worker_id)
    assert order == ["a-1", "b-1", "c-1"] * 3


def test_a_short_prefix_does_not_draw_requests_past_an_idle_worker() -> None:
    workers = pair()
    short, cached = ResourceRequest(100, 100), {"a-1": 96}
    assert chosen(workers, short, cached) == "a-1", "the first turn"
    workers[0].reserve("r1", short, 100.0, 96)
    assert chosen(workers, short, cached) == "b-1"
    workers[0].release("r1")
    assert chosen(workers, short, cached) == "b-1", "both are idle, and it is its turn"


def test_a_long_prefix_draws_requests_past_an_idle_worker() -> None:
    workers = pair()
    workers[0].reserve("r1", ResourceRequest(1, 100))
    assert chosen(workers, cached={"a-1": 512}) == "a-1"


def test_a_short_prefix_decides_between_busy_workers() -> None:
    workers = pair()
    for number, worker in enumerate(workers):
        worker.reserve(f"r{number}", ResourceRequest(1, 100))
    assert chosen(workers, cached={"b-1": 80}) == "b-1"
    assert chosen(workers, cached={"a-1": 80}) == "a-1"


def test_measurements_that_scatter_do_not_make_one_of_equals_the_better() -> None:
    workers = pair(decode_step_ms=7.5, prefill_tokens_per_s=13_000.0)
    assert chosen(workers) == "a-1"
    workers[0].reserve("r1", _NEED)
    workers[0].advance(1.0)
    assert chosen(workers) == "b-1"
    workers[0].release("r1")
    assert chosen(workers) == "b-1"


def test_a_worker_with_larger_batches_does_not_look_faster() -> None:
    """The two workers are equally fast: a step takes 18 ms plus 0.1 ms per sequence."""
    equal: dict[str, Any] = _SIZE | _SPEEDS | {"max_num_sequences": 256}

    def heartbeat(name: str, batch: int) -> WorkerStatus:
        measured = {"num_running": batch, "decode_step_ms": 18 + 0.1 * batch}
        return status(name, **equal | measured)

    busy, idle = (WorkerView(heartbeat(name, 1), 0.0) for name in ("a-1", "b-1"))
    for number, batch in enumerate((10, 20, 30, 40), start=1):
        busy.observe(heartbeat("a-1", batch), float(number))
        idle.observe(heartbeat("b-1", 1), float(number))
    assert busy.num_held == 40
    assert chosen([busy, idle]) == "b-1"


_STATUSES = st.builds(
    lambda slots, waiting, held, blocks, used, prompts, draining, longest, speed: status(
        max_num_sequences=slots,
        max_num_waiting=waiting,
        num_running=sum(held.values()),
        num_held_by_tier=held,
        num_blocks=blocks,
        num_free_blocks=max(0, blocks - used),
        outstanding_prompt_tokens=prompts,
        draining=draining,
        max_tokens_per_request=longest,
        prefill_tokens_per_s=speed * 1_000,
        decode_step_ms=speed * 3,
    ),
    slots=st.integers(1, 8),
    waiting=st.integers(0, 2),
    held=st.dictionaries(st.sampled_from(list(Tier)), st.integers(0, 5)),
    blocks=st.integers(0, 50),
    used=st.integers(0, 60),
    prompts=st.integers(0, 10_000),
    draining=st.booleans(),
    longest=st.sampled_from([0, 64, 512]),
    speed=st.integers(0, 4),
)
_NEEDS = st.builds(
    ResourceRequest, st.integers(1, 600), st.integers(0, 600), st.sampled_from(list(Tier))
)


def named(statuses: list[WorkerStatus]) -> list[WorkerView]:
    names = "abcdef"
    return [
        view(names[number], **{field: getattr(one, field) for field in _FIELDS})
        for number, one in enumerate(statuses)
    ]


_FIELDS = [name for name in WorkerStatus.__struct_fields__ if name not in ("worker_id", "name")]


@settings(max_examples=80)
@given(
    st.lists(_STATUSES, max_size=6),
    _NEEDS,
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 600)),
)
def test_the_choice_has_room_and_does_not_depend_on_the_order(
    statuses: list[WorkerStatus], resources: ResourceRequest, cached: dict[str, int]
) -> None:
    workers = named(statuses)
    worker = placement.choose(workers, resources, cached, 100.0)
    fitting = [one for one in workers if one.fits(resources)]
    if worker is None:
        assert not fitting
        return
    assert worker in fitting
    assert worker.capacity_for(resources.tier) > 0
    assert not worker.status.draining
    assert worker.could_hold(resources)
    assert placement.choose(workers[::-1], resources, cached, 100.0) is worker


@settings(max_examples=80)
@given(
    st.lists(_STATUSES, min_size=1, max_size=6),
    _NEEDS,
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 600)),
    st.integers(0, 600),
    st.integers(0, 5_000),
)
def test_more_in_its_cache_or_less_before_it_never_makes_a_worker_less_wanted(
    statuses: list[WorkerStatus],
    resources: ResourceRequest,
    cached: dict[str, int],
    num_more: int,
    num_fewer: int,
) -> None:
    workers = named(statuses)
    worker = placement.choose(workers, resources, cached, 100.0)
    if worker is None:
        return
    more = cached | {worker.worker_id: cached.get(worker.worker_id, 0) + num_more}
    assert placement.choose(workers, resources, more, 100.0) is worker
    worker.pending_prompt_tokens = max(0.0, worker.pending_prompt_tokens - num_fewer)
    assert placement.choose(workers, resources, cached, 100.0) is worker
    before_s = placement.predicted_ttft_s(worker, resources, 0)
    assert placement.predicted_ttft_s(worker, resources, num_more) <= before_s


@settings(max_examples=50)
@given(
    st.lists(
        st.builds(ResourceRequest, st.integers(1, 300), st.integers(1, 300), st.just(Tier.FREE)),
        max_size=40,
    )
)
def test_placing_in_one_heartbeat_never_overfills(needs: list[ResourceRequest]) -> None:
    fleet = Fleet(2.0)
    for one in (status("a-1"), status("b-1", num_blocks=40, num_free_blocks=40)):
        fleet.observe(one, 0.0, NOW_NS)
    for number, resources in enumerate(needs):
        worker = placement.choose(fleet.of_model("m"), resources)
        if worker is None:
            continue
        was_idle = worker.num_held == 0
        worker.reserve(f"r{number}", resources)
        assert worker.num_held <= worker.status.max_num_sequences
        assert was_idle or worker.num_free_blocks >= 0


def test_the_longest_request_that_anybody_holds() -> None:
    assert placement.longest_tokens([]) is None
    assert placement.longest_tokens([view(max_tokens_per_request=64), view()]) is None
    assert placement.longest_tokens(
        [view(max_tokens_per_request=64), view(max_tokens_per_request=96)]
    ) == (96)


@settings(max_examples=40)
@given(
    st.integers(2, 5),
    st.integers(1, 200),
    st.integers(1, 200),
    st.lists(st.integers(0, 8), min_size=10, max_size=60),
)
def test_equal_workers_get_equally_much(
    num_workers: int, num_prompt_tokens: int, num_new_tokens: int, ends: list[int]
) -> None:
    """The same short prompt comes repeatedly while earlier requests end in any order."""
    workers = [view(f"w{number}", **_SIZE, **_SPEEDS) for number in range(num_workers)]
    cached: dict[str, int] = {}
    counts = dict.fromkeys([worker.worker_id for worker in workers], 0)
    resources = ResourceRequest(min(num_prompt_tokens, 128), num_new_tokens)
    running: list[tuple[WorkerView, str]] = []
    for number, num_ended in enumerate(ends):
        worker = placement.choose(workers, resources, cached, 100.0, "affine", number * 10.0)
        assert worker is not None
        fewest = min(one.num_held for one in workers)
        assert fewest > 0 or worker.num_held == 0, "somebody had nothing to do"
        worker.reserve(f"r{number}", resources, 100.0, cached.get(worker.worker_id, 0))
        cached[worker.worker_id] = resources.num_context_tokens // 16 * 16
        counts[worker.worker_id] += 1
        running.append((worker, f"r{number}"))
        for _ in range(min(num_ended, len(running))):
            ended, request_id = running.pop(0)
            ended.release(request_id)
    if all(num_ended > 1 for num_ended in ends):
        assert max(counts.values()) - min(counts.values()) <= 1


def _with(version: str, num_running: int = 0) -> LoadedAdapter:
    return LoadedAdapter(version, version, num_running)


_SQL = ResourceRequest(1_000, 100, adapter="sql")


def test_a_request_goes_where_its_adapter_is() -> None:
    for first, expected in (((), "b-1"), ((_with("sql"),), "a-1"), ((_with("other"),), "b-1")):
        workers = [
            view("a-1", **(_SIZE | _SPEEDS), max_adapters=4, adapters=first),
            view("b-1", **(_SIZE | _SPEEDS), max_adapters=4, adapters=(_with("sql"),)),
        ]
        assert chosen(workers, _SQL) == expected
    assert chosen(pair(max_adapters=4), _SQL) == "a-1"


def test_a_hot_adapter_is_loaded_elsewhere_when_that_takes_less_than_the_wait() -> None:
    def workers(num_running: int) -> list[WorkerView]:
        hot = {"max_adapters": 4, "adapters": (_with("sql", num_running),)}
        held = {"num_running": num_running, "outstanding_prompt_tokens": 300 * num_running}
        return [
            view("a-1", **(_SIZE | _SPEEDS | hot | held), adapter_load_ms=200.0),
            view("b-1", **(_SIZE | _SPEEDS), max_adapters=4, adapter_load_ms=200.0),
        ]

    assert chosen(workers(2), _SQL) == "a-1"
    assert chosen(workers(40), _SQL) == "b-1"


def test_a_free_slot_comes_before_one_that_requests_hold() -> None:
    full = tuple(_with(f"x{number}", 1) for number in range(4))
    workers = [
        view("a-1", **(_SIZE | _SPEEDS), max_adapters=4, adapters=full),
        view("b-1", **(_SIZE | _SPEEDS), max_adapters=4, adapters=full[:3]),
    ]
    assert chosen(workers, _SQL) == "b-1"


def test_what_was_sent_since_the_heartbeat_has_its_adapter_there_soon() -> None:
    workers = [
        view(f"{name}-1", **(_SIZE | _SPEEDS), max_adapters=1, adapter_load_ms=2_000.0)
        for name in "ab"
    ]
    first = placement.choose(workers, _SQL, {}, 100.0)
    assert first is not None
    first.reserve("r", _SQL)
    other = ResourceRequest(1_000, 100, adapter="poems")
    assert chosen(workers, _SQL) == first.worker_id
    assert chosen(workers, other) != first.worker_id
    first.release("r")
    assert not first.adapters.has("sql")


def test_adapters_are_passed_over_by_the_least_loaded_policy() -> None:
    workers = [
        view("a-1", **(_SIZE | _SPEEDS), max_adapters=4),
        view("b-1", **(_SIZE | _SPEEDS), max_adapters=4, adapters=(_with("sql"),)),
    ]
    assert chosen(workers, _SQL, policy="least_loaded") == "a-1"


def test_a_load_is_part_of_the_predicted_first_token() -> None:
    worker = view("a-1", **(_SIZE | _SPEEDS), max_adapters=4, adapter_load_ms=250.0)
    plain = placement.predicted_ttft_s(worker, _NEED)
    assert placement.predicted_ttft_s(worker, _SQL) == pytest.approx(plain + 0.25)
