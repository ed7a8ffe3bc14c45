"""The table of streams: gaps, silence, reconnects, takeovers, clients that are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.running_requests import RunningRequest
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.stream import Client, OpenStream, StreamPhase, TokenGaps, status_of
from millrace.gateway.streams.streams import StreamTable
from millrace.schemas.config import GatewayConfig
from millrace.schemas.control import (
    Cancel,
    CancelReason,
    Replay,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import (
    Cancelled,
    Delta,
    Done,
    Failed,
    FinishReason,
    Frame,
    Started,
    Usage,
)
from millrace.schemas.jobs import Job
from tests.support.echo_worker import delta_of
from tests.support.manual_clock import ManualClock

JOB = Job(request_id="r1", model="demo", prompt_token_ids=(1,))
_END: list[Frame] = [
    Usage(prompt_tokens=1, completion_tokens=3),
    Done(finish_reason=FinishReason.STOP, num_tokens=3),
]


class Listener(Client):
    """Client that records its callbacks."""

    def __init__(self) -> None:
        super().__init__(limit_bytes=100)
        self.num_wakes = 0
        self.dropped = ""

    def wake(self, _stream: OpenStream) -> None:
        self.num_wakes += 1

    def drop(self, reason: str) -> None:
        self.dropped = reason


class Table:
    """Stream table on an in-memory bus, with workers that record their messages."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.bus = MemoryBus(self.broker)
        self.fleet = FleetView(self.clock)
        self.ended: list[OpenStream] = []
        self.cancels: list[Cancel] = []
        self.replays: list[tuple[str, int]] = []
        self.client = Listener()
        self.streams = StreamTable(
            self.bus, GatewayConfig(), "gw", self.fleet, self.clock, self.ended.append, self
        )
        self.index: dict[str, RunningRequest] = {}

    async def start(self) -> None:
        await self.streams.start()
        await self.bus.control.subscribe_cancels(self.cancels.append)

    async def lookup(self, request_id: str) -> RunningRequest | None:
        return self.index.get(request_id)

    async def add_worker(
        self, worker_id: str, frames: list[Frame] | None = None, *, is_heard: bool = True
    ) -> None:
        """A worker that sends these frames when asked; None: it knows of nothing. Its first
        heartbeat is heard, or none."""

        async def on_command(command: WorkerCommand) -> WorkerReply:
            assert isinstance(command, Replay)
            self.replays.append((worker_id, command.from_index))
            if frames is None:
                return WorkerReply(ok=False, reason="unknown_request")
            await self.bus.frames.publish("gw", [(command.request_id, f) for f in frames])
            return WorkerReply(ok=True)

        await self.bus.control.serve_commands(worker_id, on_command)
        if is_heard:
            self.beat(worker_id)

    def beat(self, worker_id: str) -> None:
        self.fleet.on_worker(
            WorkerStatus(worker_id=worker_id, name=worker_id, model="demo", max_num_sequences=1)
        )

    async def advance_with(self, worker_id: str, duration_s: int) -> None:
        """Advance the clock with one heartbeat of the worker per second."""
        for _ in range(duration_s):
            self.beat(worker_id)
            await self.clock.advance(1)

    def open(self) -> OpenStream:
        stream = self.streams.open(JOB, self.client, self.clock.monotonic())
        self.streams.accept(stream)
        return stream

    def frames(self, *frames: Frame) -> None:
        for frame in frames:
            self.streams.on_frame("r1", frame)

    def text(self, stream: OpenStream) -> str:
        return stream.read(self.clock.monotonic(), TokenGaps()).text


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    made = Table()
    await made.start()
    yield made
    await made.streams.close()


async def test_a_gap_is_filled_by_the_worker_that_has_it(table: Table) -> None:
    await table.add_worker("w2", None)
    await table.add_worker("w1", [delta_of(1, ["b", "c"]), *_END])
    stream = table.open()
    table.frames(Started(worker_id="w1"), delta_of(0, ["a"]), delta_of(2, ["c"]))
    await table.clock.advance(0)
    assert table.replays == [("w1", 1)]
    assert table.text(stream) == "abc"
    assert isinstance(stream.reader.terminal, Done)
    table.streams.finish(stream)
    assert [ended.delivery.num_replays for ended in table.ended] == [1]
    assert len(table.streams) == 0


