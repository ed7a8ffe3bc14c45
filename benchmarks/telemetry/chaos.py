"""``chaos``: is every record counted once, whatever is killed?

nats-server, a Kafka (Apache's broker where java and its jars can be had, and the embedded one) and
``python -m millrace.telemetry``, all as processes; records are published all the time. In turn, at
random moments, the telemetry process (bridge and sink) and Kafka get ``kill -9`` and come back.
After a kill of the embedded Kafka, which comes back empty and elsewhere, telemetry is started again
as ``millrace up`` does it. In the end everything is counted, over ``FINAL``, over the views and
over the usage by the minute, and beside what was published.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.telemetry.record_load import Kafka, Published, available, record_load, running_kafka
from tests.support.servers import NatsServer
from tests.support.waiting import eventually
from tests.telemetry.process import TelemetryProcess

_LANDING_TIMEOUT_S = 180.0
_NEWEST = "SELECT max(request_id) FROM requests"
_EVENTS = ("telemetry", "kafka")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much of it, and how the dice fall."""

    rounds: int
    rate: float
    seed: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What is there, by every way of counting it."""

    requests: int
    distinct: int
    in_view: int
    deliveries: int
    distinct_deliveries: int
    samples: int
    prompt_tokens: int
    cost: Decimal
    by_the_minute: int


class Drill:
    """One system over one Kafka, from its start to the counting."""

    def __init__(self, plan: Plan, kafka: Kafka, process: TelemetryProcess) -> None:
        self._plan = plan
        self._kafka = kafka
        self._process = process
        self._draw = random.Random(plan.seed)

    async def run(self) -> None:
        for number in range(self._plan.rounds):
            event = _EVENTS[number % len(_EVENTS)]
            newest = await self._newest()
            await asyncio.sleep(self._draw.uniform(0.2, 1.5))
            started_s = time.monotonic()
            if event == "telemetry":
                self._process.kill()
            else:
                self._kafka.kill()
            await asyncio.sleep(self._draw.uniform(0.0, 1.0))
            await self._restart(event)
            # Into the middle of it again: rows that were not there at the kill have landed.
            await self._moves(newest)
            took_s = time.monotonic() - started_s
            print(
                f"{number + 1:3} {event} killed; rows land again after {took_s:.1f} s", flush=True
            )

    async def _restart(self, event: str) -> None:
        if event == "kafka":
            # In this thread: a server dies with the thread that started it.
            self._kafka.start()
            if not self._kafka.forgets:
                return
            self._process.config = msgspec.structs.replace(
                self._process.config, kafka=self._kafka.config
            )
            self._process.stop()
        self._process.start()
        await self._process.answers()

    async def _newest(self) -> str:
        return await self._process.sql(_NEWEST)

    async def _moves(self, newest: str) -> None:
        async def moved() -> bool:
            return await self._newest() > newest

        await eventually(moved, timeout_s=_LANDING_TIMEOUT_S, what="rows landing again")

    async def settle(self, published: Published) -> Counts:
        """Wait until all is there, or until it seems that it never will be."""
        deadline_s = time.monotonic() + _LANDING_TIMEOUT_S
        while True:
            counts = await self._count()
            is_late = time.monotonic() > deadline_s
            if counts is not None and (is_late or not _differences(counts, published)):
                return counts
            if is_late:
                raise RuntimeError("the rows cannot be counted: telemetry does not answer")
            await asyncio.sleep(0.5)

    async def _count(self) -> Counts | None:
        """None while it cannot be asked."""
        answer = await self._process.sql(
            "SELECT (SELECT count() FROM requests FINAL), "
            "(SELECT uniqExact(request_id) FROM requests), "
            "(SELECT count() FROM requests_once), "
            "(SELECT count() FROM deliveries FINAL), "
            "(SELECT uniqExact(request_id) FROM deliveries), "
            "(SELECT count() FROM worker_samples FINAL), "
            "(SELECT sum(prompt_tokens) FROM requests FINAL), "
            "(SELECT sum(cost) FROM requests_once), "
            "(SELECT sum(requests) FROM usage_by_minute FINAL)"
        )
        parts = answer.split("\t")
        if len(parts) != len(msgspec.structs.fields(Counts)):
            return None
        names = [field.name for field in msgspec.structs.fields(Counts)]
        return msgspec.convert(dict(zip(names, parts, strict=True)), Counts, strict=False)


def _differences(counts: Counts, published: Published) -> list[str]:
    """Each way of counting that does not give what was published."""
    wanted = {
        "requests FINAL": (counts.requests, published.requests),
        "distinct requests": (counts.distinct, published.requests),
        "requests_once": (counts.in_view, published.requests),
        "deliveries FINAL": (counts.deliveries, published.deliveries),
        "distinct deliveries": (counts.distinct_deliveries, published.deliveries),
        "worker_samples FINAL": (counts.samples, published.samples),
        "prompt tokens": (counts.prompt_tokens, published.prompt_tokens),
        "cost": (counts.cost, Decimal(published.cost)),
        "requests by the minute": (counts.by_the_minute, published.requests),
    }
    return [
        f"{name}: {found}, and {sent} were published"
        for name, (found, sent) in wanted.items()
        if found != sent
    ]


async def drill(name: str, plan: Plan, directory: Path) -> bool:
    """Whether every record is there once."""
    with NatsServer(directory / "nats") as nats, running_kafka(name, directory) as kafka:
        process = TelemetryProcess(directory, nats.url, kafka.config)
        process.start()
        try:
            await process.answers()
            with record_load(nats.url, plan.rate) as load:
                one = Drill(plan, kafka, process)
                await one._moves("")
                await one.run()
                published = load.end()
                counts = await one.settle(published)
        finally:
            process.kill()
    wrong = _differences(counts, published)
    missing = max(0, published.requests - counts.distinct)
    missing += max(0, published.deliveries - counts.distinct_deliveries)
    double = counts.requests - counts.distinct + counts.deliveries - counts.distinct_deliveries
    total = published.requests + published.deliveries + published.samples
    print(
        f"{name}: {plan.rounds} rounds, {total} records; {missing} missing, {double} double"
        + "".join(f"\n   WRONG: {difference}" for difference in wrong),
        flush=True,
    )
    return not wrong


def run(
    rounds: int = 20,
    rate: float = 500.0,
    kafka: Literal["apache", "embedded"] | None = None,
    seed: int = 7,
    smoke: bool = False,
) -> None:
    """``rounds`` are for each Kafka, or for the one ``kafka``; ``rate`` is records a second."""
    plan = (
        Plan(rounds=2, rate=200.0, seed=seed)
        if smoke
        else Plan(rounds=rounds, rate=rate, seed=seed)
    )
    names = [kafka] if kafka else ["embedded"] if smoke else available()
    kept = True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="millrace-telemetry-") as folder:
            kept = asyncio.run(drill(name, plan, Path(folder))) and kept
    if not kept:
        sys.exit(1)  # also of a smoke run: nothing may be missing
