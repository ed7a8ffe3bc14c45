"""Streams across the death of the worker that computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from tests.e2e.clients import Answer
from tests.support.system import System
from tests.support.waiting import eventually


async def assert_streams_survive_the_worker(
    system: System,
    http: httpx.AsyncClient,
    ask: Callable[[int], Coroutine[Any, Any, Answer]],
    num_streams: int,
) -> None:
    """The texts of ``ask(0)``, ``ask(1)``, … are the same with the worker killed under them."""

    def ask_all() -> list[asyncio.Task[Answer]]:
        return [asyncio.create_task(ask(number)) for number in range(num_streams)]

    undisturbed = await asyncio.gather(*ask_all())
    tasks = ask_all()

    async def all_run() -> bool:
        health = (await http.get("/healthz")).json()
        return bool(health["open_streams"] >= num_streams)

    await eventually(all_run)
    killed = system.kill("worker-1")
    answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
    await eventually(lambda: system.pid("worker-1") != killed)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
