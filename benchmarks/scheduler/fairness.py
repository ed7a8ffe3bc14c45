"""``neighbours``, ``replicas`` and ``backlog``: effect of one tenant's load on others.

Real servers run a scheduler process and simulated workers.

``neighbours``: a few quiet tenants run alone: they ask, read the answer and ask again. Then they
run beside three backlogged tenants, of which one sends ten times as many requests as another, and
one sends requests four times as large. The service of each backlogged tenant is measured: a prompt
token counts 1, a generated token 2. The gap between any two of them, over any part of the time, has
the bound of VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): twice the
weight of the work that runs at a time. A perfect scheduler gives equal shares.

``replicas``: two schedulers, and two publishers. All clients of one tenant use one publisher and
send four times as many requests as the other tenant's, which use both. Meanwhile one scheduler is
killed (``kill -9``) and restarted. If each process counted service alone, shares would follow the
load. One scheduler gives equal shares.

``backlog``: one tenant has a backlog of many jobs. The wait of the first job of each of several
other tenants behind it is compared with the wait on an idle system.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks.support.bus_client import Answer, Service, random_prompt
from benchmarks.support.command import PartResult
from benchmarks.support.figures import p50_p99, percentile
from benchmarks.support.simulated_system import SimulatedSystem, simulated_system
from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import EngineConfig, SimulationConfig, WorkerConfig
from millrace.schemas.engines import EngineKind
from millrace.simulation.report.fairness import jain as jain_index

_OUTPUT_WEIGHT = 2.0
_NUM_WORKERS, _NUM_SLOTS = 2, 32
# Jobs at a worker are served first come, first served, so none may wait there.
_WORKER = WorkerConfig(
    name="simulated",
    max_num_waiting=0,
    engine=EngineConfig(
        kind=EngineKind.SIMULATED,
        max_num_sequences=_NUM_SLOTS,
        simulation=SimulationConfig(prefill_tokens_per_s=5_000.0, step_ms=20.0),
    ),
)
_PHASES = ("both schedulers", "one is killed", "it is back")
_SAMPLE_S = 0.05
_WARM_UP_SHARE = 0.15
_JAIN_GOAL, _TTFT_GOAL = 0.98, 1.5
_NUM_FIRSTS = 20
_TIMEOUT_S = 900.0


class _Load(NamedTuple):
    """Load of requests at random times, for half to one and a half ``mean_tokens`` each."""

    tenant: str
    per_s: float
    prompt_tokens: int
    mean_tokens: int

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens + self.mean_tokens * 3 // 2


# Each quiet tenant takes less than half of an equal share.
_NUM_QUIET, _QUIET_PROMPT, _QUIET_TOKENS, _QUIET_PAUSE_S = 3, 1_792, 16, (4.0, 6.0)
_BACKLOGGED = (
    _Load("noisy", 320.0, 64, 32),
    _Load("steady", 32.0, 64, 32),
    _Load("large", 8.0, 256, 128),
)
# Both tenants ask for more than half of the capacity. One sends four times as many requests to its
# publisher as the other to both publishers together.
_REPLICA_LOADS = (_Load("at-one", 80.0, 64, 128), _Load("at-both", 10.0, 64, 128))


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest lead of one tenant over the other, over any part of the time.

    Both sequences hold the service so far, sampled at the same times.
    """
    ahead = [a - b for a, b in zip(one, other, strict=True)]
    return max(ahead) - min(ahead)


def vtc_bound(loads: Sequence[_Load]) -> float:
    """Return VTC's bound of the gap between two backlogged tenants.

    It is twice the weight of the largest prompt, or of the largest requests that can run at a time,
    if that is more.
    """
    running_tokens = _NUM_WORKERS * _NUM_SLOTS * max(load.most_tokens for load in loads)
    return 2 * max(*(load.prompt_tokens for load in loads), _OUTPUT_WEIGHT * running_tokens)


