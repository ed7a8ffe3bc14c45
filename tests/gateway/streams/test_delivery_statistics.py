"""Delivery statistics of a stream: gaps, stalls, and counts that continue at another gateway."""

from __future__ import annotations

import pytest

from millrace.gateway.streams.deliveries import (
    DeliveryHistory,
    continue_statistics,
    delivery_record,
    statistics_of,
)
from millrace.gateway.streams.stream import Client, OpenStream, TokenGaps
from millrace.schemas.control import DeliveryStatistics
from millrace.schemas.frames import Done, FinishReason, Started, Usage
from millrace.schemas.jobs import Job
from millrace.schemas.records import STALL_MS, DeliveryRecord
from tests.support.echo_worker import delta_of
from tests.support.manual_clock import ManualClock

JOB = Job(request_id="r1", model="demo", prompt_token_ids=(1,), tenant="acme")
S_NS = 1_000_000_000


class Listener(Client):
    """Takes nothing by itself."""

    def __init__(self) -> None:
        super().__init__(limit_bytes=1000)

    def wake(self, stream: OpenStream) -> None:
        """The test takes."""

    def drop(self, reason: str) -> None:
        """Do nothing: these tests drop no client."""


class Watched:
    """A stream at a gateway with a clock of its own."""

    def __init__(self, clock: ManualClock, from_index: int = 0) -> None:
        self.clock = clock
        self.stream = OpenStream(JOB, Listener(), clock.monotonic(), from_index=from_index)
        self._gaps = TokenGaps()

    def feed(self, first: int, num_tokens: int, epoch: int = 0) -> None:
        text = "x" * num_tokens
        self.stream.feed(delta_of(first, text, epoch=epoch), self.clock.monotonic())

    def take(self) -> int:
        return self.stream.read(self.clock.monotonic(), self._gaps).num_tokens

    async def give(self, after_s: float, first: int, num_tokens: int = 1) -> None:
        """Tokens come after a while and are given out at once."""
        await self.clock.advance(after_s)
        self.feed(first, num_tokens)
        assert self.take() == num_tokens

    def start(self, epoch: int) -> None:
        self.stream.feed(
            Started(epoch=epoch, worker_id="w", num_prompt_tokens=1), self.clock.monotonic()
        )

    def end(self, num_tokens: int) -> DeliveryRecord:
        now_s = self.clock.monotonic()
        epoch = self.stream.reader.epoch
        self.stream.feed(Usage(epoch=epoch, prompt_tokens=1, completion_tokens=num_tokens), now_s)
        self.stream.feed(
            Done(epoch=epoch, finish_reason=FinishReason.STOP, num_tokens=num_tokens), now_s
        )
        return delivery_record(self.stream, "gw", self.clock)


async def test_gaps_and_stalls_to_the_millisecond() -> None:
    watched = Watched(ManualClock())
    for number, gap_s in enumerate([2.0, 0.25, 0.5, 1.0, 0.999, 3.5, 0.25, 1.0]):
        await watched.give(gap_s, number)
    record = watched.end(8)
    # The first token ends no gap, and just under a second is no stall.
    assert record.num_stalls == 3
    assert record.stalled_ms == pytest.approx(5_500)
    assert record.longest_gap_ms == pytest.approx(3_500)
    assert record.first_byte_ms == pytest.approx(2_000)
    assert record.total_ms == pytest.approx(9_499)
    assert (record.tokens_delivered, record.num_resumes, record.model) == (8, 0, "demo")
    assert STALL_MS == 1_000


async def test_a_longest_gap_that_is_no_stall() -> None:
    watched = Watched(ManualClock())
    for number, gap_s in enumerate([0.0, 0.3, 0.1, 0.7, 0.2]):
        await watched.give(gap_s, number)
    record = watched.end(5)
    assert (record.num_stalls, record.stalled_ms) == (0, 0)
    assert record.longest_gap_ms == pytest.approx(700)


async def test_a_client_that_is_slow_to_read_saw_a_stall() -> None:
    """The tokens arrived in time, but the time of delivery to the client counts."""
    watched = Watched(ManualClock())
    await watched.give(0.1, 0)
    for number in range(1, 30):
        await watched.clock.advance(0.1)
        watched.feed(number, 1)
    assert watched.take() == 29
    record = watched.end(30)
    assert record.num_stalls == 1
    assert record.stalled_ms == pytest.approx(2_900)


