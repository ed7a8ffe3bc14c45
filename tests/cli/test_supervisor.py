"""The supervisor with real processes: start, restart, stop, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cli.supervisor import Process, StartError, Supervisor
from tests.support.waiting import eventually

_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]
_IGNORES_SIGTERM = [
    sys.executable,
    "-c",
    (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
        "[signal.pause() for _ in iter(int, 1)]"
    ),
]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str]) -> Supervisor:
    return Supervisor(tmp_path / "run", tmp_path / "logs", said.append)


def _pid(tmp_path: Path, name: str) -> int:
    return int((tmp_path / "run" / f"{name}.pid").read_text())


async def test_a_killed_process_is_started_again(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    restarts: list[int] = []

    async def note() -> None:
        restarts.append(_pid(tmp_path, "part"))

    await supervisor.start(Process(name="part", command=_WAITS, on_restart=note))
    first = _pid(tmp_path, "part")
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: bool(restarts))
    assert restarts[0] != first
    assert said == ["part ended (signal SIGKILL); starting it again"]
    await supervisor.stop(within_s=5.0)
    assert not psutil.pid_exists(restarts[0])
    assert not (tmp_path / "run" / "part.pid").exists()


async def test_a_process_that_ends_before_it_is_ready_is_an_error_with_its_last_words(
    supervisor: Supervisor,
) -> None:
    async def never() -> bool:
        return False

    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(StartError, match="exit code 1 before it was ready: no such model"):
        await supervisor.start(Process(name="part", command=command, ready=never))


async def test_a_command_that_is_not_there_is_an_error(supervisor: Supervisor) -> None:
    with pytest.raises(StartError, match="part cannot be started"):
        await supervisor.start(Process(name="part", command=["./no-such-binary"]))


async def test_a_process_that_is_not_ready_in_time_is_an_error(supervisor: Supervisor) -> None:
    async def never() -> bool:
        return False

    with pytest.raises(StartError, match="not ready within"):
        await supervisor.start(
            Process(name="part", command=_WAITS, ready=never, start_timeout_s=0.1)
        )
    await supervisor.stop(within_s=5.0)


async def test_stopping_kills_what_does_not_listen(supervisor: Supervisor, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "deaf.log"

    async def deaf() -> bool:
        return "deaf" in log.read_text()

    await supervisor.start(
        Process(name="deaf", command=_IGNORES_SIGTERM, ready=deaf, stop_timeout_s=0.2)
    )
    pid = _pid(tmp_path, "deaf")
    await supervisor.stop(within_s=2.0)
    assert not psutil.pid_exists(pid)


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from cli.supervisor import Process, Supervisor\n"
        "async def main():\n"
        f"    folder = pathlib.Path({str(tmp_path)!r})\n"
        "    supervisor = Supervisor(folder / 'run', folder / 'logs')\n"
        f"    await supervisor.start(Process(name='part', command={_WAITS!r}))\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    file = tmp_path / "run" / "part.pid"
    await eventually(lambda: file.exists() and bool(file.read_text()))
    child = psutil.Process(_pid(tmp_path, "part"))
    parent.kill()
    parent.wait()
    await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
