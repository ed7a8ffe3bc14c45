"""Supervisor of processes: starts them, writes their pids and logs, restarts them, stops them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from millrace.cli.local.private_files import make_private, write_private
from millrace.runtime.process import how_it_ended, num_oom_kills, python_environment

_PR_SET_PDEATHSIG = 1
_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 5.0
_STABLE_AFTER_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)

Ready = Callable[[], Awaitable[bool]]


class StartError(Exception):
    """Error if a process did not come up; the message names it and its log."""


@dataclass
class Process:
    """Supervised process.

    ``before_start`` runs in a thread before each start, ``ready`` is polled until it holds,
    ``on_restart`` runs after each later start, once the process is ready again. ``stop_timeout_s``
    is the time to end after SIGTERM. When all processes stop, a higher ``stage`` stops first. A
    process with ``force_after_s`` then gets a second SIGTERM after that time, since no other
    process could take over its work. ``niceness`` above 0 gives other processes precedence on the
    same core.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    before_start: Callable[[], None] | None = None
    ready: Ready | None = None
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 3.0
    force_after_s: float | None = None
    stage: int = 0
    niceness: int = 0
    on_restart: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True)
class PartView:
    """State of a supervised process. ``code`` is its return code if it does not run now;
    ``is_ready``: it has come up since its latest start."""

    process: Process
    pid: int
    up_s: float
    num_restarts: int
    code: int | None
    is_ready: bool


class Lost(NamedTuple):
    """Process that ended unexpectedly, with its return code. ``oom_kills`` is the value of
    ``num_oom_kills`` at its start."""

    name: str
    code: int
    oom_kills: int


