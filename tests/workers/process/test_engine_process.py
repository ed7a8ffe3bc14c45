"""Engine in a process of its own: messages over the sockets, and ends of either process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import psutil
import pytest

from millrace.engine.step.engine import Engine
from millrace.engine.threads.tasks import Bell
from millrace.engine.types import (
    DeviceLostError,
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import SamplingParams
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.process import loop as engine_loop
from millrace.workers.process.engine_process import EngineClient
from millrace.workers.process.loop import EngineLink, drive
from millrace.workers.process.wire import (
    Add,
    Broken,
    Load,
    Ready,
    Stepped,
    Stop,
    Unpacker,
    pack,
    report_decoder,
)
from tests.engine.support import resolved
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.engine.warm_fixture import warm_processes as warm_processes
from tests.support.waiting import eventually

_CONFIG = EngineConfig(num_blocks=64, num_threads=1, device="cpu", max_num_sequences=8)
_INT8 = msgspec.structs.replace(_CONFIG, quantization="int8")


pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


def _request(
    request_id: str, max_tokens: int, output_token_ids: tuple[int, ...] = ()
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=(10, 20, 30),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True),
        output_token_ids=output_token_ids,
    )


class _Heard:
    """Recorder of the engine process's reports."""

    def __init__(self, client: EngineClient) -> None:
        self.steps: list[tuple[list[EngineOutput], EngineStats]] = []
        client.on_outputs = lambda outputs, stats: self.steps.append((outputs, stats))

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for outputs, _ in self.steps
            for output in outputs
            if output.request_id == request_id
            for token in output.token_ids
        ]

    def finish(self, request_id: str) -> FinishReason | None:
        for outputs, _ in self.steps:
            for output in outputs:
                if output.request_id == request_id and output.finished:
                    return output.finish_reason
        return None


@pytest.mark.parametrize("kernels", ["auto", "reference"])
async def test_a_process_serves_until_it_is_killed(checkpoint: Path, kernels: str) -> None:
    """The process has the runner of a CPU, or that of a GPU, whose steps overlap."""
    config = msgspec.structs.replace(_CONFIG, kernels=kernels)
    client = await EngineClient.start(checkpoint, config)
    try:
        heard = _Heard(client)
        await _same_tokens_as_in_this_process(checkpoint, client, heard)
        await _all_beams_come_at_once_and_are_cancelled_at_once(checkpoint, client, heard)
        await _signals_leave_it_to_its_parent(client, heard)
        await _a_cancel_frees_the_blocks_before_the_next_step(client, heard)
        os.kill(client.pid, signal.SIGKILL)
        assert "signal SIGKILL" in await asyncio.wait_for(client.wait_closed(), 5.0)
    finally:
        await client.close()
    assert not psutil.pid_exists(client.pid)


async def _same_tokens_as_in_this_process(
    checkpoint: Path, client: EngineClient, heard: _Heard
) -> None:
    engine = Engine.load(checkpoint, _CONFIG)
    engine.add(_request("a", 12))
    wanted: list[int] = []
    while engine.has_work:
        wanted += [token for output in engine.step() for token in output.token_ids]
    assert client.stats.num_blocks == 64
    client.add(_request("a", 12))
    client.add(_request("b", 12, tuple(wanted[:5])))
    await eventually(lambda: heard.finish("a") is heard.finish("b") is FinishReason.LENGTH)
    assert heard.tokens("a") == wanted
    assert heard.tokens("b") == wanted[5:]
    assert client.stats.num_free_blocks == 64


async def _signals_leave_it_to_its_parent(client: EngineClient, heard: _Heard) -> None:
    os.kill(client.pid, signal.SIGTERM)
    os.kill(client.pid, signal.SIGINT)
    client.add(_request("c", 2))
    await eventually(lambda: heard.finish("c") is FinishReason.LENGTH)


async def _all_beams_come_at_once_and_are_cancelled_at_once(
    checkpoint: Path, client: EngineClient, heard: _Heard
) -> None:
    sampling = SamplingParams(max_tokens=9, n=3, use_beam_search=True, ignore_eos=True)
    beams = EngineRequest(request_id="beams", prompt_token_ids=(10, 20, 30), sampling=sampling)
    engine = Engine.load(checkpoint, _CONFIG)
    engine.add(beams)
    expected = [output for _ in range(9) for output in engine.step() if output.finished]
    for _ in range(2):  # from the cache the second time
        heard.steps.clear()
        client.add(beams)
        await eventually(lambda: heard.finish("beams") is not None)
        ended = [[o for o in outputs if o.finished] for outputs, _ in heard.steps]
        assert [(o.choice, o.token_ids) for outputs in ended for o in outputs] == [
            (o.choice, o.token_ids) for o in expected
        ]
        assert sorted(map(len, ended))[-2:] == [0, 3], "they come at once"
        await eventually(lambda: client.stats.num_free_blocks == 64)
    longer = msgspec.structs.replace(sampling, max_tokens=100, n=8)
    client.add(msgspec.structs.replace(beams, sampling=longer))
    await eventually(lambda: client.stats.num_running == 8)
    client.cancel("beams")
    await eventually(lambda: client.stats.num_running == 0)
    assert client.stats.num_free_blocks == 64


async def _a_cancel_frees_the_blocks_before_the_next_step(
    client: EngineClient, heard: _Heard
) -> None:
    heard.steps.clear()
    client.add(_request("long", 100))
    client.add(_request("other", 100))
    await eventually(lambda: len(heard.tokens("long")) >= 3)
    client.cancel("long")
    client.cancel("other")
    await eventually(lambda: client.stats.num_running == 0)
    # The report of the first turn after the cancels has no tokens and a full pool; tokens of a
    # step in flight at that time are dropped.
    first = next(i for i, (outputs, _) in enumerate(heard.steps) if not outputs)
    assert heard.steps[first][1].num_free_blocks == 64
    assert not any(outputs for outputs, _ in heard.steps[first:])
    assert heard.finish("long") is None