async def test_what_nobody_takes_was_not_delivered() -> None:
    watched = Watched(ManualClock())
    await watched.give(0.1, 0, 2)
    watched.stream.detach(None)
    await watched.give(0.1, 2, 5)
    record = watched.end(7)
    assert (record.tokens_delivered, record.longest_gap_ms) == (2, 0)


async def test_another_gateway_counts_on() -> None:
    """The gateways' monotonic clocks differ and their wall clocks agree."""
    first = Watched(ManualClock())
    first.start(epoch=0)
    await first.give(0.5, 0)
    await first.give(1.5, 1)
    first.start(epoch=1)
    first.stream.delivery.num_replays = 2
    first.stream.delivery.intake_s = 0.125
    seen = statistics_of(first.stream, first.clock)
    assert seen.num_epochs == 2

    elsewhere = ManualClock(now_ns=first.clock.now_ns() - 100 * S_NS)
    await elsewhere.advance(102.0)  # two seconds on
    second = Watched(elsewhere, from_index=2)
    continue_statistics(second.stream, seen, elsewhere)
    second.start(epoch=1)  # the run that is known already, told again
    second.feed(0, 2, epoch=1)
    assert second.take() == 0
    await elsewhere.advance(0.25)
    second.feed(2, 1, epoch=1)
    assert second.take() == 1
    second.start(epoch=2)
    await elsewhere.advance(0.25)
    second.feed(3, 1, epoch=2)
    assert second.take() == 1
    record = second.end(4)
    assert record.first_byte_ms == pytest.approx(500)
    assert record.intake_ms == pytest.approx(125)
    assert record.total_ms == pytest.approx(500 + 1_500 + 2_000 + 500)
    assert record.num_stalls == 2
    assert record.stalled_ms == pytest.approx(1_500 + 2_250)
    assert record.longest_gap_ms == pytest.approx(2_250)
    assert record.tokens_delivered == 4
    assert (record.num_resumes, record.num_replays, record.num_epochs) == (1, 2, 3)


async def test_of_a_gateway_that_died_the_beginning_is_known() -> None:
    """Not when its client had the first token, nor the last one."""
    clock = ManualClock()
    received_ns = clock.now_ns()
    await clock.advance(5.0)
    watched = Watched(clock, from_index=3)
    continue_statistics(watched.stream, DeliveryStatistics(received_ns=received_ns), clock)
    await clock.advance(1.25)
    watched.feed(0, 4)
    assert watched.take() == 1
    record = watched.end(4)
    assert record.first_byte_ms == 0
    assert record.total_ms == pytest.approx(6_250)
    assert record.num_stalls == 1
    assert record.longest_gap_ms == pytest.approx(1_250)
    assert (record.tokens_delivered, record.num_resumes) == (4, 1)


async def test_a_wall_clock_that_is_behind_makes_no_negative_times() -> None:
    clock = ManualClock()
    watched = Watched(clock, from_index=1)
    later = clock.now_ns() + 3 * S_NS
    continue_statistics(
        watched.stream,
        DeliveryStatistics(received_ns=later, first_token_ns=later, last_token_ns=later),
        clock,
    )
    watched.feed(0, 2)
    watched.take()
    record = watched.end(2)
    assert (record.first_byte_ms, record.total_ms, record.longest_gap_ms) == (0, 0, 0)


async def test_what_is_kept_is_bounded_in_time_and_number() -> None:
    clock = ManualClock()
    history = DeliveryHistory(clock, keep_s=10.0)
    history.keep("r", {"r": DeliveryStatistics(received_ns=1)})
    history.keep("r", {"r-r1": DeliveryStatistics(received_ns=2)})
    assert set(history.of("r")) == {"r", "r-r1"}
    await clock.advance(10.5)
    assert history.of("r") == {}
    for number in range(5_000):
        history.keep(f"q{number}", {"": DeliveryStatistics(received_ns=1)})
    assert len(history) <= 4_096
    history.forget("q4999")
    assert history.of("q4999") == {}
    assert history.of("q4998")
