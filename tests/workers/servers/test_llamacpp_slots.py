"""Assignment of the slots of llama.cpp's server."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.workers.servers.dialects.llamacpp import SlotAssignment, SlotTable


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_slot_is_used_again_for_its_salt_and_longest_prefix() -> None:
    slots = SlotTable(3)
    await slots.acquire("a", "x", (1, 2, 3, 4))
    await slots.acquire("b", "x", (1, 2, 9))
    await slots.acquire("c", "y", (5,))
    assert [slots.slot_of(name) for name in "abc"] == [
        SlotAssignment(0, may_reuse=False),
        SlotAssignment(1, may_reuse=False),
        SlotAssignment(2, may_reuse=False),
    ]
    for name in "abc":
        slots.release(name)
    await slots.acquire("d", "x", (1, 2, 3, 7))
    assert slots.slot_of("d") == SlotAssignment(0, may_reuse=True)
    await slots.acquire("e", "z", (1, 2, 9))
    assert slots.slot_of("e") == SlotAssignment(1, may_reuse=False)


async def test_first_free_slot_goes_to_the_waiting_request_of_highest_rank() -> None:
    slots = SlotTable(1)
    await slots.acquire("runs", "", (1,))
    low = asyncio.ensure_future(slots.acquire("low", "", (1,), priority=0))
    high = asyncio.ensure_future(slots.acquire("high", "", (1,), priority=5))
    later = asyncio.ensure_future(slots.acquire("later", "", (1,), priority=5))
    await _turns()
    assert slots.slot_of("low") is None
    for name, task in (("high", high), ("later", later), ("low", low)):
        slots.release({"high": "runs", "later": "high", "low": "later"}[name])
        await _turns()
        assert task.done()
        assert slots.slot_of(name) is not None
        assert slots.share_in_use == 1.0
    slots.release("low")
    assert slots.share_in_use == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), max_size=60))
def test_no_slot_is_given_twice_or_lost(steps: list[tuple[int, int, bool]]) -> None:
    """Requests come, end and are cancelled in any order."""

    async def run() -> None:
        slots = SlotTable(3)
        tasks: dict[str, asyncio.Task[None]] = {}
        for number, salt, is_slow in steps:
            name = str(number)
            if name in tasks:
                slots.release(name)
                tasks.pop(name).cancel()
            else:
                tasks[name] = asyncio.ensure_future(slots.acquire(name, str(salt), (number,)))
            if is_slow:
                await _turns()
            given_out = [one.number for name in tasks if (one := slots.slot_of(name))]
            assert len(given_out) == len(set(given_out))
        await _turns()
        running = [name for name in tasks if slots.slot_of(name)]
        assert len(running) == min(3, len(tasks))
        for name, task in tasks.items():
            slots.release(name)
            task.cancel()
        await _turns()
        assert slots.share_in_use == 0.0

    asyncio.run(run())


def test_release_of_an_unknown_request_does_nothing() -> None:
    slots = SlotTable(1)
    slots.release("unknown")
    assert slots.share_in_use == pytest.approx(0.0)
