"""kill -9 under load: every stream goes on and every request leaves one record."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.clients import Answer, ask_sse, ask_websocket
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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


async def _num_rows(system: System, answers: list[Answer]) -> tuple[int, int]:
    ids = ", ".join(f"'{answer.request_id}'" for answer in answers)
    [row] = system.sql(
        "SELECT count() AS num_rows, uniqExact(request_id) AS num_requests "
        f"FROM requests FINAL WHERE request_id IN ({ids})"
    )
    return int(row["num_rows"]), int(row["num_requests"])


async def _kill_while_streaming(system: System, http: httpx.AsyncClient, part: str) -> list[Answer]:
    tasks = await _ask_all(system, http)

    async def all_run() -> bool:
        health = (await http.get("/healthz")).json()
        return bool(health["open_streams"] >= NUM_STREAMS)

    await eventually(all_run)
    killed = system.kill(part)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
    await eventually(lambda: system.pid(part) != killed)
    return answers


async def test_all_streams_finish_when_the_worker_is_killed(
    system: System, http: httpx.AsyncClient
) -> None:
    answers = await _kill_while_streaming(system, http, "worker-1")
    assert [answer.completion_tokens for answer in answers] == [300] * NUM_STREAMS

    async def recorded() -> bool:
        return await _num_rows(system, answers) == (NUM_STREAMS, NUM_STREAMS)

    await eventually(recorded, timeout_s=10.0)


@pytest.mark.parametrize("part", ["scheduler-1", "telemetry-1", "kafka", "nats", "redis"])
async def test_nothing_is_lost_when_a_part_is_killed(
    system: System, http: httpx.AsyncClient, part: str
) -> None:
    answers = await _kill_while_streaming(system, http, part)
    assert [answer.completion_tokens for answer in answers] == [300] * NUM_STREAMS

    async def recorded() -> bool:
        try:
            return await _num_rows(system, answers) == (NUM_STREAMS, NUM_STREAMS)
        except OSError:  # telemetry is on its way back
            return False

    await eventually(recorded, timeout_s=30.0)
