"""Print which files and functions of ours run for one chat request, and which files name a setting.

    python -m tests.suite.request_path [--functions] [--json] [--setting NAME]

The request is a streamed chat completion over HTTP. The gateway, the scheduler and the worker's bus
side share one process and the in-memory bus; the engine is a real one with a tiny model, in a
thread of that process. A request before it warms the parts up. The functions are recorded from the
request's first byte until it is stored and forgotten. Functions that also run while there is no
request, such as those of heartbeats, are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import httpx

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.gateway.models import LoadedModels
from millrace.registry.catalogue import ModelEntry, load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.config import EngineConfig, SchedulerConfig, WorkerConfig
from millrace.schemas.models.cards import ModelCard
from millrace.workers.host.worker import Worker
from millrace.workers.process import loop
from millrace.workers.process.engine_process import EngineClient
from millrace.workers.process.keeper import EngineKeeper
from tests.e2e.jobs.scribe_system import WorkersIndex
from tests.support.engine.checkpoints_made import write_catalogue
from tests.support.repository import PACKAGES, ROOT
from tests.support.running_gateway import running_gateway

MODEL = "tiny"
IDLE_S = 2.5  # in which every regular service has its turn, at least twice
_SETTLES_S = 0.3  # after which a request that has ended is stored and forgotten
_NEVER_S = 3600.0
# What runs by timers too slow for the idle time to show.
_BACKGROUND = (
    "runtime/alerts/",
    "gateway/alerts.py",
    "gateway/request/failure_log.py",
    "bus/store/watch.py",
    "workers/host/leases.py",
)
_NOT_FUNCTIONS = ("<module>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


class Function(NamedTuple):
    """Function of ours; ``file`` is below the repository's root."""

    file: str
    name: str


class Recorder:
    """Recorder of every Python function that any thread enters while ``code`` is a set."""

    def __init__(self) -> None:
        self.codes: set[CodeType] | None = None

    def install(self) -> None:
        """Watch this thread and all threads that start from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def remove(self) -> None:
        """Stop watching. Running threads go on unrecorded."""
        self.codes = None
        sys.setprofile(None)
        threading.setprofile(None)

    def take(self) -> set[Function]:
        """Stop recording, and return the functions of ours that were entered."""
        codes, self.codes = self.codes or set(), None
        return set(_ours(codes))

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.codes is not None and event == "call":
            self.codes.add(frame.f_code)


def _ours(codes: Iterable[CodeType]) -> Iterable[Function]:
    for code in codes:
        if code.co_name in _NOT_FUNCTIONS or code.co_filename.startswith("<"):
            continue
        path = Path(os.path.realpath(code.co_filename))
        if not path.is_relative_to(ROOT):
            continue
        file = path.relative_to(ROOT)
        if file.parts[0] in PACKAGES and not str(file).startswith(_BACKGROUND):
            yield Function(str(file), code.co_qualname)


class _EngineThread:
    """Stand-in for the engine's process: a thread with the same loop."""

    pid = 0

    def __init__(self, fd: int) -> None:
        self._ended = asyncio.Event()
        running = asyncio.get_running_loop()

        def serve() -> None:
            loop.serve(fd, os.getpid())
            running.call_soon_threadsafe(self._ended.set)

        threading.Thread(target=serve, name="engine", daemon=True).start()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def kill(self) -> None:
        """Do nothing: the thread ends by itself, when its socket is closed."""


async def _start_thread(*_command: str, pass_fds: tuple[int, ...], **_options: Any) -> Any:
    return _EngineThread(os.dup(pass_fds[0]))


async def _start_engine(model: ServedModel) -> EngineClient:
    config = EngineConfig(num_blocks=64, max_num_sequences=4)
    with (
        mock.patch.object(loop, "die_with_parent"),
        mock.patch.object(signal, "signal"),
        mock.patch.object(gc, "freeze"),
        mock.patch.object(asyncio, "create_subprocess_exec", _start_thread),
    ):
        return await EngineClient.start(model.path, config)


