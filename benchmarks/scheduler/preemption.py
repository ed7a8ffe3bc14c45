"""``preemption``: wait of an enterprise request behind free streams.

Real servers run one scheduler process and one simulated worker. Free tenants always keep more
streams waiting than the worker has slots. An enterprise tenant sends requests for a few tokens
twice a second. Prints its TTFTs in order of sending, beside its TTFT on the idle worker. If a free
job without room blocked jobs that may preempt, every second TTFT would show it. Also prints the
free tenants' tokens per second with and without the enterprise tenant: preempted streams lose no
more than it gains.
"""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import uvloop

from benchmarks.support.bus_client import Answer, Service, random_prompt
from benchmarks.support.command import PartResult
from benchmarks.support.figures import p50_p99, percentile
from benchmarks.support.simulated_system import simulated_system
from millrace.schemas.config import EngineConfig, SimulationConfig, WorkerConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.jobs import Tier

_NUM_SLOTS = 16
_WORKER = WorkerConfig(
    name="simulated",
    max_num_waiting=4,
    engine=EngineConfig(
        kind=EngineKind.SIMULATED,
        max_num_sequences=_NUM_SLOTS,
        max_batch_tokens=256,
        simulation=SimulationConfig(
            prefill_tokens_per_s=6_000.0, step_ms=16.0, step_ms_per_sequence=0.2
        ),
    ),
)
_NUM_FREE_TENANTS, _NUM_WAITING = 3, 24
_FREE_PROMPT, _FREE_TOKENS = 48, (128, 384)
_ENTERPRISE_PROMPT, _ENTERPRISE_TOKENS, _PAUSE_S = 48, 10, 0.5
_TTFT_GOAL_MS = 150.0
_WARM_UP_S = 3.0
_TIMEOUT_S = 600.0


class _Result(NamedTuple):
    """TTFTs of the enterprise requests in order, and tokens a second of the free streams."""

    ttfts_ms: list[float]
    free_tokens_per_s: float


class _FreeTenants:
    """Free tenants that keep a number of streams running or waiting, and replace ended streams."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._chance = random.Random(11)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._ask(f"free-{number % _NUM_FREE_TENANTS}"))
            for number in range(_NUM_SLOTS + _NUM_WAITING)
        ]

    async def _ask(self, tenant: str) -> None:
        while True:
            prompt = random_prompt(self._chance, _FREE_PROMPT)
            length = self._chance.randint(*_FREE_TOKENS)
            answer = await self._service.send(tenant, prompt, length)
            await answer.ended

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def _ask_now_and_then(service: Service, duration_s: float) -> list[float]:
    """Return TTFTs in ms of requests that do not wait for one another."""
    chance = random.Random(13)
    answers: list[Answer] = []
    for _ in range(max(1, round(duration_s / _PAUSE_S))):
        answers.append(
            await service.send(
                "enterprise",
                random_prompt(chance, _ENTERPRISE_PROMPT),
                _ENTERPRISE_TOKENS,
                tier=Tier.ENTERPRISE,
            )
        )
        await asyncio.sleep(_PAUSE_S)
    await asyncio.gather(*(answer.ended for answer in answers))
    return [answer.ttft_s * 1e3 for answer in answers]


async def _beside(service: Service, duration_s: float) -> _Result:
    before = service.num_output_tokens
    ttfts_ms = await _ask_now_and_then(service, duration_s)
    made = service.num_output_tokens - before - len(ttfts_ms) * _ENTERPRISE_TOKENS
    return _Result(ttfts_ms, made / (len(ttfts_ms) * _PAUSE_S))


async def _measure(duration_s: float) -> bool:
    """Return whether the goal was met."""
    async with simulated_system(1, worker=_WORKER) as system:
        service = Service(system.bus)
        await service.open()
        alone_ms = await _ask_now_and_then(service, duration_s / 4)
        free = _FreeTenants(service)
        free.start()
        await asyncio.sleep(_WARM_UP_S)
        before = service.num_output_tokens
        await asyncio.sleep(duration_s / 4)
        free_alone_per_s = (service.num_output_tokens - before) / (duration_s / 4)
        result = await _beside(service, duration_s)
        await free.stop()
    p99_ms = percentile(result.ttfts_ms, 0.99)
    slots = f"{_NUM_SLOTS} slots, {_NUM_SLOTS + _NUM_WAITING} free streams at a time"
    print(f"{slots}; {len(result.ttfts_ms)} enterprise requests of {_ENTERPRISE_TOKENS} tokens")
    print(f"  TTFT on the idle worker:      {p50_p99(alone_ms, '7.1f')}")
    print(f"  TTFT beside the free streams: {p50_p99(result.ttfts_ms, '7.1f')}")
    print(f"  the first TTFTs, ms: {', '.join(f'{ms:.0f}' for ms in result.ttfts_ms[:12])}")
    print(
        f"  free tokens/s: {result.free_tokens_per_s:,.0f} beside the other, "
        f"{free_alone_per_s:,.0f} alone"
    )
    print(f"  p99 {p99_ms:.0f} ms (goal: at most {_TTFT_GOAL_MS:g})")
    return p99_ms <= _TTFT_GOAL_MS


def run(seconds: float = 30.0, smoke: bool = False) -> PartResult:
    """Ask as the enterprise tenant for ``seconds`` beside the free streams."""
    measuring = asyncio.wait_for(_measure(2.0 if smoke else seconds), _TIMEOUT_S)
    return PartResult(None, uvloop.run(measuring))
