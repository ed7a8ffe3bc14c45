"""A model over two ranks with a device each, as a user starts it; the devices are the CPU here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.clients import Answer, ask_many
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts a system of two ranks; the group's tests kill ranks without one"
    ),
]

NUM_STREAMS = 6
LONG = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(
        tmp_path_factory.mktemp("ranks"),
        arguments=("--tensor-parallel", "2"),
        environment={
            "MILLRACE_WORKER__ENGINE__KERNELS": "reference",
            "MILLRACE_WORKER__ENGINE__MAX_NUM_SEQUENCES": "8",
            "MILLRACE_WORKER__ENGINE__MAX_BATCH_TOKENS": "64",
        },
    ).start()
    yield system
    processes = system.processes()
    assert system.stop() == 0
    assert not [process for process in processes if process.is_running()]


async def _ask_all(system: System, http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    return await ask_many(http, system.websocket, "What is a rank?", NUM_STREAMS, **LONG)


async def test_streams_go_on_when_a_rank_is_killed(group: System) -> None:
    async with httpx.AsyncClient(base_url=group.http, timeout=120.0) as http:
        undisturbed = await asyncio.gather(*await _ask_all(group, http))
        tasks = await _ask_all(group, http)
        [lead] = psutil.Process(group.pid("worker-1")).children()
        [member] = [
            child
            for child in lead.children()
            if any("parallel.member" in one for one in child.cmdline())
        ]
        member.kill()
        again = await asyncio.wait_for(asyncio.gather(*tasks), timeout=120.0)
        assert [one.text for one in again] == [one.text for one in undisturbed]
        assert not lead.is_running()