async def test_a_gap_is_not_asked_for_twice_at_once(table: Table) -> None:
    await table.add_worker("w1", [])
    table.open()
    table.frames(Started(worker_id="w1"), *[delta_of(n, ["x"]) for n in range(2, 9)])
    await table.clock.advance(0)
    assert len(table.replays) == 1
    table.frames(delta_of(9, ["x"]))
    assert len(table.replays) == 1
    await table.clock.advance(0.3)
    table.frames(delta_of(10, ["x"]))
    await table.clock.advance(0)
    assert len(table.replays) == 2


async def test_a_lost_start_is_found_with_the_models_other_workers(table: Table) -> None:
    await table.add_worker("idle", None)
    await table.add_worker("busy", [Started(worker_id="busy"), delta_of(0, ["a", "b", "c"]), *_END])
    stream = table.open()
    table.frames(delta_of(2, ["c"]))
    await table.clock.advance(0)
    assert table.text(stream) == "abc"
    assert {worker for worker, _ in table.replays} == {"idle", "busy"}


async def test_silence_of_a_started_stream_is_probed(table: Table) -> None:
    await table.add_worker("w1", [delta_of(1, ["b", "c"]), *_END])
    stream = table.open()
    table.frames(Started(worker_id="w1"), delta_of(0, ["a"]))
    await table.clock.advance(1.5)
    assert table.replays == []
    await table.clock.advance(1)
    assert table.replays == [("w1", 1)]
    assert table.text(stream) == "abc"


async def test_a_stream_that_waits_in_the_queue_is_left_alone(table: Table) -> None:
    await table.add_worker("w1", None)
    table.open()
    await table.clock.advance(20)
    assert table.replays == []


async def test_a_reconnect_probes_every_stream_until_somebody_answers(table: Table) -> None:
    stream = table.open()
    table.broker.stop()
    table.broker.start()
    await table.clock.advance(1)
    await table.add_worker("w1", [Started(worker_id="w1"), delta_of(0, ["a", "b", "c"]), *_END])
    await table.clock.advance(3)
    assert table.text(stream) == "abc"


async def test_an_answer_whose_end_is_lost_is_an_error(table: Table) -> None:
    stream = table.open()
    table.frames(Started(worker_id="dead"), delta_of(0, ["a"]))
    await table.clock.advance(20)
    assert not stream.ended
    table.index["r1"] = RunningRequest(worker_id="dead", epoch=0, finished=True)
    await table.clock.advance(14)
    assert not stream.ended  # the worker may be behind a link that is down
    await table.clock.advance(3)
    assert isinstance(stream.reader.terminal, Failed)
    assert stream.reader.terminal.code == "answer_lost"


async def test_another_worker_goes_on(table: Table) -> None:
    stream = table.open()
    table.frames(Started(worker_id="w1", epoch=1), delta_of(0, ["a", "b"], 1))
    point = table.streams.resume_point("r1")
    assert point is not None
    assert (point.token_ids, point.open) == ((0, 1), True)
    table.frames(Started(worker_id="w2", epoch=2), delta_of(1, ["b", "c"], 2))
    table.frames(delta_of(2, ["X"], 1), Cancelled(epoch=1))
    assert table.text(stream) == "abc"
    assert stream.reader.num_epochs == 2


async def test_resume_points_of_clients_that_are_gone(table: Table) -> None:
    stream = table.open()
    assert table.streams.resume_point("other") is None
    table.streams.abort(stream, "disconnected")
    point = table.streams.resume_point("r1")
    assert point is not None
    assert not point.open


async def test_a_cancel_is_repeated_until_the_end_comes(table: Table) -> None:
    stream = table.open()
    table.streams.abort(stream, "disconnected")
    await table.clock.advance(3)
    assert len(table.cancels) >= 3
    assert table.cancels[0].reason is CancelReason.DISCONNECT
    table.frames(Cancelled())
    assert table.ended == [stream]
    assert len(table.streams) == 0
    sent = len(table.cancels)
    await table.clock.advance(5)
    assert len(table.cancels) == sent


