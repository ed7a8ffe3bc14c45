"""Cost of the job queue and frames above the client library, on a separate nats-server.

``queue`` prints publish-to-pull latency through the job queue and frames relayed per second, each
beside bare nats-py in the same run. Then it prints the cost of many tenant queues: to open them, to
pull one job of each in turn, and to forget them.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.support.figures import p50_p99
from benchmarks.support.processes import ProcessUsage
from millrace.bus.api import Bus
from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.frames import Delta, Frame
from millrace.schemas.jobs import Job, Tier
from tests.support.servers import NatsServer

MODEL = "bench"
LINE = TenantQueue(MODEL, Tier.FREE, "local")
PROMPT = tuple(range(256))
_BATCH = 64


async def job_latency(sender: Bus, receiver: Bus, num_jobs: int) -> list[float]:
    """Return the ms from the call of publish to the puller's receipt, one job at a time."""
    samples: list[float] = []
    for number in range(num_jobs):
        pulling = asyncio.ensure_future(receiver.jobs.pull(LINE, 8, 5.0))
        await asyncio.sleep(0.002)
        started_s = time.perf_counter()
        job = Job(request_id=f"bench-{number}", model=MODEL, prompt_token_ids=PROMPT)
        publishing = asyncio.ensure_future(sender.jobs.publish(job))
        (leased,) = await pulling
        samples.append((time.perf_counter() - started_s) * 1e3)
        await publishing
        await receiver.jobs.ack(leased.lease)
    return samples


async def bare_latency(sender: Client, receiver: Client, num_jobs: int) -> list[float]:
    """Return the same latency with nats-py alone: publish, fetch, ack_sync."""
    stream = sender.jetstream()
    await stream.add_stream(name="BARE", subjects=["bare.>"])
    pull = await receiver.jetstream().pull_subscribe("bare.x", durable="bare")
    payload = bytes(512)
    samples: list[float] = []
    for _ in range(num_jobs):
        pulling = asyncio.ensure_future(pull.fetch(1, 5))
        await asyncio.sleep(0.002)
        started_s = time.perf_counter()
        publishing = asyncio.ensure_future(stream.publish("bare.x", payload))
        (message,) = await pulling
        samples.append((time.perf_counter() - started_s) * 1e3)
        await publishing
        await message.ack_sync()
    return samples


async def line_costs(bus: Bus, num_lines: int, memory_bytes: Callable[[], int]) -> list[str]:
    """Return the cost of tenant queues, one per tenant, as lines to print."""
    tenants = [f"tenant-{number}" for number in range(num_lines)]
    lines = [TenantQueue(MODEL, Tier.PRO, tenant) for tenant in tenants]
    before_bytes = memory_bytes()
    costs: list[str] = []

    async def each(what: str, work: Callable[[TenantQueue], Awaitable[object]]) -> None:
        started_s = time.perf_counter()
        for line in lines:
            await work(line)
        each_ms = (time.perf_counter() - started_s) / num_lines * 1e3
        costs.append(f"  {what:<29} {each_ms:6.2f} ms each")

    held: deque[LeasedJob] = deque()
    numbers = itertools.count()

    async def publish(line: TenantQueue) -> None:
        job = Job(
            request_id=f"line-{next(numbers)}",
            model=MODEL,
            tier=line.tier,
            tenant=line.tenant or "",
            prompt_token_ids=PROMPT,
        )
        await bus.jobs.publish(job)

    async def pull(line: TenantQueue) -> None:
        held.extend(await bus.jobs.pull(line, 1, 0.0))

    async def ack(_line: TenantQueue) -> None:
        await bus.jobs.ack(held.popleft().lease)

    await each("publish", publish)
    await each("open and pull its job", pull)
    grown_bytes = memory_bytes() - before_bytes
    await each("acknowledge", ack)
    await each("publish the next", publish)
    await each("pull it", pull)
    await each("acknowledge it", ack)
    await each("forget", bus.jobs.forget_tenant_queue)
    costs.append(f"  server memory                 {grown_bytes / num_lines / 1024:6.1f} KiB each")
    return costs


