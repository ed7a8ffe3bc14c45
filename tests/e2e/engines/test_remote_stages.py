"""A model of which another host computes a stage, as a user starts both: the death of its rank, and
of ``millrace stages`` itself, under load loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import Answer, ask_many
from tests.support.engine.stages import Stages
from tests.support.servers import free_port
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts ranks on two hosts; the group's tests kill them without a system"
    ),
]

NUM_STREAMS = 8
LONG = {"max_tokens": 100, "ignore_eos": True}
TOKEN = "stages-of-tests"


class Hosts:
    """The worker's host, which runs all of Millrace, and the host that joins it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "token").write_text(TOKEN)
        self._address = f"127.0.0.1:{free_port()}"
        self.start_stages()
        self.system = System(
            folder / "data",
            arguments=(
                *("--pipeline-parallel", "2", "--remote-stages", "1"),
                *("--stages-address", self._address),
            ),
            environment={"MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE": str(folder / "token")},
        )

    def start_stages(self) -> None:
        """Start the stages again, as a user or a supervisor does after they died."""
        token = str(self._folder / "token")
        log = self._folder / "stages.log"
        self.stages = Stages(log, "--join", self._address, "--token-file", token)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.system.start()
        yield hosts
        processes = [*hosts.system.processes(), *hosts.stages.ranks()]
        assert hosts.system.stop() == 0
        assert hosts.stages.stop() == 0
        assert not [process for process in processes if process.is_running()]
    finally:
        hosts.stages.kill()


async def _ask_all(system: System, http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    return await ask_many(http, system.websocket, "What is a host?", NUM_STREAMS, **LONG)


async def test_streams_go_on_when_the_other_host_loses_a_stage(hosts: Hosts) -> None:
    system = hosts.system
    async with httpx.AsyncClient(base_url=system.http, timeout=120.0) as http:
        undisturbed = await asyncio.gather(*await _ask_all(system, http))
        worker_pid = system.pid("worker-1")
        answers: list[Answer] = []
        for kills_rank in (True, False):
            ranks = hosts.stages.ranks()
            assert len(ranks) == 1
            tasks = await _ask_all(system, http)
            if kills_rank:
                ranks[0].kill()
            else:
                hosts.stages.kill()
                hosts.start_stages()
            again = await asyncio.wait_for(asyncio.gather(*tasks), timeout=120.0)
            assert [one.text for one in again] == [one.text for one in undisturbed]
            assert not [rank for rank in ranks if rank.is_running()]
            answers += again
        assert system.pid("worker-1") == worker_pid
        ids = ", ".join(f"'{answer.request_id}'" for answer in answers)

        async def recorded() -> bool:
            [row] = system.sql(
                "SELECT count() AS num_rows, uniqExact(request_id) AS num_requests, "
                f"min(num_devices) AS devices FROM requests FINAL WHERE request_id IN ({ids})"
            )
            numbers = [int(row[name]) for name in ("num_rows", "num_requests", "devices")]
            return numbers == [len(answers), len(answers), 2]

        await eventually(recorded)