async def _offer(
    service: Service, prompts: random.Random, load: _Load, duration_s: float
) -> list[Answer]:
    chance = random.Random(load.tenant)
    due_s = time.perf_counter()
    end_s = due_s + duration_s
    sending: list[asyncio.Task[Answer]] = []
    while True:
        due_s += chance.expovariate(load.per_s)
        if due_s > end_s:
            break
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        prompt = random_prompt(prompts, load.prompt_tokens)
        max_tokens = chance.randint(load.mean_tokens // 2, load.mean_tokens * 3 // 2)
        sending.append(asyncio.create_task(service.send(load.tenant, prompt, max_tokens)))
    return await asyncio.gather(*sending)


async def _ask_quietly(service: Service, prompts: random.Random, duration_s: float) -> list[float]:
    """Return the TTFT in ms of every answer to the quiet tenants."""
    end_s = time.perf_counter() + duration_s

    async def ask(tenant: str) -> list[float]:
        chance, ttfts_ms = random.Random(tenant), list[float]()
        await asyncio.sleep(chance.random())
        while time.perf_counter() < end_s:
            answer = await service.send(
                tenant, random_prompt(prompts, _QUIET_PROMPT), _QUIET_TOKENS
            )
            ttfts_ms += await _ttfts_ms([answer])
            pause_s = chance.uniform(*_QUIET_PAUSE_S)
            await asyncio.sleep(max(0.0, min(pause_s, end_s - time.perf_counter())))
        return ttfts_ms

    asked = await asyncio.gather(*(ask(f"quiet-{number}") for number in range(_NUM_QUIET)))
    return [ttft_ms for ttfts_ms in asked for ttft_ms in ttfts_ms]


async def _ttfts_ms(answers: Sequence[Answer]) -> list[float]:
    await asyncio.gather(*(answer.ended for answer in answers))
    return [answer.ttft_s * 1e3 for answer in answers]


class _Watch:
    """Service of the backlogged tenants so far, and the fewest waiting jobs of any of them."""

    def __init__(self, service: Service, tenants: Sequence[str]) -> None:
        self.served: dict[str, list[float]] = {tenant: [] for tenant in tenants}
        self.fewest_waiting = 1 << 62
        self._service = service

    async def run(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s * _WARM_UP_SHARE)
        end_s = time.perf_counter() + duration_s * (1 - _WARM_UP_SHARE)
        while time.perf_counter() < end_s:
            for tenant, samples in self.served.items():
                samples.append(self._service.charged.get(tenant, 0.0))
                waiting = self._service.num_unstarted.get(tenant, 0)
                self.fewest_waiting = min(self.fewest_waiting, waiting)
            await asyncio.sleep(_SAMPLE_S)

    def gained(self) -> dict[str, float]:
        return {tenant: samples[-1] - samples[0] for tenant, samples in self.served.items()}


async def _neighbours(system: SimulatedSystem, duration_s: float) -> bool:
    """Return whether the goals were met."""
    service, prompts = Service(system.bus, _OUTPUT_WEIGHT), random.Random(7)
    await service.open()
    await _ask_quietly(service, prompts, 1.0)
    alone_ms = await _ask_quietly(service, prompts, duration_s)
    watch = _Watch(service, [load.tenant for load in _BACKLOGGED])
    watching = asyncio.create_task(watch.run(duration_s))
    offering = [
        asyncio.create_task(_offer(service, prompts, load, duration_s)) for load in _BACKLOGGED
    ]
    await asyncio.sleep(duration_s * _WARM_UP_SHARE)
    beside_ms = await _ask_quietly(service, prompts, duration_s * (1 - _WARM_UP_SHARE))
    await watching
    await asyncio.gather(*offering)
    gained, bound = watch.gained(), vtc_bound(_BACKLOGGED)
    gap = max(largest_gap(watch.served[a], watch.served[b]) for a, b in combinations(gained, 2))
    jain = jain_index(np.array(list(gained.values())))
    ratio = percentile(beside_ms, 0.99) / max(percentile(alone_ms, 0.99), 1e-9)
    print(f"{len(_BACKLOGGED)} backlogged tenants beside {_NUM_QUIET} quiet ones, {duration_s:g} s")
    for load in _BACKLOGGED:
        share = gained[load.tenant] / max(sum(gained.values()), 1e-9)
        asks = f"{load.per_s:g}/s of {load.prompt_tokens} + {load.mean_tokens} tokens"
        print(
            f"  {load.tenant:<8}{asks:<26}{share:6.1%} of the work (equal: {1 / len(gained):.1%})"
        )
    print(f"  fewest waiting jobs of a backlogged tenant: {watch.fewest_waiting}")
    print(f"  Jain index of the work {jain:.4f} (goal: at least {_JAIN_GOAL})")
    print(f"  largest gap {gap:,.0f} of {sum(gained.values()):,.0f} (VTC's bound: {bound:,.0f})")
    print(f"  TTFT of quiet tenants alone:  {p50_p99(alone_ms, '7.1f')}")
    print(f"  TTFT of quiet tenants beside: {p50_p99(beside_ms, '7.1f')}")
    print(f"  p99 beside over p99 alone: {ratio:.2f} (goal: at most {_TTFT_GOAL})")
    backlogged = watch.fewest_waiting > 0
    if not backlogged:
        print("  a tenant was not always backlogged: shares and gap are invalid")
    return backlogged and jain >= _JAIN_GOAL and gap <= bound and ratio <= _TTFT_GOAL


async def _replicas(system: SimulatedSystem, duration_s: float) -> bool:
    """Return whether the goals were met; each phase takes a third of ``duration_s``."""
    other = await nats.connect(system.config.nats, "another publisher", part=Part.SCHEDULER)
    try:
        publishers = [
            Service(bus, _OUTPUT_WEIGHT, reply=f"publisher-{number}")
            for number, bus in enumerate((system.bus, other), start=1)
        ]
        for publisher in publishers:
            await publisher.open()
        shares = await _shares_of_phases(system, publishers, duration_s)
    finally:
        await other.close()
    at_one_publisher, at_each_publisher = (load.per_s for load in _REPLICA_LOADS)
    per_s = f"{at_one_publisher:g}/s at one publisher, {2 * at_each_publisher:g}/s at both"
    print(f"two schedulers, two publishers; {per_s}; {duration_s:g} s")
    bound = vtc_bound(_REPLICA_LOADS)
    gaps = [abs(at_one - at_both) for at_one, at_both in shares]
    for phase, gap, (at_one, at_both) in zip(_PHASES, gaps, shares, strict=True):
        share = at_one / max(at_one + at_both, 1e-9)
        print(
            f"  {phase:<16}{share:6.1%} of the work to the one (equal: 50.0%), "
            f"gap {gap:,.0f} (VTC's bound: {bound:,.0f})"
        )
    jain = jain_index(np.array(shares).sum(axis=0))
    print(f"  Jain index of all phases together {jain:.4f} (goal: at least {_JAIN_GOAL})")
    return jain >= _JAIN_GOAL and max(gaps) <= bound


async def _shares_of_phases(
    system: SimulatedSystem, publishers: Sequence[Service], duration_s: float
) -> list[tuple[float, float]]:
    """Return the work given to each of the two tenants in each phase."""
    prompts, tenants = random.Random(7), [load.tenant for load in _REPLICA_LOADS]
    warm_up_s, phase_s = duration_s * _WARM_UP_SHARE, duration_s / len(_PHASES)
    at_one, at_both = _REPLICA_LOADS
    ways = [(publishers[0], at_one), (publishers[0], at_both), (publishers[1], at_both)]
    offering = [
        asyncio.create_task(_offer(publisher, prompts, load, warm_up_s + duration_s))
        for publisher, load in ways
    ]

    def served() -> list[float]:
        return [
            sum(publisher.charged.get(tenant, 0.0) for publisher in publishers)
            for tenant in tenants
        ]

    await asyncio.sleep(warm_up_s)
    seen = [served()]
    for number in range(len(_PHASES)):
        if number == 1:
            await system.kill_scheduler(0)
        elif number == 2:
            system.restart_scheduler(0)
        await asyncio.sleep(phase_s)
        seen.append(served())
    await asyncio.gather(*offering)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen)]