class Supervisor:
    """Owner of the processes that it starts: none outlives it, even if it is killed."""

    def __init__(
        self,
        run_dir: Path,
        log_dir: Path,
        say: Callable[[str], None] = print,
        env: Mapping[str, str] = os.environ,
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Create a supervisor.

        Args:
            say: Gets messages about expected events.
            warn: Gets messages about problems; None: ``say`` gets them.
        """
        self._env = python_environment(env)
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._say = say
        self._warn = warn or say
        self.on_lost: Callable[[Lost], None] = lambda _lost: None
        self._running: dict[str, _Running] = {}
        self._stopping = False
        make_private(run_dir)
        make_private(log_dir)

    async def start(self, process: Process) -> None:
        """Start a process and wait until it is ready. Raises StartError."""
        running = _Running(process)
        self._running[process.name] = running
        await self._spawn(running)
        await self._wait_ready(running)
        running.watcher = asyncio.create_task(self._watch(running), name=f"watch {process.name}")

    def parts(self) -> list[PartView]:
        """List all processes that should run, in the order of their starts."""
        now_s = time.monotonic()
        return [
            PartView(
                one.process,
                one.handle.pid,
                now_s - one.started_at,
                one.num_restarts,
                one.handle.returncode,
                one.is_ready,
            )
            for one in self._running.values()
            if one.handle is not None
        ]

    async def restart(self, name: str) -> None:
        """End a process with SIGTERM, then SIGKILL; its watcher starts it again. Does nothing if it
        has not been started yet."""
        running = self._running.get(name)
        if running is not None and running.handle is not None and running.handle.returncode is None:
            running.is_asked_to_end = True
            await _end(running.handle, running.process.stop_timeout_s)

    async def remove(self, name: str) -> None:
        """Stop one process for good, with SIGTERM, then SIGKILL. Does nothing if it is unknown;
        cancel a waiting ``start`` of it first."""
        running = self._running.get(name)
        if running is not None:
            await self._halt(running, running.process.stop_timeout_s)
            self._running.pop(name, None)

    async def stop(self, within_s: float) -> None:
        """Stop all processes, stage by stage; kill processes that still run after ``within_s``."""
        self._stopping = True
        deadline = time.monotonic() + within_s
        by_stage = sorted(self._running.values(), key=_stage, reverse=True)
        for _, stage in itertools.groupby(by_stage, key=_stage):
            left_s = max(0.2, deadline - time.monotonic())
            await asyncio.gather(*(self._halt_with_all(one, left_s) for one in stage))

    async def _halt_with_all(self, running: _Running, left_s: float) -> None:
        process = running.process
        await self._halt(running, min(process.stop_timeout_s, left_s), process.force_after_s)

    async def _halt(
        self, running: _Running, within_s: float, force_after_s: float | None = None
    ) -> None:
        if running.watcher is not None:
            running.watcher.cancel()
            await asyncio.gather(running.watcher, return_exceptions=True)
        if running.handle is not None:
            await _end(running.handle, within_s, force_after_s)
        self._pid_file(running).unlink(missing_ok=True)

    async def _spawn(self, running: _Running) -> None:
        process = running.process
        if process.before_start is not None:
            await asyncio.to_thread(process.before_start)
        log = self._log_path(running).open("ab")
        try:
            running.handle = await asyncio.create_subprocess_exec(
                *process.command,
                env={**self._env, **process.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=functools.partial(begin_child, process.niceness),
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"{process.name} cannot be started: {error}") from error
        finally:
            log.close()
        running.started_at, running.is_ready = time.monotonic(), False
        running.oom_kills = num_oom_kills()
        write_private(self._pid_file(running), f"{running.handle.pid}\n")

    async def _wait_ready(self, running: _Running) -> None:
        process, handle = running.process, running.handle
        assert handle is not None
        deadline = time.monotonic() + process.start_timeout_s
        while process.ready is not None and not await process.ready():
            if handle.returncode is not None:
                raise StartError(
                    f"{process.name} ended with {how_it_ended(handle.returncode)} before it was "
                    f"ready: {self._last_words(running)}"
                )
            if time.monotonic() > deadline:
                raise StartError(
                    f"{process.name} was not ready within {process.start_timeout_s:.0f} s: "
                    f"{self._last_words(running)}"
                )
            await asyncio.sleep(0.02)
        running.is_ready = True

    async def _watch(self, running: _Running) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            assert running.handle is not None
            code = await running.handle.wait()
            # Child processes must not outlive it.
            _signal_group(running.handle.pid, signal.SIGKILL)
            if self._stopping:
                return
            if time.monotonic() - running.started_at > _STABLE_AFTER_S:
                backoff_s = _FIRST_BACKOFF_S
            if running.is_asked_to_end:
                tell = self._say
            else:
                tell = self._warn
                self.on_lost(Lost(running.process.name, code, running.oom_kills))
            running.is_asked_to_end = False
            tell(f"{running.process.name} ended ({how_it_ended(code)}); starting it again")
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
            running.num_restarts += 1
            try:
                await self._spawn(running)
                await self._wait_ready(running)
                if running.process.on_restart is not None:
                    await running.process.on_restart()
            except (StartError, OSError) as error:
                # End it, so that the next turn restarts it.
                self._warn(str(error))
                if running.handle.returncode is None:
                    _signal_group(running.handle.pid, signal.SIGKILL)

    def _pid_file(self, running: _Running) -> Path:
        return self._run_dir / f"{running.process.name}.pid"

    def _log_path(self, running: _Running) -> Path:
        return self._log_dir / f"{running.process.name}.log"

    def _last_words(self, running: _Running) -> str:
        path = self._log_path(running)
        lines = path.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'it said nothing'} (log: {path})"


@dataclass
class _Running:
    process: Process
    handle: asyncio.subprocess.Process | None = None
    watcher: asyncio.Task[None] | None = None
    started_at: float = 0.0
    num_restarts: int = 0
    is_ready: bool = False
    is_asked_to_end: bool = False
    oom_kills: int = 0


def _stage(running: _Running) -> int:
    return running.process.stage


def begin_child(niceness: int) -> None:
    """Prepare a child before its exec: it dies with its parent."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if niceness:
        os.nice(niceness)
        # If Linux shares the cores among sessions (autogroups), only the session's niceness counts,
        # and the child has its own session.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


async def _end(
    handle: asyncio.subprocess.Process, within_s: float, force_after_s: float | None = None
) -> None:
    """Send SIGTERM, a second one after ``force_after_s``, then SIGKILL to the process and its
    descendants."""
    force_after_s = min(within_s, force_after_s or within_s)
    for wait_s in (force_after_s, within_s - force_after_s):
        if handle.returncode is None and wait_s > 0:
            _signal_group(handle.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await handle.wait()
    _signal_group(handle.pid, signal.SIGKILL)
    await handle.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signal a process and its descendants; it leads its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
