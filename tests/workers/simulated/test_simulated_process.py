"""``python -m millrace.workers --engine simulated`` on a real nats-server: many workers, one
process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.runtime.process import MISCONFIGURED
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import Dispatch, WorkerStatus
from millrace.schemas.frames import Delta, Done, Frame
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams
from tests.support.servers import NatsServer, die_with_parent, free_port
from tests.support.waiting import eventually

_COUNT = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


def _workers(nats_url: str, *options: str, name: str = "sim") -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "MILLRACE_NATS__URL": nats_url,
        "MILLRACE_REDIS__URL": f"redis://127.0.0.1:{free_port()}/0",
        "MILLRACE_WORKER__NAME": name,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "millrace.workers", *options],
        env=env,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )


async def test_several_workers_serve_from_one_process(server: NatsServer) -> None:
    statuses: dict[str, WorkerStatus] = {}
    frames: dict[str, list[Frame]] = {}
    bus = await nats.connect(NatsConfig(url=server.url), "test", part=Part.SCHEDULER)
    await bus.workers.watch(lambda status: statuses.update({status.name: status}))
    await bus.frames.subscribe(
        "test", lambda request_id, frame: frames.setdefault(request_id, []).append(frame)
    )
    process = _workers(server.url, "--engine", "simulated", "--count", str(_COUNT))
    try:
        names = {f"sim-{number}" for number in range(1, _COUNT + 1)}
        await eventually(lambda: statuses.keys() >= names, timeout_s=30.0)
        memory_maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in memory_maps
        for name in names:
            dispatch = Dispatch(job=_job(name), epoch=1, lease=f"lease-{name}")
            reply = await bus.control.command(statuses[name].worker_id, dispatch, 5.0)
            assert reply is not None
            assert reply.ok, reply
        await eventually(lambda: all(_is_done(frames.get(name, [])) for name in names))
        # The tokens are the same from every worker.
        assert len({_tokens(frames[name]) for name in names}) == 1
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: all(statuses[name].retired for name in names), timeout_s=20.0)
        assert process.wait(10.0) == 0
    finally:
        process.kill()
        process.wait()
        await bus.close()


def test_real_engines_have_processes_of_their_own(server: NatsServer) -> None:
    process = _workers(server.url, "--count", "2")
    _, stderr = process.communicate(timeout=60.0)
    assert process.returncode != 0
    assert b"--count needs a simulated engine" in stderr


def test_an_engine_that_does_not_quantize_is_not_told_to(server: NatsServer) -> None:
    process = _workers(server.url, "--engine", "simulated", "--quantization", "int8")
    _, stderr = process.communicate(timeout=60.0)
    assert process.returncode != 0
    assert b"own engine, and simulated runs this model" in stderr


def _job(request_id: str) -> Job:
    return Job(
        request_id=request_id,
        model="demo",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=5, seed=3),
        reply="test",
    )


def _is_done(frames: list[Frame]) -> bool:
    return any(isinstance(frame, Done) for frame in frames)


def _tokens(frames: list[Frame]) -> tuple[int, ...]:
    return tuple(token for frame in frames if isinstance(frame, Delta) for token in frame.token_ids)


async def test_a_second_worker_of_a_name_is_refused_and_one_that_was_killed_comes_back(
    server: NatsServer,
) -> None:
    heard: dict[str, WorkerStatus] = {}
    bus = await nats.connect(NatsConfig(url=server.url), "test", part=Part.SCHEDULER)
    await bus.workers.watch(lambda status: heard.update({status.worker_id: status}))
    first = _workers(server.url, "--engine", "simulated")
    processes = [first]
    try:
        await eventually(lambda: len(heard) == 1, timeout_s=60.0)
        second = _workers(server.url, "--engine", "simulated")
        processes.append(second)
        _, stderr = await asyncio.to_thread(second.communicate, timeout=60.0)
        assert second.returncode == MISCONFIGURED
        assert b"workers: Another worker named 'sim' is running" in stderr
        assert len(heard) == 1, "it was never there"
        assert first.poll() is None
        first.kill()
        processes.append(_workers(server.url, "--engine", "simulated"))
        await eventually(lambda: len(heard) == 2, timeout_s=60.0)
        assert {status.name for status in heard.values()} == {"sim"}
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await bus.close()


async def test_a_worker_whose_name_was_taken_while_it_stood_still_ends(server: NatsServer) -> None:
    heard: dict[str, WorkerStatus] = {}
    bus = await nats.connect(NatsConfig(url=server.url), "test", part=Part.SCHEDULER)
    await bus.workers.watch(lambda status: heard.update({status.worker_id: status}))
    first = _workers(server.url, "--engine", "simulated")
    processes = [first]
    try:
        await eventually(lambda: len(heard) == 1, timeout_s=60.0)
        first.send_signal(signal.SIGSTOP)
        processes.append(_workers(server.url, "--engine", "simulated"))
        await eventually(lambda: len(heard) == 2, timeout_s=60.0)
        first.send_signal(signal.SIGCONT)
        _, stderr = await asyncio.to_thread(first.communicate, timeout=60.0)
        assert first.returncode == MISCONFIGURED
        assert b"Another worker named 'sim' is running" in stderr
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await bus.close()


async def test_workers_without_a_name_draw_one_each(server: NatsServer) -> None:
    heard: dict[str, WorkerStatus] = {}
    bus = await nats.connect(NatsConfig(url=server.url), "test", part=Part.SCHEDULER)
    await bus.workers.watch(lambda status: heard.update({status.name: status}))
    processes = [_workers(server.url, "--engine", "simulated", name="") for _ in range(2)]
    try:
        await eventually(lambda: len(heard) == 2, timeout_s=60.0)
        assert all(name.startswith(f"{socket.gethostname()}-") for name in heard)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await bus.close()