@asynccontextmanager
async def _system(model: ServedModel) -> AsyncIterator[str]:
    """Run all parts until the block ends, and yield the gateway's URL."""
    broker, clock, index = MemoryBroker(), SystemClock(), WorkersIndex()
    catalogue = ModelCatalogue([MODEL], lambda _name: model)
    scheduler = Scheduler(
        MemoryBus(broker), SchedulerConfig(models=(MODEL,)), clock, catalogue, index
    )
    stopping = asyncio.Event()
    scheduling = asyncio.create_task(scheduler.run(stopping))

    async def restart() -> EngineClient:
        raise AssertionError("the engine does not end")

    engine = EngineKeeper(await _start_engine(model), restart, clock)
    # Timers that run only while there is a request are no part of its way.
    config = WorkerConfig(
        name="worker",
        model=MODEL,
        sample_interval_s=_NEVER_S,
        lease_extend_s=_NEVER_S,
        prefix_whole_s=_NEVER_S,
    )
    worker = Worker(MemoryBus(broker), config, model, engine, clock, index)
    working = asyncio.create_task(worker.run(stopping))
    cards = {MODEL: ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)}
    models = LoadedModels(cards, lambda _name: model)
    try:
        async with running_gateway(models=models, broker=broker) as front:
            yield front.url
    finally:
        stopping.set()
        await asyncio.gather(working, scheduling)
        await engine.close()


async def _ask(http: httpx.AsyncClient, text: str) -> None:
    """Send a streamed chat completion, and read it to its last event."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "stream": True,
        "ignore_eos": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines


async def _record(recorder: Recorder, model: ServedModel) -> set[Function]:
    async with _system(model) as url, httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        await _ask(http, "one")
        await asyncio.sleep(IDLE_S)
        recorder.codes = set()
        await asyncio.sleep(IDLE_S)
        idle = recorder.take()
        recorder.codes = set()
        await _ask(http, "two")
        await asyncio.sleep(_SETTLES_S)
        return recorder.take() - idle


def functions_of_a_request() -> set[Function]:
    """Return the functions of ours that run for one chat request and not without."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        catalogue = load_catalogue(str(write_catalogue(Path(folder), MODEL, "enterprise")))
        entry: ModelEntry = catalogue.get(MODEL)
        model = ServedModel.load(catalogue, entry.name)
        recorder.install()
        try:
            with mock.patch.object(loop, "_INTEGRITY_INTERVAL_S", _NEVER_S):
                return asyncio.run(_record(recorder, model))
        finally:
            recorder.remove()


def main(arguments: list[str] | None = None) -> int:
    """Print the counts of each package; with ``--functions`` print the functions, too."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.suite.request_path",
        description="Count our files and functions on the way of one chat request.",
    )
    parser.add_argument("--functions", action="store_true", help="name each function")
    parser.add_argument("--json", action="store_true", help="print the functions as JSON")
    parser.add_argument("--setting", default="max_num_sequences", help="the setting to look for")
    options = parser.parse_args(arguments)
    functions = sorted(functions_of_a_request())
    if options.json:
        sys.stdout.write(f"{json.dumps(functions)}\n")
        return 0
    sys.stdout.write(report(functions, names=options.functions))
    naming = files_naming(options.setting)
    sys.stdout.write(f"{options.setting}: {len(naming)} files\n")
    return 0


def files_naming(setting: str) -> list[str]:
    """Return the Python files of our packages that name a setting."""
    command = ["git", "grep", "--files-with-matches", "--word-regexp", setting, "--"]
    folders = [f"{package}/*.py" for package in PACKAGES]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


def report(functions: list[Function], *, names: bool = False) -> str:
    """Return a table of packages, their files and their functions."""
    lines = []
    for package in PACKAGES:
        of_package = [one for one in functions if one.file.startswith(f"{package}/")]
        if not of_package:
            continue
        counts = Counter(one.file for one in of_package)
        lines.append(f"{package}: {len(counts)} files, {len(of_package)} functions")
        for file, count in sorted(counts.items()):
            lines.append(f"  {file}: {count}")
            if names:
                lines += [f"    {one.name}" for one in of_package if one.file == file]
    num_files = len({one.file for one in functions})
    lines.append(f"in all: {num_files} files, {len(functions)} functions")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
