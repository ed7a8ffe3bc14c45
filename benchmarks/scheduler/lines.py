"""``lines``: endings of jobs that services publish all at once.

Real servers run a scheduler process and the demo model on Millrace's own engine, with default
limits. A tenant's service publishes all its jobs, which are counted by their endings. Meanwhile
another tenant sends one request after the other, as a gateway publishes it, and its first tokens
are timed. A part runs for each named tier. With ``--tenants``, the jobs belong to that many
tenants, whose queues a scheduler keeps at the same time.

The limits are those of the tier ``--tenants-tier``: in ``pro``, 600 requests a minute admit 3,000
jobs within about four minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import uvloop

from benchmarks.support.bus_client import Answer, Service, random_prompt
from benchmarks.support.command import PartResult
from benchmarks.support.figures import p50_p99, percentile
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.simulated_system import SimulatedSystem, simulated_system
from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import SchedulerConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import TenantRecord, own_reply

_OTHER = "other"
_PROMPT_TOKENS, _MAX_TOKENS = 16, 8
_PAUSE_S = 0.5
_TTFT_GOAL_MS = 1_000.0


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one part: endings of jobs, seconds since the first publish, other tenant's TTFT."""

    tier: Tier
    tenants_tier: Tier
    num_tenants: int
    num_jobs: int
    ends: dict[str, int]
    published_s: float
    took_s: float
    other_ttft_p50_ms: float
    other_ttft_p99_ms: float
    other_ttft_max_ms: float
    scheduler_cpu_s: float
    scheduler_cpu_ms_per_job: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run, and the CPU that it ran on. ``load_average`` is the kernel's figure for
    the last minute of the run. Above ``num_cores``, other processes used the cores, too."""

    cpu: str
    num_cores: int
    load_average: float
    lines: list[LineResult]


async def _end_of(answer: Answer) -> str:
    try:
        await answer.ended
    except RuntimeError as error:
        text = str(error)
        kind = text.removeprefix("a request ended with ").partition("(")[0].lower()
        named = [part for part in text.split("'") if "_" in part and part.islower()]
        return f"{kind} {named[0]}" if named else kind
    return "done"


async def _ask_on(service: Service, prompts: random.Random, ttfts_ms: list[float]) -> None:
    """Ask as the other tenant, one request after another."""
    while True:
        prompt = random_prompt(prompts, _PROMPT_TOKENS)
        answer = await service.send(_OTHER, prompt, _MAX_TOKENS, tier=Tier.PRO)
        await answer.ended
        ttfts_ms.append(answer.ttft_s * 1e3)
        await asyncio.sleep(_PAUSE_S)


async def _line(
    system: SimulatedSystem,
    number: int,
    tier: Tier,
    *,
    num_jobs: int,
    tenants_tier: Tier,
    num_tenants: int,
) -> LineResult:
    """Publish jobs of ``num_tenants`` tenants at once."""
    tenants = [f"publisher-{number}-{place}" for place in range(num_tenants)]
    services = {
        tenant: Service(system.bus, reply=own_reply(tenant, "results")) for tenant in tenants
    }
    prompts, other = random.Random(7), Service(system.bus, reply=f"gateway-{number}")
    for service in (*services.values(), other):
        await service.open()
    link = RedisLink(system.config.redis)
    store = TenantStore(link)
    for name in (*tenants, _OTHER):
        await store.change_tenant(name, lambda _: TenantRecord(tier=tenants_tier))
    await link.close()
    warm = await other.send(_OTHER, random_prompt(prompts, _PROMPT_TOKENS), _MAX_TOKENS)
    await warm.ended
    ttfts_ms: list[float] = []
    cpu_s, begun_s = system.scheduler_cpu_s(), time.perf_counter()
    asking = asyncio.create_task(_ask_on(other, prompts, ttfts_ms))
    answers: list[Answer] = []
    for tenant, service in services.items():
        count = num_jobs // num_tenants
        jobs = [random_prompt(prompts, _PROMPT_TOKENS) for _ in range(count)]
        answers += await service.send_many(
            tenant, jobs, (_MAX_TOKENS, _MAX_TOKENS), tier=tier, reserved=False
        )
    published_s = time.perf_counter() - begun_s
    waiting = asyncio.gather(*map(_end_of, answers))
    while not waiting.done():
        await asyncio.sleep(1.0)
        if asking.done():
            await asking  # only an error ends it
    took_s = time.perf_counter() - begun_s
    cpu_s = system.scheduler_cpu_s() - cpu_s
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return LineResult(
        tier=tier,
        tenants_tier=tenants_tier,
        num_tenants=len(tenants),
        num_jobs=len(answers),
        ends=dict(Counter(await waiting)),
        published_s=published_s,
        took_s=took_s,
        other_ttft_p50_ms=percentile(ttfts_ms, 0.5),
        other_ttft_p99_ms=percentile(ttfts_ms, 0.99),
        other_ttft_max_ms=max(ttfts_ms, default=0.0),
        scheduler_cpu_s=cpu_s,
        scheduler_cpu_ms_per_job=cpu_s / len(answers) * 1e3,
    )


def _tell(line: LineResult) -> None:
    ends = ", ".join(f"{count:,} {end}" for end, count in sorted(line.ends.items()))
    whose = f"{line.num_tenants:,} tenant(s) of tier {line.tenants_tier}"
    print(f"{line.num_jobs:,} jobs in tier {line.tier} of {whose}")
    print(f"  {ends}; published in {line.published_s:.1f} s, ended in {line.took_s:.1f} s")
    ttft = p50_p99([line.other_ttft_p50_ms, line.other_ttft_p99_ms], "7.1f")
    goal = f"(goal: at most {_TTFT_GOAL_MS:.0f} ms)"
    print(f"  first token of another tenant: {ttft}   max {line.other_ttft_max_ms:7.1f} ms {goal}")
    cpu_ms = f"{line.scheduler_cpu_ms_per_job:.2f} ms a job"
    print(f"  CPU time of the scheduler: {line.scheduler_cpu_s:.1f} s, {cpu_ms}")


def _is_kept(lines: Sequence[LineResult]) -> bool:
    """Return whether every job was done and the other tenant did not wait."""
    return all(
        line.ends == {"done": line.num_jobs} and line.other_ttft_p99_ms <= _TTFT_GOAL_MS
        for line in lines
    )


_Tier = Literal["enterprise", "pro", "free", "batch"]


def run(
    jobs: int = 3_000,
    tiers: Sequence[_Tier] = ("batch",),
    tenants_tier: _Tier = "pro",
    tenants: int = 1,
    engine: Literal["real", "simulated"] = "real",
    smoke: bool = False,
) -> PartResult:
    """Publish the jobs; the goals are that all are done and the other tenant does not wait."""
    if smoke:
        jobs, engine = 100, "simulated"
    lines: list[LineResult] = []

    async def measure() -> None:
        kind, most = EngineKind(engine), SchedulerConfig().max_queued_jobs
        counts = {"num_jobs": jobs, "num_tenants": tenants}
        async with simulated_system(1, engine=kind, max_queued_jobs=most) as system:
            for number, tier in enumerate(map(Tier, tiers)):
                of_tier = await _line(
                    system, number, tier, tenants_tier=Tier(tenants_tier), **counts
                )
                lines.append(of_tier)
                _tell(of_tier)

    uvloop.run(measure())
    results = Results(
        cpu=cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        lines=lines,
    )
    return PartResult(results, _is_kept(lines), "scheduler/job_lines.json")