async def test_a_cancel_without_an_answer_ends_after_a_bound(table: Table) -> None:
    stream = table.open()
    table.streams.abort(stream, "disconnected")
    await table.clock.advance(16)
    assert table.ended == [stream]
    assert stream.outcome == "disconnected"


async def test_a_stream_that_nobody_came_back_for_ends_though_its_cancel_was_lost(
    table: Table,
) -> None:
    stream = table.open()
    stream.detach(table.clock.monotonic() + 1.0)
    await table.clock.advance(1.5)
    assert len(table.cancels) == 1
    await table.clock.advance(2.5)
    assert len(table.cancels) > 2
    await table.clock.advance(16.0)
    assert len(table.streams) == 0
    assert [ended.outcome for ended in table.ended] == ["disconnected"]


async def test_a_client_that_leaves_before_its_job_is_stored(table: Table) -> None:
    stream = table.streams.open(JOB, table.client, table.clock.monotonic())
    table.streams.abort(stream, "disconnected")
    await table.clock.advance(0.1)
    assert table.cancels == []
    table.streams.accept(stream)
    await table.clock.advance(0.1)
    assert len(table.cancels) == 1


async def test_a_job_that_is_not_stored_leaves_nothing(table: Table) -> None:
    stream = table.streams.open(JOB, table.client, table.clock.monotonic())
    table.streams.discard(stream)
    assert len(table.streams) == 0
    assert table.ended == []


async def test_a_stream_without_an_end_times_out(table: Table) -> None:
    stream = table.open()
    table.frames(Started(worker_id="w1"))
    await table.clock.advance(601)
    assert isinstance(stream.reader.terminal, Failed)
    assert stream.reader.terminal.code == "request_timeout"
    assert table.cancels[0].reason is CancelReason.DEADLINE
    assert status_of(stream) == "failed"


async def test_text_waits_for_a_slow_client_up_to_its_bound(table: Table) -> None:
    stream = table.open()
    table.frames(*[delta_of(n, ["0123456789"]) for n in range(10)])
    assert table.client.dropped == ""
    assert table.client.num_wakes == 1
    assert table.text(stream) == "0123456789" * 10
    assert table.client.pending_bytes == 0
    table.frames(*[delta_of(n, ["0123456789"]) for n in range(10, 21)])
    assert table.client.dropped == "slow_client"


async def test_a_write_that_stalls_drops_the_client(table: Table) -> None:
    table.open()
    table.client.sending_since_s = table.clock.monotonic()
    await table.clock.advance(31)
    assert table.client.dropped == "slow_client"


async def test_a_client_that_takes_over_may_have_stalled_before(table: Table) -> None:
    stream = table.open()
    table.frames(Started(worker_id="w1", epoch=0, num_prompt_tokens=1))
    await table.clock.advance(1)
    other = Listener()
    other.sending_since_s = table.clock.monotonic() - 31.0
    stream.change_client(other)
    await table.clock.advance(0.5)
    assert other.dropped == "slow_client"


async def test_a_stream_that_is_left_is_given_up_in_time(table: Table) -> None:
    stream = table.open()
    table.frames(Started(worker_id="w1", epoch=0, num_prompt_tokens=1))
    await table.clock.advance(1)
    stream.detach(table.clock.monotonic() + 0.5)
    phases = []
    for _ in range(2):
        await table.clock.advance(0.4)
        phases.append(stream.phase)
    assert phases == [StreamPhase.DETACHED, StreamPhase.ABORTED]


