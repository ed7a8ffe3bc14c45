"""Faults of ``benchmarks.chaos``, and the table of its rounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import httpx
import msgspec
import psutil

from millrace.bus import nats
from millrace.runtime.process import MISCONFIGURED
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import WorkerStatus
from tests.support.small_disk import SmallDisk
from tests.support.system import System
from tests.support.waiting import eventually

_BODY = {"model": "demo", "prompt": "What is TTFT?", "max_tokens": 1}
_NOTICED_WITHIN_S = 3.0
_WELL_WITHIN_S = 10.0
_GIVE_UP_S = 60.0
_POLL_S = 0.2
# Enough probes to reach both gateways, which share a port.
_NUM_PROBES = 8


class DiskFullResult(msgspec.Struct, frozen=True):
    """Result of a full disk.

    ``outcomes`` counts the answers of new requests while the disk was full. ``well_s`` is the time
    from the first free byte until both gateways accepted requests again.
    """

    outcomes: dict[str, int]
    well_s: float
    wrongs: tuple[str, ...] = ()


async def fill_for(system: System, disk: SmallDisk, for_s: float) -> DiskFullResult:
    """Keep the disk of a system full for a while, to the last page, and make room again."""
    await asyncio.to_thread(disk.fill)
    keeping = asyncio.create_task(_keep_full(disk))
    # Each request on a connection of its own, which either gateway may get.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=system.http, timeout=15.0, limits=limits) as http:
        try:
            await asyncio.sleep(_NOTICED_WITHIN_S)
            outcomes = await _probe(http)
            await asyncio.sleep(for_s)
            outcomes += await _probe(http)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            disk.make_room()
        room_s = time.monotonic()
        while time.monotonic() - room_s < _GIVE_UP_S:
            if set(await _probe(http)) == {"accepted"}:
                break
            await asyncio.sleep(_POLL_S)
    well_s = time.monotonic() - room_s
    counts = {code: outcomes.count(code) for code in sorted(set(outcomes))}
    wrongs = [
        f"{num} answers to new requests were {code}"
        for code, num in counts.items()
        if code != "storage_full"
    ]
    if well_s > _WELL_WITHIN_S:
        wrongs.append(f"requests were accepted only {well_s:.1f} s after space was freed")
    return DiskFullResult(counts, well_s, tuple(wrongs))


async def _keep_full(disk: SmallDisk) -> None:
    while True:
        await asyncio.to_thread(disk.fill)
        await asyncio.sleep(0.05)


async def _probe(http: httpx.AsyncClient) -> list[str]:
    """Send new requests and return their outcomes."""
    return list(await asyncio.gather(*(_ask(http) for _ in range(_NUM_PROBES))))


async def _ask(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.post("/v1/completions", json=_BODY)
    except httpx.TransportError as error:
        return type(error).__name__
    return "accepted" if answer.status_code == 200 else str(answer.json()["error"]["code"])


_TWIN_WITHIN_S = 90.0
# Worker with the most requests at the time of the fault.
BUSIEST = "the busiest worker"
_HEARD_WITHIN_S = 3.0
# Event that needs a disk of its own.
DISK_FULL = "disk full"


class FaultEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a fault.

    It has the parts that must come back under another pid, by their old pid, further conditions for
    recovery, and conditions that must not occur.
    """

    pids: Mapping[str, int] = {}
    is_mended: Callable[[], bool] = lambda: True
    wrongs: tuple[str, ...] = ()


class Fault(Protocol):
    """Fault of a system; ``inject`` returns when it has happened."""

    async def inject(self, system: System) -> FaultEffect: ...


class Signalled(msgspec.Struct, frozen=True):
    """Signal to parts, all at once; ``millrace up`` restarts them."""

    parts: tuple[str, ...]
    number: signal.Signals = signal.SIGKILL

    async def inject(self, system: System) -> FaultEffect:
        names = [await _resolve(part, system) for part in self.parts]
        pids = {part: system.pid(part) for part in names}
        for pid in pids.values():
            os.kill(pid, self.number)
        return FaultEffect(pids=pids)


class KilledInTransfer(msgspec.Struct, frozen=True):
    """Worker that is drained, then killed (``kill -9``) while others pull its streams' blocks."""

    worker: str
    after_s: float

    async def inject(self, system: System) -> FaultEffect:
        name = await _resolve(self.worker, system)
        pid = system.pid(name)
        os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(self.after_s)
        # The drain may be complete by then.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return FaultEffect(pids={name: pid})


class EngineKilled(msgspec.Struct, frozen=True):
    """``kill -9`` of a worker's engine process; the worker survives and loads another."""

    worker: str

    async def inject(self, system: System) -> FaultEffect:
        worker = await _resolve(self.worker, system)
        log = system.data / "logs" / f"{worker}.log"
        num_engines = _num_engines(log.read_text())
        for engine in psutil.Process(system.pid(worker)).children():
            engine.kill()
        return FaultEffect(is_mended=lambda: _num_engines(log.read_text()) > num_engines)


