"""Outcomes of several pieces of work."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.tasks import Tasks, outcomes


async def _give(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError(number)
    return number


@pytest.mark.parametrize("numbers", [[], [1], [-1], [1, -2, 3]])
async def test_each_work_has_its_outcome(numbers: list[int]) -> None:
    found = await outcomes([_give(number) for number in numbers])
    assert [one.args[0] if isinstance(one, ValueError) else one for one in found] == numbers
    assert [isinstance(one, ValueError) for one in found] == [number < 0 for number in numbers]


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelled_caller_cancels_the_works(count: int) -> None:
    cancelled = 0

    async def wait() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async def wait_for_all() -> None:
        await outcomes([wait() for _ in range(count)])

    tasks = Tasks()
    waiting = tasks.spawn(wait_for_all(), "wait for all")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancelled == count
