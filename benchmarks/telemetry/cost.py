"""``cost``: cost of records for a worker.

One worker process on a simulated engine, behind nats-server, Redis and a scheduler, answers
requests at a steady rate. In turns of some seconds it makes and publishes its records and samples,
or does not. The difference in CPU time is the cost of telemetry. Process and load are the same in
both turns, and the median over the turns removes other users' load.

The CPU time is that of the worker's bus side alone. A real engine uses further cores, so the share
of the whole worker is smaller.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.support.bus_client import Service
from benchmarks.support.command import PartResult
from benchmarks.support.simulated_system import SimulatedSystem, simulated_system
from millrace.bus.nats.stores import NatsOutbox
from millrace.runtime.settings import load_config
from millrace.schemas.config import EngineConfig, SimulationConfig, WorkerConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.records import Record, RequestRecord
from millrace.workers.__main__ import serve
from millrace.workers.host.endings import finalizer
from tests.support.servers import die_with_parent
from tests.support.waiting import eventually

GOAL_SHARE = 0.01
_PROMPT = tuple(range(5, 69))
_MAX_TOKENS = 32
_SETTLE_S = 1.0
_WORKER_CODE = "import sys; from benchmarks.telemetry import cost; cost.run_worker(sys.argv[1])"
_WORKER = WorkerConfig(
    name="measured",
    max_num_waiting=64,
    engine=EngineConfig(
        kind=EngineKind.SIMULATED,
        max_num_sequences=512,
        max_batch_tokens=4_096,
        simulation=SimulationConfig(prefill_tokens_per_s=200_000.0, step_ms_per_sequence=0.01),
    ),
)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of the worker per request, and per second."""

    cpu_s_per_request: float
    share_of_core: float


async def measure(rate: float, num_turns: int, turn_s: float) -> bool:
    """Return whether the share is within its goal."""
    async with simulated_system(worker=_WORKER) as system:
        service = Service(system.bus)
        await service.open()
        with tempfile.TemporaryDirectory() as folder:
            worker = _start_worker(system, Path(folder))
            await system.bus.workers.watch(
                lambda status: system.statuses.update({status.name: status})
            )
            await eventually(lambda: _WORKER.name in system.statuses, timeout_s=60.0)
            loading = asyncio.create_task(_load(service, rate))
            try:
                turns = await _take_turns(num_turns, turn_s, service, worker)
            finally:
                loading.cancel()
                await asyncio.wait([loading])
                worker.terminate()
                worker.wait()
    on, off = turns[0::2], turns[1::2]
    # Each turn is compared with its neighbours, because the machine's other load varies.
    saved = [
        (a.cpu_s_per_request + c.cpu_s_per_request) / 2 - b.cpu_s_per_request
        for a, b, c in zip(on, off, on[1:], strict=False)
    ]
    with_s = statistics.median(turn.cpu_s_per_request for turn in on)
    cost_s = statistics.median(saved)
    # Standard error of a median, from the median absolute deviation.
    spread_s = statistics.median(abs(one - cost_s) for one in saved)
    error_s = 1.2533 * 1.4826 * spread_s / len(saved) ** 0.5
    share = cost_s / with_s
    print(
        f"{rate:g} requests/s, {num_turns} turns of {turn_s:g} s each way: a request "
        f"takes {with_s * 1e6:,.0f} us of the worker's CPU "
        f"({statistics.median(turn.share_of_core for turn in on):.0%} of a core)"
    )
    print(
        f"records take {cost_s * 1e6:,.0f} us of it (standard error {error_s * 1e6:,.0f}): "
        f"{share:.1%} of the worker's CPU, "
        f"{cost_s * rate:.2%} of a core (goal {GOAL_SHARE:.0%})"
    )
    return share <= GOAL_SHARE


def _start_worker(system: SimulatedSystem, folder: Path) -> subprocess.Popen[bytes]:
    file = folder / "worker.yaml"
    file.write_bytes(msgspec.yaml.encode(system.config))
    with (folder / "worker.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _WORKER_CODE, str(file)],
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )


async def _load(service: Service, rate: float) -> None:
    """Send requests at equal intervals."""
    sending: set[asyncio.Task[Any]] = set()
    started_s, num_sent = time.perf_counter(), 0
    while True:
        await asyncio.sleep(max(0.0, num_sent / rate - (time.perf_counter() - started_s)))
        task = asyncio.create_task(service.send(f"tenant-{num_sent % 8}", _PROMPT, _MAX_TOKENS))
        sending.add(task)
        task.add_done_callback(sending.discard)
        num_sent += 1


async def _take_turns(
    num_turns: int, turn_s: float, service: Service, worker: subprocess.Popen[bytes]
) -> list[Turn]:
    await asyncio.sleep(2 * _SETTLE_S)
    turns = []
    for _ in range(2 * num_turns + 1):
        cpu_s, ended, started_s = _cpu_s(worker.pid), _num_ended(service), time.perf_counter()
        await asyncio.sleep(turn_s)
        cpu_s, ended = _cpu_s(worker.pid) - cpu_s, _num_ended(service) - ended
        if not ended:
            raise RuntimeError("the worker has answered nothing")
        share = cpu_s / (time.perf_counter() - started_s)
        turns.append(Turn(cpu_s_per_request=cpu_s / ended, share_of_core=share))
        # Records on, off, on, ...: see ``run_worker``.
        worker.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_SETTLE_S)
    return turns


def _cpu_s(pid: int) -> float:
    """Return the CPU time of all its threads.

    Another process's clock, by clock_getcpuclockid(3), counts nanoseconds; /proc counts ticks of 10
    ms.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _num_ended(service: Service) -> int:
    return sum(answer.done_s > 0 for answer in service.answers.values())


def run_worker(file: str) -> None:
    """Run a worker that stops records at SIGUSR1, and resumes them at the next SIGUSR1."""
    publish, make = NatsOutbox.publish, vars(finalizer)["request_record"]
    is_on = True
    last: list[RequestRecord] = []

    async def publish_or_not(self: NatsOutbox, record: Record, linger_s: float = 0.0) -> None:
        if is_on:
            await publish(self, record, linger_s)

    def make_or_not(*arguments: Any) -> RequestRecord:
        if is_on or not last:
            last[:] = [make(*arguments)]
        return last[0]

    def toggle() -> None:
        nonlocal is_on
        is_on = not is_on

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, toggle)
        await serve(load_config(file, {}))

    setattr(NatsOutbox, "publish", publish_or_not)  # noqa: B010  a method that is replaced
    setattr(finalizer, "request_record", make_or_not)  # noqa: B010
    uvloop.run(run())


def run(
    rate: float = 200.0, turns: int = 10, turn_s: float = 6.0, smoke: bool = False
) -> PartResult:
    """Send ``rate`` requests a second, for ``turns`` with records and as many without."""
    if smoke:
        rate, turns, turn_s = 20.0, 1, 1.5
    return PartResult(None, uvloop.run(measure(rate, turns, turn_s)))