async def test_a_bad_checkpoint_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match=r"config\.json"):
        await EngineClient.start(tmp_path, _CONFIG)


async def test_weights_that_are_rounded_are_others(checkpoint: Path) -> None:
    """The fingerprint differs, so that no stream moves between workers of different weights."""
    client = await EngineClient.start(checkpoint, _INT8)
    await client.close()
    assert client.weights == weights_fingerprint(checkpoint, "int8")
    assert client.weights != weights_fingerprint(checkpoint)


# --- the loop, with a scripted engine ---------------------------------------------------------


class _Counting:
    """Runner that makes ``left`` tokens for the request that was added last."""

    config = resolved(device="cpu")

    def __init__(self) -> None:
        self.left = 0
        self.told: list[str] = []
        self.gone: list[str] = []
        self.num_checks = 0
        self._bell = Bell()

    @property
    def wake_fd(self) -> int:
        return self._bell.fd

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def add(self, request: EngineRequest) -> None:
        self.told.append(f"add {request.request_id}")
        self.left = request.sampling.max_tokens or 0

    def cancel(self, request_id: str) -> None:
        self.told.append(f"cancel {request_id}")
        self.gone.append(request_id)
        self.left = 0

    def rest(self) -> float | None:
        return None

    def step(self) -> list[EngineOutput]:
        self.left -= 1
        return [EngineOutput(request_id="a", token_ids=(self.left,))]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=int(self.has_work))

    def reset_prefix_cache(self) -> None:
        pass

    def pop_prefix_changes(self) -> PrefixChanges | None:
        return PrefixChanges(added=bytes([self.left]) * 8) if self.left == 1 else None

    def pop_device_times(self, *, live: bool = False) -> list[DeviceTime]:
        gone, self.gone = self.gone, []
        return [DeviceTime(name, 0, 1.5, over=True) for name in gone]

    @property
    def device_uuid(self) -> str:
        return ""

    @property
    def transfer_endpoint(self) -> None:
        return None

    def check_integrity(self) -> None:
        self.num_checks += 1


@pytest.fixture
def looped() -> Iterator[tuple[_Counting, socket.socket, threading.Thread]]:
    ours, theirs = socket.socketpair()
    engine = _Counting()

    def run() -> None:
        with pytest.raises(EOFError):
            drive(cast(Engine, engine), EngineLink(theirs))

    thread = threading.Thread(target=run)
    thread.start()
    yield engine, ours, thread
    ours.close()
    thread.join(5.0)
    theirs.close()
    assert not thread.is_alive(), "the loop ends with its bus side"


def _reports(sock: socket.socket, count: int) -> list[Stepped]:
    unpacker, reports = Unpacker(), list[Stepped]()
    sock.settimeout(5.0)
    while len(reports) < count:
        for payload in unpacker.feed(sock.recv(1)):
            report = report_decoder.decode(payload)
            assert isinstance(report, Stepped)
            reports.append(report)
    return reports


def test_one_report_a_step_then_it_waits(
    looped: tuple[_Counting, socket.socket, threading.Thread],
) -> None:
    engine, sock, _ = looped
    data = pack([Add(_request("a", 3))])
    for i in range(len(data)):
        sock.sendall(data[i : i + 1])
    reports = _reports(sock, 3)
    assert [report.outputs[0].token_ids for report in reports] == [(2,), (1,), (0,)]
    assert reports[-1].stats.num_running == 0
    sock.sendall(pack([Stop("a"), Stop("b")]) + pack([Add(_request("c", 1))]))
    # What was cancelled is told before the step.
    cancelled, made = _reports(sock, 2)
    assert [len(report.outputs) for report in (cancelled, made)] == [0, 1]
    assert [(time.request_id, time.over) for time in cancelled.device_times] == [
        ("a", True),
        ("b", True),
    ]
    assert not made.device_times
    assert engine.told == ["add a", "cancel a", "cancel b", "add c"]


def test_a_cancel_without_work_left_is_reported_too(
    looped: tuple[_Counting, socket.socket, threading.Thread],
) -> None:
    _, sock, _ = looped
    sock.sendall(pack([Stop("a")]))
    assert _reports(sock, 1)[0].outputs == []


def test_a_message_larger_than_a_read_comes_whole() -> None:
    unpacker = Unpacker()
    big = pack([Add(EngineRequest(request_id="a", prompt_token_ids=tuple(range(70_000, 170_000))))])
    data = big + pack([Stop("x")])
    payloads = [
        payload
        for start in range(0, len(data), 65_536)
        for payload in unpacker.feed(data[start : start + 65_536])
    ]
    assert len(payloads) == 2


class _Lost(_Counting):
    def step(self) -> list[EngineOutput]:
        raise DeviceLostError("the device failed: an illegal memory access")


def test_a_process_whose_device_is_lost_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(5.0)
    monkeypatch.setattr(engine_loop, "_load", lambda _: _Lost())
    monkeypatch.setattr(engine_loop, "die_with_parent", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with ours:
        ours.sendall(pack(Load("a checkpoint", _CONFIG, shared=False)))
        ours.sendall(pack([Add(_request("a", 3))]))
        assert engine_loop.serve(theirs.detach(), os.getpid()) == 1
        unpacker = Unpacker()
        reports = [report_decoder.decode(payload) for payload in unpacker.feed(ours.recv(1 << 16))]
    assert [type(report) for report in reports] == [Ready, Broken]
    assert "illegal memory access" in reports[1].message