async def test_streams_are_looked_after_when_time_may_change_them(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each sweep: that would cost as much as sending four tokens a second."""
    looks: list[str] = []
    look_after = StreamTable._look_after

    def note(self: StreamTable, stream: OpenStream, now_s: float) -> None:
        looks.append(stream.request_id)
        look_after(self, stream, now_s)

    monkeypatch.setattr(StreamTable, "_look_after", note)
    await table.add_worker("w1", [])
    table.open()
    table.frames(Started(worker_id="w1", epoch=0, num_prompt_tokens=1))
    for number in range(40):
        table.frames(delta_of(number, ["x"], 0))
        await table.clock.advance(0.5)
    assert 5 <= len(looks) <= 15


async def test_frames_of_nobody_are_nothing(table: Table) -> None:
    table.streams.on_frame("unknown", Delta(index=0, token_ids=(1,)))
    assert len(table.streams) == 0


class Trouble(Listener):
    """A client that cannot even be parted with."""

    def drop(self, reason: str) -> None:
        raise RuntimeError(reason)


async def test_one_streams_trouble_is_not_that_of_the_others(table: Table) -> None:
    trouble = Trouble()
    trouble.sending_since_s = 0.0
    other = Job(request_id="r0", model="demo", prompt_token_ids=(1,))
    table.streams.accept(table.streams.open(other, trouble, table.clock.monotonic()))
    stream = table.open()
    await table.clock.advance(GatewayConfig().request_timeout_s + 1.0)
    assert stream.ended


async def test_standing_in_can_be_tried_again(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = table.streams.take_over(
        Job(request_id="r1", model="demo", prompt_token_ids=(1,), reply="gw-dead"),
        table.client,
        None,
        0,
    )
    real = table.bus.frames.subscribe

    async def away(*_: object) -> None:
        raise BusUnavailableError("The message bus is unreachable.")

    monkeypatch.setattr(table.bus.frames, "subscribe", away)
    with pytest.raises(BusUnavailableError):
        await table.streams.subscribe_as_proxy_for("gw-dead", is_dead=True)
    monkeypatch.setattr(table.bus.frames, "subscribe", real)
    await table.streams.subscribe_as_proxy_for("gw-dead", is_dead=True)
    await table.bus.frames.publish("gw-dead", [("r1", delta_of(0, ["a"]))])
    await table.clock.advance(0)
    assert table.text(stream) == "a"


async def test_an_end_that_nobody_noted_is_missed_when_the_job_has_left_the_queue(
    table: Table,
) -> None:
    stream = table.open()
    published = await table.bus.jobs.publish(stream.job)
    table.streams.accept(stream, published.stream_sequence)
    table.frames(Started(worker_id="dead"), delta_of(0, ["a"]))
    await table.clock.advance(20)
    assert not stream.ended
    [leased] = await table.bus.jobs.pull(TenantQueue.of(stream.job), 1, 0.0)
    await table.bus.jobs.ack(leased.lease)
    await table.clock.advance(17)
    assert isinstance(stream.reader.terminal, Failed)
    assert stream.reader.terminal.code == "answer_lost"


async def test_a_start_that_was_lost_with_its_workers_connection_is_looked_up(
    table: Table,
) -> None:
    await table.add_worker("w1", [Started(worker_id="w1"), delta_of(0, ["a", "b", "c"]), *_END])
    stream = table.open()
    await table.clock.advance(20)
    assert table.replays == []
    table.index["r1"] = RunningRequest(worker_id="w1", epoch=1, finished=True)
    await table.clock.advance(15)
    assert table.text(stream) == "abc"
    assert isinstance(stream.reader.terminal, Done)


async def test_an_attempt_that_is_older_than_what_the_client_has_ends_as_a_lost_answer(
    table: Table,
) -> None:
    """The queue forgot its deliveries, so that a later attempt has an older epoch: its frames are
    not taken, and nothing else comes once it has answered the job."""
    stream = table.open()
    published = await table.bus.jobs.publish(stream.job)
    table.streams.accept(stream, published.stream_sequence)
    table.frames(Started(worker_id="dead", epoch=65), delta_of(0, ["a"], epoch=65))
    end = Done(epoch=1, finish_reason=FinishReason.STOP, num_tokens=2)
    older: list[Frame] = [Started(worker_id="w2", epoch=1), delta_of(0, ["a", "b"], epoch=1), end]
    await table.add_worker("w2", older)
    await table.advance_with("w2", 20)
    assert len(table.replays) > 4
    assert not stream.ended
    [leased] = await table.bus.jobs.pull(TenantQueue.of(stream.job), 1, 0.0)
    await table.bus.jobs.ack(leased.lease)
    await table.advance_with("w2", 5)
    assert isinstance(stream.reader.terminal, Failed)
    assert stream.reader.terminal.code == "answer_lost"
    assert table.text(stream) == "a"
