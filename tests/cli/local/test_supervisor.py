"""The supervisor with real processes: start, restart, stop, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.cli.local.supervisor import Process, StartError, Supervisor
from tests.support.waiting import eventually

_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]
_ENDS_WHEN_TOLD_TWICE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
signal.sigwait({signal.SIGTERM})
print("told twice", flush=True)
"""
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
    return Supervisor(
        tmp_path / "run", tmp_path / "logs", said.append, warn=lambda text: said.append(f"! {text}")
    )


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
    assert said == ["! part ended (signal SIGKILL); starting it again"]
    await supervisor.restart("part")
    await eventually(lambda: len(restarts) == 2)
    assert said[1:] == ["part ended (signal SIGTERM); starting it again"], "it was asked to"
    await supervisor.stop(within_s=5.0)
    assert not psutil.pid_exists(restarts[1])
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


async def test_a_slow_process_gets_a_second_stop_signal(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "slow.log"

    async def ready() -> bool:
        return "ready" in log.read_text()

    await supervisor.start(
        Process(
            name="slow",
            command=[sys.executable, "-c", _ENDS_WHEN_TOLD_TWICE],
            ready=ready,
            stop_timeout_s=30.0,
            force_after_s=0.05,
        )
    )
    await supervisor.stop(within_s=30.0)
    assert "told twice" in log.read_text()


async def test_a_removed_process_ends_and_is_not_started_again(
    supervisor: Supervisor, tmp_path: Path, said: list[str]
) -> None:
    await supervisor.start(Process(name="stays", command=_WAITS))
    await supervisor.start(Process(name="part", command=_WAITS))
    stays, first = _pid(tmp_path, "stays"), _pid(tmp_path, "part")
    await supervisor.remove("part")
    await supervisor.remove("never-there")
    assert not psutil.pid_exists(first)
    assert not (tmp_path / "run" / "part.pid").exists()
    await supervisor.start(Process(name="part", command=_WAITS))
    assert _pid(tmp_path, "part") != first
    assert psutil.pid_exists(stays)
    assert said == []
    await supervisor.stop(within_s=5.0)


async def test_a_process_whose_start_was_given_up_can_be_removed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    async def never() -> bool:
        return False

    file = tmp_path / "run" / "part.pid"
    starting = asyncio.create_task(
        supervisor.start(Process(name="part", command=_WAITS, ready=never))
    )
    await eventually(lambda: file.exists() and bool(file.read_text()))
    pid = _pid(tmp_path, "part")
    starting.cancel()
    await asyncio.wait((starting,))
    await supervisor.remove("part")
    assert not psutil.pid_exists(pid)


async def test_stages_stop_one_after_the_other(supervisor: Supervisor, tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    def says(name: str, stage: int) -> Process:
        script = (
            "import pathlib, signal, sys\n"
            "def end(*_):\n"
            f"    pathlib.Path({str(ended)!r}).open('a').write({name!r})\n"
            "    sys.exit()\n"
            "signal.signal(signal.SIGTERM, end)\n"
            "print('listens', flush=True)\n"
            "signal.pause()\n"
        )
        log = tmp_path / "logs" / f"{name}.log"

        async def listens() -> bool:
            return "listens" in log.read_text()

        command = [sys.executable, "-c", script]
        return Process(name=name, command=command, ready=listens, stage=stage)

    for name, stage in (("c", 0), ("a", 2), ("b", 1)):
        await supervisor.start(says(name, stage))
    await supervisor.stop(within_s=10.0)
    assert ended.read_text() == "abc"


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from millrace.cli.local.supervisor import Process, Supervisor\n"
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


async def test_a_process_runs_at_its_niceness(tmp_path: Path, supervisor: Supervisor) -> None:
    await supervisor.start(Process("first", _WAITS))
    await supervisor.start(Process("later", _WAITS, niceness=7))
    niceness = {name: psutil.Process(_pid(tmp_path, name)).nice() for name in ("first", "later")}
    assert niceness["later"] == min(19, niceness["first"] + 7)
    session = Path(f"/proc/{_pid(tmp_path, 'later')}/autogroup")
    if session.exists():
        assert session.read_text().split()[-1] == "7"
    await supervisor.stop(5.0)
