"""Processes that a benchmark starts, and the resources that processes have used."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from millrace.cli.local.supervisor import begin_child


@contextmanager
def remote_stages(number: int) -> Iterator[str]:
    """Run ``millrace stages`` for ``number`` stages; yield the address at which it joins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = (sys.executable, "-m", "millrace", "stages", "--join", address)
    process = subprocess.Popen((*command, "--max-stages", str(number)), stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def end(*processes: subprocess.Popen[bytes]) -> None:
    """End processes by SIGTERM, and by SIGKILL after a while."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


ResultT = TypeVar("ResultT")
_ENDS_WITHIN_S = 20.0
SPAWN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def spawned(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """Run ``target`` in a separate process, which is killed at the end of the block."""
    process = SPAWN.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def in_new_process(function: Callable[..., ResultT], *args: object) -> ResultT:
    """Call a function of a module in a new process, with memory and threads of its own."""
    with ProcessPoolExecutor(1, mp_context=SPAWN) as processes:
        return processes.submit(function, *args).result()


@contextlib.contextmanager
def busy_processes(number: int, *, niceness: int) -> Iterator[None]:
    """Run ``number`` processes that use a core each, in sessions of their own."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"],
            preexec_fn=partial(begin_child, niceness),
            start_new_session=True,
        )
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class ProcessUsage:
    """Resources that a process has used, seen from outside."""

    def __init__(self, pid: int | None) -> None:
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, in seconds."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def num_files(self) -> int:
        """Return the number of open files, including sockets."""
        return int(self._process.num_fds())


class Reading(msgspec.Struct, frozen=True):
    """Resources that a process has used since it started."""

    role: str
    cpu_s: float
    num_switches: int


def role_of(command: Sequence[str]) -> str:
    """Return a process's role by its command line: the module of ``python -m``, or the program."""
    words = list(command)
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].removeprefix("millrace.")
    # Redis writes its address behind its name.
    return Path(words[0]).name.split()[0] if words else "ended"


def read(processes: Sequence[psutil.Process]) -> dict[int, Reading]:
    """Return readings by process id, of processes that still run."""
    readings = {}
    for process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                readings[process.pid] = Reading(
                    role_of(process.cmdline()),
                    float(times.user + times.system),
                    _voluntary_switches(process.pid),
                )
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return readings


def _voluntary_switches(pid: int) -> int:
    """Return the switches of all threads: the process's file counts the first thread only."""
    num_switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                num_switches += int(line.split()[1])
    return num_switches
