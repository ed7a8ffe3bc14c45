"""Roles in placement: prompts that would delay streams go to prefill workers, others to decode."""

from __future__ import annotations

from typing import Any

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ResourceRequest
from millrace.scheduler.placement import placement
from millrace.schemas.engines import WorkerRole
from tests.scheduler.placement.test_kv_sources import serving

_LONG, _SHORT = ResourceRequest(8_000, 100), ResourceRequest(100, 100)


def _worker(name: str, role: WorkerRole, **changes: Any) -> WorkerView:
    busy = {"num_running": 4} if role is not WorkerRole.PREFILL else {}
    return serving(name, role=role, **busy | changes)


def _names(workers: list[WorkerView]) -> list[str]:
    return [worker.worker_id for worker in workers]


_PREFILL = _worker("p", WorkerRole.PREFILL)
_DECODE = _worker("d", WorkerRole.DECODE)
_BOTH = _worker("b", WorkerRole.BOTH)
_ALL = [_PREFILL, _DECODE, _BOTH]


def test_a_long_prompt_goes_to_a_prefill_worker() -> None:
    assert _names(placement.for_new(_ALL, _LONG, {})) == ["p"]


def test_a_short_or_cached_prompt_goes_to_a_decode_worker() -> None:
    assert _names(placement.for_new(_ALL, _SHORT, {})) == ["d"]
    assert _names(placement.for_new(_ALL, _LONG, {"d": 7_950})) == ["d"]


def test_a_long_prompt_may_go_to_an_idle_decode_worker() -> None:
    idle = _worker("i", WorkerRole.DECODE, num_running=0)
    assert _names(placement.for_new([_PREFILL, _DECODE, idle], _LONG, {})) == ["d", "i"]


def test_a_prompt_that_cannot_be_pulled_is_computed_by_its_decode_worker() -> None:
    alone = _worker("d", WorkerRole.DECODE, transfer=None)
    assert _names(placement.for_new([_PREFILL, alone], _LONG, {})) == ["d"]


def test_roles_are_preferences() -> None:
    full = _worker("p", WorkerRole.PREFILL, num_running=64)
    assert _names(placement.for_new([full, _DECODE, _BOTH], _LONG, {})) == ["p", "b"]
    assert _names(placement.for_new([full, _DECODE], _LONG, {})) == ["p", "d"]
    assert _names(placement.for_new([_PREFILL], _SHORT, {})) == ["p"]
    assert _names(placement.for_running([_PREFILL], _SHORT)) == ["p"]


def test_a_stream_continues_at_a_decode_worker() -> None:
    assert _names(placement.for_running(_ALL, _LONG)) == ["d"]
    assert _names(placement.for_running([_PREFILL, _BOTH], _LONG)) == ["b"]
    assert _names(placement.decoders(_ALL)) == ["d", "b"]
    assert placement.have_roles(_ALL)
    assert not placement.have_roles([_BOTH])


def test_where_a_stream_stays_for_one_token_its_answer_counts_for_nothing() -> None:
    assert placement.output_tokens_at([_PREFILL], _ALL, 300.0) == 1.0
    assert placement.output_tokens_at([_PREFILL, _DECODE], _ALL, 300.0) == 300.0
    assert placement.output_tokens_at([_PREFILL], [_PREFILL], 300.0) == 300.0
    assert placement.output_tokens_at([], _ALL, 300.0) == 300.0
