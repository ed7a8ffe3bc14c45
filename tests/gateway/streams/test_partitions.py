"""Streams across a network partition.

Services that return later than others are waited for, and a worker behind a dead link is asked over
another server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from millrace.bus.running_requests import RunningRequest
from millrace.gateway.streams.stream import OpenStream
from millrace.schemas.control import Replay, WorkerCommand
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import Done, Failed, FinishReason, Frame, Started, Usage
from millrace.schemas.jobs import JobResult
from millrace.schemas.records import Status
from tests.gateway.streams.test_streams import JOB, Table
from tests.support.echo_worker import delta_of

_TEXT = ["a", "b", "c"]
_END: list[Frame] = [
    Usage(prompt_tokens=1, completion_tokens=3),
    Done(finish_reason=FinishReason.STOP, num_tokens=3),
]
_RESULT = JobResult(
    request_id=JOB.request_id,
    tenant=JOB.tenant,
    model=JOB.model,
    status=Status.DONE,
    text="abc",
    text_ends=(1, 2, 3),
    token_ids=(0, 1, 2),
    finish_reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=1, completion_tokens=3),
)


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    made = Table()
    await made.start()
    yield made
    await made.streams.close()


def begun(table: Table, *, keeps_result: bool = False) -> OpenStream:
    """A stream of which the first token was read, from w1, before the partition."""
    job = replace(JOB, store_result=keeps_result)
    stream = table.streams.open(job, table.client, table.clock.monotonic())
    table.streams.accept(stream)
    table.frames(Started(worker_id="w1"), delta_of(0, _TEXT[:1]))
    return stream


def finished_by(table: Table, worker_id: str, epoch: int = 0) -> None:
    table.index[JOB.request_id] = RunningRequest(worker_id=worker_id, epoch=epoch, finished=True)


def assert_whole(table: Table, stream: OpenStream) -> None:
    assert isinstance(stream.reader.terminal, Done), stream.reader.terminal
    assert table.text(stream) == "abc"


async def test_a_result_whose_store_is_reached_after_the_index(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis, which says that the answer has ended, returns seconds before the bus does."""

    async def unreachable(_tenant: str, _request_id: str) -> JobResult | None:
        raise BusUnavailableError("no answer in time")

    stream = begun(table, keeps_result=True)
    with monkeypatch.context() as patched:
        patched.setattr(table.bus.results, "fetch", unreachable)
        await table.clock.advance(10)  # the link is down
        finished_by(table, "w1")
        await table.clock.advance(6)  # the index is reached, the bus not yet
        assert not stream.ended
    await table.bus.results.store(_RESULT)
    await table.clock.advance(3)
    assert_whole(table, stream)


async def test_a_result_that_a_replica_of_the_store_has_late(table: Table) -> None:
    await table.add_worker("w1", None)
    stream = begun(table, keeps_result=True)
    finished_by(table, "w1")
    await table.clock.advance(12)
    assert not stream.ended
    await table.bus.results.store(_RESULT)
    await table.clock.advance(3)
    assert_whole(table, stream)


async def test_a_worker_that_is_reached_after_the_index(table: Table) -> None:
    stream = begun(table)
    await table.clock.advance(10)
    finished_by(table, "w1")
    await table.clock.advance(6)
    assert not stream.ended
    await table.add_worker("w1", [delta_of(1, _TEXT[1:]), *_END])
    await table.clock.advance(3)
    assert_whole(table, stream)


@pytest.mark.parametrize("was_reconnected", [True, False])
async def test_another_worker_that_ended_it_unheard(table: Table, was_reconnected: bool) -> None:
    """The scheduler gave it to w3 in the meantime, of which this gateway heard nothing yet; w1
    knows nothing of it any more."""
    await table.add_worker("w1", None)
    stream = begun(table)
    await table.clock.advance(10)
    table.index[JOB.request_id] = RunningRequest(worker_id="w3", epoch=1, finished=True)
    if was_reconnected:
        table.broker.stop()
        table.broker.start()
    end: list[Frame] = [replace(frame, epoch=1) for frame in _END]
    frames: list[Frame] = [Started(worker_id="w3", epoch=1), delta_of(0, _TEXT, 1), *end]
    await table.add_worker("w3", frames, is_heard=False)
    await table.clock.advance(3)
    assert_whole(table, stream)


async def test_an_answer_that_nobody_has_is_given_up(table: Table) -> None:
    await table.add_worker("w1", None)
    stream = begun(table)
    finished_by(table, "w1")
    await table.clock.advance(14)
    assert isinstance(stream.reader.terminal, Failed)
    assert stream.reader.terminal.code == "answer_lost"


async def test_a_silent_worker_is_asked_over_another_server_within_3_s(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_s: list[float] = []

    async def reach(
        worker_id: str, command: WorkerCommand, _timeout_s: float, others: list[str]
    ) -> bool:
        assert (worker_id, others) == ("w1", ["w2"])
        assert isinstance(command, Replay)
        assert command.from_index == 1
        asked_s.append(table.clock.monotonic())
        await table.add_worker("w1", [delta_of(1, _TEXT[1:]), *_END])
        return True

    monkeypatch.setattr(table.bus, "reach", reach)
    await table.add_worker("w2", None)
    table.beat("w1")
    stream = begun(table)
    began_s = table.clock.monotonic()
    await table.advance_with("w2", 3)
    assert_whole(table, stream)
    assert asked_s[0] - began_s < 3


async def test_a_worker_whose_heartbeats_come_is_not_sought_elsewhere(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reach(*_: object) -> bool:
        raise AssertionError("it is reached here")

    monkeypatch.setattr(table.bus, "reach", reach)
    begun(table)
    await table.advance_with("w1", 8)


async def test_an_answer_that_was_followed_too_late_is_given_up_in_seconds(table: Table) -> None:
    """A client resumes an answer of which no worker has frames any more."""
    await table.add_worker("w1", None)
    stream = table.streams.take_over(JOB, table.client, None, 0)
    finished_by(table, "w1")
    table.streams.follow(stream, is_foreign=False)
    await table.advance_with("w1", 8)
    assert isinstance(stream.reader.terminal, Failed)
    assert stream.reader.terminal.code == "answer_lost"
