"""Cost of prompts that are refused for their length: latency of other requests, and memory.

    python -m benchmarks.gateway --only prompts [--bodies 8] [--mb 3.9]

A gateway in its own process gets a few bodies at once from one client, while another client
requests ``/healthz`` all the time. The goals: at most 100 ms, and memory that returns to within
20 %. Then a scheduler in its own process gets texts of 7 MB on NATS, beside short jobs of others.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import httpx

from benchmarks.support.gateway_process import GatewayProcess, running_gateway
from benchmarks.support.processes import SPAWN, ProcessUsage
from benchmarks.support.simulated_system import MODEL, SimulatedSystem, simulated_system
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams
from tests.support.waiting import eventually

_GOAL_MS = 100.0
_SETTLE_S = 4.0
_PROBE_S = 0.005
_JOB_BYTES = 7_000_000
_NUM_LONG_JOBS = 9


class Measured(NamedTuple):
    """Statuses of long requests, and the measurements during them."""

    took_s: float
    worst_ms: float
    mb_before: float
    mb_most: float
    mb_after: float
    statuses: tuple[int, ...]


def kinds_of_bodies(mb: float) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Yield name, path and body of each kind."""
    num_bytes = round(mb * 1e6)
    text = "What is a millrace? " * (num_bytes // 20)
    yield "text", "/v1/completions", {"prompt": text}
    yield "one word", "/v1/completions", {"prompt": "a" * num_bytes}
    yield "a message", "/v1/chat/completions", {"messages": [_message(text)]}
    short = _message("a")
    messages = [short] * (num_bytes // (len(json.dumps(short)) + 2))
    yield "short messages", "/v1/chat/completions", {"messages": messages}
    yield "token ids", "/v1/completions", {"prompt": [5] * (num_bytes // 3)}
    yield "tokenize", "/v1/tokenize", {"prompt": text}


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def refused(
    gateway: GatewayProcess,
    senders: ProcessPoolExecutor,
    path: str,
    body: dict[str, Any],
    num_bodies: int,
) -> Measured:
    """Send ``num_bodies`` at once, on separate connections and from another process."""
    payload = json.dumps({"model": MODEL, **body}).encode()
    usage = gateway.usage
    mb_before = mb_most = _mb(usage)

    async def probe(client: httpx.AsyncClient) -> None:
        nonlocal mb_most
        (await client.get("/healthz")).raise_for_status()
        mb_most = max(mb_most, _mb(usage))

    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        await probe(client)
        begin_s = time.perf_counter()
        sending = asyncio.get_running_loop().run_in_executor(
            senders, send_all, gateway.url + path, payload, num_bodies
        )
        worst_ms = await worst_of(lambda: probe(client), sending)
        took_s = time.perf_counter() - begin_s
    await asyncio.sleep(_SETTLE_S)
    return Measured(took_s, worst_ms, mb_before, mb_most, _mb(usage), sending.result())


def send_all(url: str, payload: bytes, num_bodies: int) -> tuple[int, ...]:
    """Post the payload ``num_bodies`` times at once; return the statuses."""

    def send(_number: int) -> int:
        return httpx.post(url, content=payload, timeout=120).status_code

    with ThreadPoolExecutor(num_bodies) as threads:
        return tuple(threads.map(send, range(num_bodies)))


async def worst_of(probe: Callable[[], Awaitable[None]], until: asyncio.Future[Any]) -> float:
    """Probe repeatedly until ``until`` is done; return the slowest probe in ms."""
    worst_s = 0.0
    while not until.done():
        begin_s = time.perf_counter()
        await probe()
        worst_s = max(worst_s, time.perf_counter() - begin_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(until), _PROBE_S)
    await until
    return worst_s * 1e3


async def jobs(system: SimulatedSystem) -> Measured:
    """Publish long texts for the scheduler, and short jobs of another tenant one after another."""
    usage = ProcessUsage(system.schedulers[0].pid)
    mb_before = mb_most = _mb(usage)
    text = "What is a millrace? " * (_JOB_BYTES // 20)
    number = 0

    async def short_job() -> None:
        nonlocal number, mb_most
        number += 1
        await answered(system, _job(f"short-{number}", "short", "quick"))
        mb_most = max(mb_most, _mb(usage))

    await short_job()
    begin_s = time.perf_counter()
    long_jobs = [_job(f"long-{at}", text, "slow") for at in range(_NUM_LONG_JOBS)]
    sending = asyncio.gather(*(answered(system, job) for job in long_jobs))
    worst_ms = await worst_of(short_job, sending)
    took_s = time.perf_counter() - begin_s
    await asyncio.sleep(_SETTLE_S)
    return Measured(took_s, worst_ms, mb_before, mb_most, _mb(usage), ())


async def answered(system: SimulatedSystem, job: Job) -> None:
    """Publish a job and wait for its result."""
    await system.bus.jobs.publish(job)

    async def is_there() -> bool:
        return await system.bus.results.fetch(job.tenant, job.request_id) is not None

    await eventually(is_there, timeout_s=120.0)


def _job(request_id: str, text: str, tenant: str) -> Job:
    return Job(
        request_id=request_id,
        model=MODEL,
        prompt=text,
        tenant=tenant,
        sampling=SamplingParams(max_tokens=1),
        store_result=True,
    )


def _mb(usage: ProcessUsage) -> float:
    return usage.rss_bytes() / 1e6


def _print(name: str, found: Measured) -> None:
    goal = "" if found.worst_ms <= _GOAL_MS else f"  over the goal of {_GOAL_MS:g} ms"
    statuses = f" {sorted(set(found.statuses))}" if found.statuses else ""
    print(
        f"{name:15} {found.took_s:6.2f} s, others at worst {found.worst_ms:6.1f} ms, memory "
        f"{found.mb_before:.0f} -> {found.mb_most:.0f} -> {found.mb_after:.0f} MB"
        f"{statuses}{goal}",
        flush=True,
    )


async def _measure(num_bodies: int, mb: float) -> None:
    with running_gateway() as gateway, ProcessPoolExecutor(1, mp_context=SPAWN) as senders:
        print(f"gateway: {num_bodies} bodies of {mb:g} MB at once; /healthz meanwhile")
        await refused(gateway, senders, "/v1/completions", {"prompt": "warm", "n": 0}, 1)
        for name, path, body in kinds_of_bodies(mb):
            _print(name, await refused(gateway, senders, path, body, num_bodies))
    async with simulated_system(1) as system:
        print(f"scheduler: {_NUM_LONG_JOBS} jobs of {_JOB_BYTES / 1e6:g} MB; short jobs meanwhile")
        _print("text", await jobs(system))


def run(bodies: int = 8, mb: float = 3.9) -> None:
    asyncio.run(_measure(bodies, mb))
