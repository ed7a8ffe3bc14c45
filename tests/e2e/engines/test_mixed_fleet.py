"""Workers of one model on vLLM and our own engine: each continues the other's streams."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.clients import ask_websocket
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a server of another project"),
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]

_NUM_STREAMS = 12
_NUM_TOKENS = 600


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = ("--port", "0", "--engine", "vllm", "--model", "demo")
    running = System(tmp_path_factory.mktemp("mixed"), arguments, starts_within_s=400.0).start()
    yield running
    assert running.stop() == 0


@contextmanager
def own_worker(system: System, name: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with our own engine beside the one with vLLM."""
    beside = psutil.Process(system.pid("worker-1"))
    settings = {
        "MILLRACE_WORKER__NAME": name,
        "MILLRACE_WORKER__ENGINE__KIND": "real",
        "MILLRACE_METRICS__PORT": "0",
    }
    with (folder / "own.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, *beside.cmdline()[1:]],
            env=beside.environ() | settings,
            stdout=log,
            stderr=log,
        )
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait(30.0)


@pytest.mark.parametrize("killed", ["own", "worker-1"])
async def test_streams_of_a_killed_worker_go_on_in_another_engine(
    system: System, tmp_path: Path, killed: str
) -> None:
    own = f"own-for-{killed}"
    with own_worker(system, own, tmp_path) as worker:
        await eventually(lambda: _serves(system, own), timeout_s=180.0)
        asked = [asyncio.create_task(_ask(system, number)) for number in range(_NUM_STREAMS)]
        is_own = killed == "own"
        victim, heir = (own, "worker-1") if is_own else ("worker-1", own)
        await eventually(lambda: _num_running(system, victim) > 1, timeout_s=30.0)
        if is_own:
            worker.kill()
        else:
            assert worker.poll() is None
            system.kill("worker-1")
        answers = await asyncio.wait_for(asyncio.gather(*asked), timeout=120.0)
    assert [count for count, _ in answers] == [_NUM_TOKENS] * _NUM_STREAMS
    ids = ", ".join(f"'{name}'" for _, name in answers)

    def rows() -> list[dict[str, Any]]:
        return system.sql(f"SELECT worker, epoch FROM requests FINAL WHERE request_id IN ({ids})")

    await eventually(lambda: len(rows()) == _NUM_STREAMS, timeout_s=20.0)
    # Streams of the worker when it was killed; a stream may have ended before.
    moved = [row["worker"] for row in rows() if int(row["epoch"]) > 1]
    assert len(moved) > 1
    assert all(worker.startswith(f"{heir}-") for worker in moved)


async def _ask(system: System, number: int) -> tuple[int, str]:
    """Return the number of received tokens, each index once, and the request's id."""
    answer = await ask_websocket(
        system.websocket, f"What is TTFT? {number}", max_tokens=_NUM_TOKENS, ignore_eos=True
    )
    return answer.completion_tokens, answer.request_id


def _num_running(system: System, worker: str) -> int:
    rows = system.sql(
        "SELECT num_running FROM worker_samples FINAL "
        f"WHERE name = '{worker}' ORDER BY sampled_at DESC LIMIT 1"
    )
    return int(rows[0]["num_running"]) if rows else 0


def _serves(system: System, worker: str) -> bool:
    return bool(system.sql(f"SELECT 1 FROM worker_samples WHERE name = '{worker}' LIMIT 1"))
