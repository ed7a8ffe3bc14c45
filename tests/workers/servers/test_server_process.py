"""End of a worker: none of its server's processes remains, however the worker ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millrace.workers.servers.dialect import Command
from millrace.workers.servers.server_process import ServerProcess
from tests.support.engine_servers import runs
from tests.support.waiting import eventually

# A server whose own child cares for nothing, as the processes of an engine core do.
_SERVER = """
trap '' TERM
sh -c 'trap "" TERM; echo $$ >"$0/child"; while :; do sleep 1; done' "$1" &
echo $$ >"$1/server"
wait
"""


async def _serve(folder: Path) -> None:
    process = ServerProcess.prepare()
    (folder / "socket").write_text(str(process.folder))
    await process.start(Command(("/bin/sh", "-c", _SERVER, "server", str(folder)), {}))
    await process.wait()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker that leads a process group of its own, as ``millrace up`` does."""
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    started = subprocess.Popen(command, start_new_session=True)
    yield started
    started.kill()
    started.wait()


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["the worker", "its group"])
async def test_nothing_is_left_of_it(
    worker: subprocess.Popen[bytes], tmp_path: Path, kill: Callable[[int, int], None]
) -> None:
    files = [tmp_path / "server", tmp_path / "child"]
    await eventually(lambda: all(file.exists() and file.read_text() for file in files))
    family = [psutil.Process(int(file.read_text())) for file in files]
    kill(worker.pid, signal.SIGKILL)
    try:
        await eventually(lambda: not any(runs(one) for one in family), timeout_s=20.0)
        socket_folder = Path((tmp_path / "socket").read_text())
        await eventually(lambda: not socket_folder.exists())
    finally:
        for one in filter(runs, family):
            one.kill()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
