"""Limits of users' queries: turns, and the memory of all queries."""

from __future__ import annotations

import asyncio

import pytest

from millrace.telemetry.store.admission import QueryAdmission
from millrace.telemetry.store.query_watch import QueryWatch, RunningQuery
from millrace.telemetry.store.reading import QueryError

_MIB = 1024 * 1024


async def entered(tasks: list[asyncio.Task[None]]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


def entering(admission: QueryAdmission, *users: str) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(admission.enter(user)) for user in users]


async def test_a_user_cannot_hold_all_places() -> None:
    admission = QueryAdmission(max_running=4, max_per_user=3, max_waiting=10, max_wait_s=60)
    tasks = entering(admission, "a", "a", "a", "a", "a", "b")
    assert await entered(tasks) == [True, True, True, False, False, True]
    # All places are taken: the next is for the user with the fewest queries, not for the oldest.
    late = entering(admission, "c")
    assert await entered(late) == [False]
    admission.leave("a")
    assert await entered([*tasks[3:], *late]) == [False, False, True, True]
    admission.leave("b")
    assert await entered([*tasks[3:5]]) == [True, False]
    tasks[4].cancel()


async def test_waiting_is_bounded_and_says_so() -> None:
    admission = QueryAdmission(max_running=1, max_per_user=5, max_waiting=1, max_wait_s=0.01)
    await admission.enter("a")
    (waiting,) = entering(admission, "a")
    await entered([waiting])
    with pytest.raises(QueryError, match="1 of 1 run, 0 of 1 of this user, and 1 wait") as raised:
        await admission.enter("b")
    assert raised.value.number == 202
    with pytest.raises(QueryError, match="0 wait"):
        await waiting
    admission.leave("a")
    await admission.enter("b")


async def test_a_query_that_is_cancelled_as_its_turn_comes_gives_its_place_on() -> None:
    admission = QueryAdmission(max_running=1, max_per_user=1, max_waiting=5, max_wait_s=60)
    await admission.enter("a")
    first, second = entering(admission, "a", "b")
    await entered([first, second])
    admission.leave("a")
    first.cancel()
    assert await entered([first, second]) == [True, True]
    assert (first.cancelled(), second.cancelled()) == (True, False)


def test_the_query_with_the_most_memory_is_ended() -> None:
    killed: list[str] = []

    def kill(query_id: str) -> bool:
        killed.append(query_id)
        return True

    watch = QueryWatch(1_000 * _MIB, list, kill)
    watch.close()

    def seen(**mib: int) -> list[str]:
        killed.clear()
        watch.bound([RunningQuery(each, size * _MIB, 0.0, ()) for each, size in mib.items()])
        return list(killed)

    assert seen() == []
    assert seen(a=300, b=200) == []
    assert seen(a=300, b=201, c=0) == ["a"]
    # Its memory comes back in a moment: no other query is ended for it.
    assert seen(a=300, b=400) == []
    assert seen(a=300, b=450, c=51) == ["b"]
    assert seen(a=300, b=450, c=251, d=1) == ["c"]
    error = watch.leave("c")
    assert error is not None
    assert error.number == 241
    assert "they use 1002 MiB, maximum: 500 MiB. This query used the most of it, 251" in str(error)
    assert watch.leave("d") is None
    assert seen(c=600) == ["c"]


def test_a_query_that_could_not_be_ended_is_tried_again() -> None:
    killed: list[str] = []

    def kill(query_id: str) -> bool:
        killed.append(query_id)
        return len(killed) > 1

    watch = QueryWatch(1_000 * _MIB, list, kill)
    watch.close()
    running = [RunningQuery("a", 600 * _MIB, 0.0, ())]
    watch.bound(running)
    assert watch.leave("a") is None
    watch.bound(running)
    watch.bound(running)
    assert killed == ["a", "a"]
    assert watch.leave("a") is not None
