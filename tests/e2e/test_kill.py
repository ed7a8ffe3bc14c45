"""Kills of parts under load: every stream continues and every request leaves one record."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.clients import Answer, ask_sse, ask_websocket
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

NUM_STREAMS = 20
LONG = {"max_tokens": 300, "ignore_eos": True}


async def _ask_all(system: System, http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    return [
        asyncio.create_task(
            ask_websocket(system.websocket, f"What is TTFT? {i}", **LONG)
            if i % 2
            else ask_sse(http, f"What is TTFT? {i}", **LONG)
        )
        for i in range(NUM_STREAMS)
    ]


async def _each_has_one_record(system: System, answers: list[Answer]) -> None:
    """Wait until every answer has a row; then each must have one."""
    ids = {answer.request_id for answer in answers}
    listed = ", ".join(f"'{request_id}'" for request_id in ids)
    query = f"SELECT request_id FROM requests FINAL WHERE request_id IN ({listed})"
    recorded: list[str] = []

    async def are_there() -> bool:
        try:
            recorded[:] = [row["request_id"] for row in system.sql(query)]
        except OSError:  # The store or the sink was killed and is starting again.
            return False
        return set(recorded) == ids

    await eventually(are_there, timeout_s=60.0, what="a record of each request")
    assert sorted(recorded) == sorted(ids)


async def _start_streams(system: System, http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    tasks = await _ask_all(system, http)

    async def all_run() -> bool:
        health = (await http.get("/healthz")).json()
        return bool(health["open_streams"] >= NUM_STREAMS)

    await eventually(all_run)
    return tasks


@pytest.fixture(scope="module")
def undisturbed(system: System) -> list[Answer]:
    """The answers to the streams when nothing is killed."""

    async def ask_all() -> list[Answer]:
        async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as http:
            return await asyncio.gather(*await _ask_all(system, http))

    return asyncio.run(ask_all())


async def _kill_while_streaming(
    system: System, http: httpx.AsyncClient, *parts: str
) -> list[Answer]:
    tasks = await _start_streams(system, http)
    killed = {part: system.kill(part) for part in parts}
    answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
    await eventually(lambda: all(system.pid(part) != pid for part, pid in killed.items()))
    return answers


async def test_all_streams_finish_when_the_worker_is_killed(
    system: System, http: httpx.AsyncClient
) -> None:
    answers = await _kill_while_streaming(system, http, "worker-1")
    assert [answer.completion_tokens for answer in answers] == [300] * NUM_STREAMS
    await _each_has_one_record(system, answers)


def _num_replacements(log: Path) -> int:
    """Return how many times all requests continued in a new engine."""
    return log.read_text().count("all requests continue in the new engine")


@pytest.mark.parametrize(
    "num_kills",
    [1, pytest.param(2, marks=pytest.mark.slow(reason="the same as one kill, once more"))],
)
async def test_all_streams_go_on_when_the_engine_is_killed(
    system: System, http: httpx.AsyncClient, undisturbed: list[Answer], num_kills: int
) -> None:
    """The worker lives and continues all streams in another engine, more than once."""
    worker_pid, log = system.pid("worker-1"), system.data / "logs" / "worker-1.log"
    num_replaced = _num_replacements(log)
    tasks = await _start_streams(system, http)
    for number in range(1, num_kills + 1):
        [engine] = psutil.Process(worker_pid).children()
        engine.kill()
        wanted = num_replaced + number
        await eventually(lambda n=wanted: _num_replacements(log) == n, timeout_s=60.0)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert [answer.completion_tokens for answer in answers] == [300] * NUM_STREAMS
    assert system.pid("worker-1") == worker_pid
    await _each_has_one_record(system, answers)


async def test_all_streams_finish_when_worker_and_scheduler_are_killed_together(
    system: System, http: httpx.AsyncClient
) -> None:
    answers = await _kill_while_streaming(system, http, "worker-1", "scheduler-1")
    assert [answer.completion_tokens for answer in answers] == [300] * NUM_STREAMS
    await _each_has_one_record(system, answers)


@pytest.mark.slow(reason="tests/protocol and the scheduler's tests cover workers that come back")
async def test_a_frozen_worker_that_wakes_up_does_no_harm(
    system: System, http: httpx.AsyncClient, undisturbed: list[Answer]
) -> None:
    """Frames and acknowledgements of a worker that was given up while frozen have no effect."""
    log = system.data / "logs" / "scheduler-1.log"
    num_gone = log.read_text().count("a worker is gone")
    tasks = await _start_streams(system, http)
    process = psutil.Process(system.pid("worker-1"))
    frozen = [process, *process.children(recursive=True)]
    for one in frozen:
        one.suspend()
    try:
        await eventually(lambda: log.read_text().count("a worker is gone") > num_gone)
    finally:
        for one in frozen:
            one.resume()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    await _each_has_one_record(system, answers)


_RECORDS_WAIT = pytest.mark.slow(reason="tests/telemetry/sink/test_crashes.py kills it, too")


@pytest.mark.parametrize(
    "part",
    [
        "scheduler-1",
        "nats",
        "redis",
        pytest.param("telemetry-1", marks=_RECORDS_WAIT),
        pytest.param("kafka", marks=_RECORDS_WAIT),
    ],
)
async def test_nothing_is_lost_when_a_part_is_killed(
    system: System, http: httpx.AsyncClient, part: str
) -> None:
    answers = await _kill_while_streaming(system, http, part)
    assert [answer.completion_tokens for answer in answers] == [300] * NUM_STREAMS
    await _each_has_one_record(system, answers)
