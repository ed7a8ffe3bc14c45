"""KV sources: a prefix that another worker has costs a pull instead of a prefill."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ResourceRequest
from millrace.scheduler.placement import placement
from millrace.scheduler.placement.placement import PULL_OVERHEAD_S, KvHolders, pull_token_s
from millrace.schemas.transfer import TransferEndpoint
from tests.scheduler.statuses import status, view

_RESOURCES = ResourceRequest(2_000, 100)
_SIZE: dict[str, Any] = {"max_num_sequences": 64, "num_blocks": 10_000, "num_free_blocks": 10_000}
_SPEEDS: dict[str, Any] = {
    "prefill_tokens_per_s": 10_000.0,
    "decode_step_ms": 10.0,
    "pull_tokens_per_s": 200_000.0,
}


def serving(worker_id: str, layout: str = "l", **changes: Any) -> WorkerView:
    """Return the view of a worker from which others of its layout can pull blocks."""
    endpoint = TransferEndpoint(layout=layout, token="t", socket=worker_id)
    fields = _SIZE | _SPEEDS | {"weights": "x", "transfer": endpoint} | changes
    return view(worker_id, **fields)


def chosen(workers: list[WorkerView], cached: dict[str, int]) -> str:
    worker = placement.choose(workers, _RESOURCES, cached, 100.0)
    assert worker is not None
    return worker.worker_id


def test_the_holder_of_most_is_the_source_of_those_of_its_kind() -> None:
    a, b, c, d = serving("a-1"), serving("b-1"), serving("c-1"), serving("d-1", "other")
    workers = [a, b, c, d]
    holders = KvHolders(workers, {"a-1": 160, "b-1": 1_600, "d-1": 1_900})
    pull = holders.pull(c, 0, 1e-4)
    assert pull is not None
    assert (pull.holder.worker, pull.num_tokens) == (b, 1_600)
    assert pull.seconds == PULL_OVERHEAD_S + 1_600 / 200_000
    less = holders.pull(a, 160, 1e-4)
    assert less is not None
    assert less.num_tokens == 1_440
    assert holders.pull(b, 1_600, 1e-4) is None, "it has it all"
    assert holders.pull(d, 1_900, 1e-4) is None


def test_tokens_that_are_computed_sooner_are_not_pulled() -> None:
    a, b = serving("a-1"), serving("b-1")
    holders = KvHolders([a, b], {"a-1": 32})
    assert holders.pull(b, 0, 1e-4) is None
    assert holders.pull(b, 0, 1e-3) is not None


def test_a_worker_without_layout_or_weights_neither_serves_nor_pulls() -> None:
    plain, nameless = serving("a-1", transfer=None), serving("b-1", weights="")
    down, good = serving("c-1", engine_down=True), serving("d-1")
    assert [one.kv_kind for one in (plain, nameless, down)] == [None] * 3
    cached = {"a-1": 1_600, "b-1": 1_600, "c-1": 1_600}
    assert KvHolders([plain, nameless, down], cached).pull(good, 0, 1e-4) is None
    assert KvHolders([good], {"d-1": 1_600}).pull(plain, 0, 1e-4) is None


def test_affinity_yields_to_load_earlier_where_a_prefix_can_be_pulled() -> None:
    cached = {"a-1": 1_900}
    busy: dict[str, Any] = {"outstanding_prompt_tokens": 1_000}
    apart = [serving("a-1", transfer=None, **busy), serving("b-1", transfer=None)]
    assert chosen(apart, cached) == "a-1", "it would be computed again at the other one"
    assert chosen([serving("a-1", **busy), serving("b-1")], cached) == "b-1"


def test_a_worker_with_the_prefix_is_chosen_before_one_that_would_pull_it() -> None:
    assert chosen([serving("a-1"), serving("b-1")], {"b-1": 1_900}) == "b-1"


def test_what_is_being_pulled_is_ahead_of_the_next_until_it_is_seen() -> None:
    worker = serving("a-1")
    worker.reserve("r1", _RESOURCES, 100.0, 0, 1_900)
    assert worker.pending_pull_tokens == 1_900
    assert worker.pending_prompt_tokens == 100
    ahead_s = placement.work_ahead_s(worker)
    assert abs(ahead_s - (1_900 / 200_000 + 100 / 10_000)) < 1e-9
    worker.advance(100.0)
    assert worker.pending_pull_tokens == 1_900, "it says itself when they are there"
    worker.observe(status("a-1", **_SIZE, **_SPEEDS), 0.01)
    assert worker.pending_pull_tokens == 1_900, "the dispatch is not confirmed"
    worker.confirm("r1")
    worker.observe(status("a-1", **_SIZE, **_SPEEDS), 0.02)
    assert worker.pending_pull_tokens == 0
    worker.reserve("r2", _RESOURCES, 100.0, 0, 500)
    worker.release("r2")
    assert worker.pending_pull_tokens == 0


def test_the_speed_of_the_first_pull_is_assumed() -> None:
    assert pull_token_s(serving("a-1", pull_tokens_per_s=0.0), 1e-4) == 1e-5


def test_pending_pulls_are_counted_at_the_measured_speed() -> None:
    measured: dict[str, Any] = {"pull_tokens_per_s": 1_000.0}
    for speeds, token_s in (
        (measured, 1e-3),
        ({"pull_tokens_per_s": 0.0, "prefill_tokens_per_s": 50.0}, 2e-3),
    ):
        worker = serving("a-1", **speeds)
        assert worker.pull_token_s == pytest.approx(token_s)
        worker.reserve("r", ResourceRequest(2_000, 100), num_pulled_tokens=1_900)
        worker.observe(status("a-1", **_SPEEDS, outstanding_pull_tokens=300), 1.0)
        assert worker.pending_pull_tokens == 2_200, "as it was told, and what was sent since"