async def _behind_a_backlog(system: SimulatedSystem, num_jobs: int) -> bool:
    """Measure the first jobs behind a backlog; there is no goal."""
    service, prompts = Service(system.bus, _OUTPUT_WEIGHT), random.Random(7)
    await service.open()

    async def firsts(name: str) -> list[float]:
        waits_ms: list[float] = []
        for number in range(_NUM_FIRSTS):
            answer = await service.send(f"{name}-{number}", random_prompt(prompts, 64), 4)
            waits_ms += await _ttfts_ms([answer])
        return waits_ms

    alone_ms = await firsts("alone")
    begun_s = time.perf_counter()
    await service.send_many("hoarder", [random_prompt(prompts, 64)] * num_jobs, (32, 96))
    published_s = time.perf_counter() - begun_s
    waiting = service.num_unstarted["hoarder"]
    beside_ms = await firsts("beside")
    print(
        f"the first job of {_NUM_FIRSTS} tenants behind {waiting:,} jobs of another "
        f"({num_jobs:,} published in {published_s:.0f} s)"
    )
    print(f"  TTFT alone:  {p50_p99(alone_ms, '7.1f')}")
    print(f"  TTFT behind: {p50_p99(beside_ms, '7.1f')}")
    return True


def _run_part(
    part: Callable[[SimulatedSystem], Awaitable[bool]], num_schedulers: int = 1
) -> PartResult:
    """Run a part on a system of its own, and report whether it met its goals."""

    async def measure() -> bool:
        async with simulated_system(_NUM_WORKERS, num_schedulers, worker=_WORKER) as system:
            return await part(system)

    return PartResult(None, uvloop.run(asyncio.wait_for(measure(), _TIMEOUT_S)))


def neighbours(seconds: float = 60.0, smoke: bool = False) -> PartResult:
    """Run each load for ``seconds``."""
    return _run_part(lambda system: _neighbours(system, 2.0 if smoke else seconds))


def replicas(seconds: float = 60.0, smoke: bool = False) -> PartResult:
    return _run_part(lambda system: _replicas(system, 2.0 if smoke else seconds), num_schedulers=2)


def backlog(backlog: int = 100_000, smoke: bool = False) -> PartResult:
    """Give one tenant ``backlog`` jobs."""
    return _run_part(lambda system: _behind_a_backlog(system, 300 if smoke else backlog))