async def frame_rate(sender: Bus, receiver: Bus, num_frames: int, *, batch: bool) -> float:
    """Return frames per second from one connection to another, one token each."""
    done = asyncio.Event()
    num_seen = 0

    def on_frame(_request_id: str, _frame: Frame) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == num_frames:
            done.set()

    subscription = await receiver.frames.subscribe("bench", on_frame)
    pairs: list[tuple[str, Frame]] = [
        (f"request-{number}", Delta(index=number, token_ids=(number,), text=" word"))
        for number in range(_BATCH)
    ]

    async def send() -> None:
        await sender.frames.publish("bench", pairs, batch=batch)

    return await _rate(send, done, num_frames, subscription.close)


async def bare_rate(sender: Client, receiver: Client, num_messages: int) -> float:
    """Return messages per second of nats-py alone, with payloads of a frame's size."""
    done = asyncio.Event()
    num_seen = 0

    async def on_message(_message: Msg) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == num_messages:
            done.set()

    subscription = await receiver.subscribe("bare-frames.>", cb=on_message)
    # The client's PING overtakes its buffered data; the second PING follows the subscription.
    await receiver.flush()
    await receiver.flush()
    payload = bytes(48)

    async def send() -> None:
        for _ in range(_BATCH):
            await sender.publish("bare-frames.x", payload)

    return await _rate(send, done, num_messages, subscription.unsubscribe)


async def _rate(
    send: Callable[[], Awaitable[None]],
    done: asyncio.Event,
    num_items: int,
    close: Callable[[], Awaitable[None]],
) -> float:
    started_s = time.perf_counter()
    for _ in range(num_items // _BATCH):
        await send()
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await done.wait()
    rate = num_items / (time.perf_counter() - started_s)
    await close()
    return rate


async def measure(
    url: str, num_jobs: int, num_frames: int, num_lines: int, memory_bytes: Callable[[], int]
) -> None:
    """Print the tables."""
    num_frames -= num_frames % _BATCH
    config = NatsConfig(url=url)
    sender, receiver = (
        await connect(config, "sender", part=Part.SCHEDULER),
        await connect(config, "receiver", part=Part.SCHEDULER),
    )
    bare_sender, bare_receiver = await nats.connect(url), await nats.connect(url)
    await receiver.jobs.pull(LINE, 1, 0.0)
    bare_samples = await bare_latency(bare_sender, bare_receiver, num_jobs)
    samples = await job_latency(sender, receiver, num_jobs)
    print(f"publish to pull, one job at a time, {num_jobs} jobs")
    print(f"  nats-py fetch   {p50_p99(bare_samples, '6.2f')}")
    print(f"  job queue       {p50_p99(samples, '6.2f')}")
    bare = await bare_rate(bare_sender, bare_receiver, num_frames)
    single = await frame_rate(sender, receiver, num_frames, batch=False)
    batched = await frame_rate(sender, receiver, num_frames, batch=True)
    print(f"relay on one core, {num_frames} frames of one token, both ends in this process")
    print(f"  nats-py raw     {bare:9,.0f} messages/s")
    print(f"  frames, single  {single:9,.0f} frames/s   {single / bare:.0%} of raw")
    print(f"  frames, {_BATCH} each {batched:9,.0f} frames/s   {batched / bare:.0%} of raw")
    costs = await line_costs(receiver, num_lines, memory_bytes)
    print(f"{num_lines} tenant queues, one request at a time")
    print("\n".join(costs))
    for client in (bare_sender, bare_receiver):
        await client.close()
    await sender.close()
    await receiver.close()


def run(jobs: int = 500, frames: int = 50_000, lines: int = 200) -> None:
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory)) as server:
        memory_bytes = ProcessUsage(server.pid).rss_bytes
        uvloop.run(measure(server.url, jobs, frames, lines, memory_bytes))
