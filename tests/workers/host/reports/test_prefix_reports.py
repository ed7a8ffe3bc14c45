"""Reports of a worker's prefix cache to the schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.engine.types import PrefixChanges
from millrace.registry.served import ServedModel
from millrace.schemas.config import WorkerConfig
from millrace.schemas.control import PrefixReport
from millrace.workers.host.reports.prefixes import PrefixReporter
from tests.support.manual_clock import ManualClock
from tests.workers.scripted import bench


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def numbers(joined: bytes) -> list[int]:
    return [int.from_bytes(joined[i : i + 8], "little") for i in range(0, len(joined), 8)]


class Told:
    """Reporter, and the prefixes known to a scheduler that misses no report."""

    def __init__(self, clock: ManualClock, **settings: Any) -> None:
        self.clock = clock
        self.broker = MemoryBroker(clock)
        config = WorkerConfig(prefix_report_s=0.1, prefix_whole_s=10.0, **settings)
        self.reporter = PrefixReporter(MemoryBus(self.broker), config, "w-1", "m", clock)
        self.reports: list[PrefixReport] = []
        self.known: set[int] = set()

    def hear(self, report: PrefixReport) -> None:
        self.reports.append(report)
        if report.whole:
            self.known.clear()
        self.known |= set(numbers(report.added))
        self.known -= set(numbers(report.removed))


@asynccontextmanager
async def reporting(**settings: Any) -> AsyncIterator[Told]:
    clock = ManualClock()
    told = Told(clock, **settings)
    await MemoryBus(told.broker).workers.watch_prefixes(told.hear)
    run = asyncio.create_task(told.reporter.run())
    await clock.advance(0.0)
    yield told
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_what_changed_is_told_and_only_then() -> None:
    async with reporting() as told:
        (first,) = told.reports
        assert (first.worker_id, first.model, first.number) == ("w-1", "m", 1)
        assert first.whole, "who listens already knows that there is nothing"
        await told.clock.advance(5.0)
        assert len(told.reports) == 1
        told.reporter.note(PrefixChanges(added=keys(1, 2, 3)))
        told.reporter.note(PrefixChanges(added=keys(4), removed=keys(2)))
        await told.clock.advance(0.1)
        assert told.known == {1, 3, 4}
        told.reporter.note(PrefixChanges(added=keys(1)))
        await told.clock.advance(0.3)
        assert [report.number for report in told.reports] == [1, 2], "it was there before"


async def test_the_whole_is_told_from_time_to_time_the_last_used_first() -> None:
    async with reporting() as told:
        told.reporter.note(PrefixChanges(added=keys(1, 2, 3)))
        told.reporter.note(PrefixChanges(added=keys(1)))
        await told.clock.advance(10.1)
        assert told.reports[-1].whole
        assert numbers(told.reports[-1].added) == [1, 3, 2]


async def test_the_longest_unused_give_way() -> None:
    async with reporting(max_reported_prefixes=3) as told:
        told.reporter.note(PrefixChanges(added=keys(1, 2, 3)))
        await told.clock.advance(0.1)
        told.reporter.note(PrefixChanges(added=keys(1, 4)))
        await told.clock.advance(0.1)
        assert told.known == {1, 3, 4}
        assert numbers(told.reports[-1].removed) == [2]


async def test_after_an_outage_the_whole_is_told() -> None:
    async with reporting() as told:
        told.reporter.note(PrefixChanges(added=keys(1)))
        await told.clock.advance(0.1)
        told.reporter.report_whole()
        await told.clock.advance(0.1)
        assert told.reports[-1].whole
        assert told.known == {1}


async def test_nothing_is_told_where_nothing_is_wanted() -> None:
    clock = ManualClock()
    broker = MemoryBroker(clock)
    config = WorkerConfig(prefix_report_s=0.0)
    reporter = PrefixReporter(MemoryBus(broker), config, "w-1", "m", clock)
    reporter.note(PrefixChanges(added=keys(1)))
    await reporter.run()


_NUMBERS = st.lists(st.integers(1, 12), max_size=8)
_CHANGES = st.builds(
    lambda added, removed, whole: PrefixChanges(
        added=keys(*added), removed=keys(*set(removed) - set(added)), whole=whole
    ),
    added=_NUMBERS,
    removed=_NUMBERS,
    whole=st.sampled_from([False, False, False, True]),
)


@given(st.lists(st.one_of(_CHANGES, st.just(None)), max_size=12), st.integers(1, 12))
def test_a_scheduler_knows_the_last_used_keys(
    changes: list[PrefixChanges | None], limit: int
) -> None:
    """A change of None lets the time of a report pass."""

    async def run() -> None:
        async with reporting(max_reported_prefixes=limit) as told:
            cached: dict[int, None] = {}
            for change in changes:
                if change is None:
                    await told.clock.advance(0.1)
                    continue
                told.reporter.note(change)
                if change.whole:
                    cached.clear()
                for number in numbers(change.added):
                    cached.pop(number, None)
                    cached[number] = None
                for number in numbers(change.removed):
                    cached.pop(number, None)
                for number in list(cached)[:-limit]:
                    del cached[number]
            await told.clock.advance(0.1)
            assert told.known == set(cached)

    asyncio.run(run())


async def test_a_worker_tells_of_its_engine(demo: ServedModel) -> None:
    async with bench(demo, prefix_report_s=0.1) as b:
        reports: list[PrefixReport] = []
        await b.peer.workers.watch_prefixes(reports.append)
        b.engine.on_prefixes(PrefixChanges(added=keys(7)))
        await b.settle(0.1)
        assert numbers(reports[-1].added) == [7]
        b.engine.step(outstanding_prompt_tokens=40, prefill_tokens_per_s=900.0, decode_step_ms=8.0)
        await b.settle(0.5)
        status = b.statuses[-1]
        assert status.prefix_salted
        assert (status.outstanding_prompt_tokens, status.prefill_tokens_per_s) == (40, 900.0)
        assert status.decode_step_ms == 8.0
        b.engine.fail("exit code -9")
        await b.settle(1.0)
        assert reports[-1].whole, "the cache went with the engine"
        assert not reports[-1].added