async def _resolve(part: str, system: System) -> str:
    """Return the name of a part; the busiest worker is found by both workers' next statuses."""
    if part != BUSIEST:
        return part
    statuses: list[WorkerStatus] = []
    bus = await nats.connect(NatsConfig(url=system.endpoints["nats"]), "chaos")
    try:
        await bus.workers.watch(statuses.append)
        statuses.clear()  # the bucket may hold statuses from before the load
        await eventually(
            lambda: len({status.name for status in statuses}) > 1, timeout_s=_HEARD_WITHIN_S
        )
    finally:
        await bus.close()
    return max(statuses, key=lambda status: status.num_running + status.num_waiting).name


def _num_engines(log: str) -> int:
    """Return how many engines have replaced the first."""
    return log.count("a new engine runs")


class Frozen(msgspec.Struct, frozen=True):
    """Part that is frozen with its children for a while (SIGSTOP, SIGCONT)."""

    part: str
    for_s: float

    async def inject(self, system: System) -> FaultEffect:
        process = psutil.Process(system.pid(await _resolve(self.part, system)))
        frozen = [process, *process.children(recursive=True)]
        for one in frozen:
            one.suspend()
        try:
            await asyncio.sleep(self.for_s)
        finally:
            for one in frozen:
                one.resume()
        return FaultEffect()


class DuplicateWorker(msgspec.Struct, frozen=True):
    """Second worker under the name of a running one, which must be refused."""

    worker: str

    async def inject(self, system: System) -> FaultEffect:
        config = system.data / "run" / "config.yaml"
        twin = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "millrace.workers", "--config", str(config)),
            env={**os.environ, "MILLRACE_WORKER__NAME": self.worker},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_TWIN_WITHIN_S):
                _, stderr = await twin.communicate()
        except TimeoutError:
            twin.kill()
            await twin.wait()
            return FaultEffect(wrongs=(f"a second {self.worker} was accepted",))
        if twin.returncode != MISCONFIGURED or b"Another worker named" not in stderr:
            last = stderr.decode(errors="replace").strip().splitlines()[-1:]
            wrong = f"a second {self.worker} ended with exit code {twin.returncode}: {last}"
            return FaultEffect(wrongs=(wrong,))
        return FaultEffect()


class DiskFilled(msgspec.Struct, frozen=True):
    """Disk that is kept full to its last page while new requests are sent.

    Requests must be refused with the disk as the reason, and accepted soon after there is room
    again.
    """

    for_s: float

    async def inject(self, system: System) -> FaultEffect:
        full = await fill_for(system, SmallDisk(system.data), self.for_s)
        print(
            f"   new requests: {full.outcomes}, accepted {full.well_s:.1f} s after space was freed"
        )
        return FaultEffect(wrongs=full.wrongs)


class Event(msgspec.Struct, frozen=True):
    """Fault under a load of ``chaos_loads.LOADS``.

    With ``is_partial``, it affects only streams whose epoch rises.
    """

    name: str
    fault: Fault
    is_partial: bool = False
    load: str = "plain"


_WORKER_KILLED = Signalled((BUSIEST,))

EVENTS = (
    Event("worker killed", _WORKER_KILLED, is_partial=True),
    Event("worker drained", Signalled((BUSIEST,), signal.SIGTERM), is_partial=True),
    Event("engine child killed", EngineKilled(BUSIEST), is_partial=True),
    Event("worker frozen", Frozen(BUSIEST, 5.0), is_partial=True),
    Event("twin names", DuplicateWorker("worker-1")),
    Event("scheduler killed", Signalled(("scheduler-1",))),
    Event("scheduler frozen", Frozen("scheduler-1", 5.0)),
    Event("scheduler and worker killed", Signalled(("scheduler-1", BUSIEST)), is_partial=True),
    Event("both workers killed", Signalled(("worker-1", "worker-2")), is_partial=True),
    Event("gateway killed", Signalled(("gateway-1",))),
    Event("gateway frozen", Frozen("gateway-1", 5.0)),
    Event("nats-server restarted", Signalled(("nats",))),
    Event("redis restarted", Signalled(("redis",))),
    Event("killed under a schema", _WORKER_KILLED, is_partial=True, load="schema"),
    Event("killed under tool calls", _WORKER_KILLED, is_partial=True, load="tool calls"),
    Event("killed under n = 3", _WORKER_KILLED, is_partial=True, load="n = 3"),
    Event("killed under logprobs", _WORKER_KILLED, is_partial=True, load="logprobs"),
    Event("killed under penalties", _WORKER_KILLED, is_partial=True, load="penalties"),
    Event("prefill side killed", Signalled(("worker-1",)), load="long prompts"),
    Event("decode side killed", Signalled(("worker-2",)), load="long prompts"),
    Event("killed in mid-transfer", KilledInTransfer(BUSIEST, 0.3), load="long prompts"),
    Event(DISK_FULL, DiskFilled(3.0)),
)
