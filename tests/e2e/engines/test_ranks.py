"""A model over two stages of two ranks, as a user starts it: it answers, and the death of the first
or the last under load loses nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.clients import Answer, ask_many
from tests.support.processes import children_by_age
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts a system of four ranks; the group's tests kill ranks without one"
    ),
]

NUM_STREAMS = 20
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(
        tmp_path_factory.mktemp("ranks"),
        arguments=("--tensor-parallel", "2", "--pipeline-parallel", "2"),
    ).start()
    yield system
    processes = system.processes()
    assert system.stop() == 0
    assert not [process for process in processes if process.is_running()]


def _ranks(system: System) -> list[psutil.Process]:
    """Return the processes of all ranks in rank order, those of the first stage first."""
    [lead] = psutil.Process(system.pid("worker-1")).children()
    return [lead, *children_by_age(lead.pid)]


async def _ask_all(system: System, http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    return await ask_many(http, system.websocket, "What is a rank?", NUM_STREAMS, **LONG)


async def test_streams_go_on_whichever_rank_is_killed(group: System) -> None:
    async with httpx.AsyncClient(base_url=group.http, timeout=120.0) as http:
        undisturbed = await asyncio.gather(*await _ask_all(group, http))
        worker_pid = group.pid("worker-1")
        answers: list[Answer] = []
        for rank in (3, 0):
            before = _ranks(group)
            tasks = await _ask_all(group, http)
            before[rank].kill()
            again = await asyncio.wait_for(asyncio.gather(*tasks), timeout=120.0)
            assert [one.text for one in again] == [one.text for one in undisturbed]
            assert not [process for process in before if process.is_running()]
            answers += again
        assert group.pid("worker-1") == worker_pid
        ids = ", ".join(f"'{answer.request_id}'" for answer in answers)

        async def recorded() -> bool:
            [row] = group.sql(
                "SELECT count() AS num_rows, uniqExact(request_id) AS num_requests, "
                f"min(num_devices) AS devices FROM requests FINAL WHERE request_id IN ({ids})"
            )
            numbers = [int(row[name]) for name in ("num_rows", "num_requests", "devices")]
            return numbers == [len(answers), len(answers), 4]

        await eventually(recorded)


def test_status_says_how_many_devices_a_worker_has(group: System) -> None:
    command = [sys.executable, "-m", "millrace", "status", "--data", str(group.data)]
    text, in_json = (
        subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
        for options in ([], ["--json"])
    )
    devices = {part["name"]: part["num_devices"] for part in json.loads(in_json)["parts"]}
    assert devices.pop("worker-1") == 4
    assert set(devices.values()) == {1}
    heading, row = (
        next(line for line in text.splitlines() if line.startswith(name))
        for name in ("part ", "worker-1 ")
    )
    assert row[: heading.index("devices") + len("devices")].split()[-1] == "4"
