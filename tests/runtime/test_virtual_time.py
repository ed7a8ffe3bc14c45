"""An event loop that never waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from millrace.runtime.virtual_time import START_NS, StandstillError, VirtualClock, run_virtual


def test_hours_pass_at_once_and_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(clock: VirtualClock, name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async def main(clock: VirtualClock) -> int:
        await asyncio.gather(
            sleeper(clock, "late", 7_200.0),
            sleeper(clock, "early", 0.25),
            sleeper(clock, "as late", 7_200.0),
        )
        return clock.now_ns()

    begun_s = time.perf_counter()
    assert run_virtual(main) == START_NS + 7_200 * 10**9
    assert time.perf_counter() - begun_s < 5.0
    assert woken == [("early", 0.25), ("late", 7_200.0), ("as late", 7_200.0)]


def test_timeouts_are_of_the_same_time() -> None:
    async def main(clock: VirtualClock) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        return clock.monotonic()

    assert run_virtual(main) == 30.0


def test_threads_are_done_at_once() -> None:
    def fail() -> None:
        raise LookupError

    async def main(clock: VirtualClock) -> int:
        with pytest.raises(LookupError):
            await asyncio.to_thread(fail)
        result = await asyncio.to_thread(max, 3, 4)
        assert clock.monotonic() == 0.0
        return result

    assert run_virtual(main) == 4


def test_a_standstill_is_an_error_and_not_a_hang() -> None:
    async def main(clock: VirtualClock) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StandstillError):
        run_virtual(main)
