"""``chaos``: check that every record is counted once after kills of telemetry and Kafka.

Runs nats-server, a Kafka (Apache's broker if java and its jars are available, and the embedded one)
and ``python -m millrace.telemetry`` as processes, while records are published all the time. In
turn, at random moments, the telemetry process (bridge and sink) and Kafka are killed with
``kill -9`` and restarted. The embedded Kafka restarts empty and at another address; telemetry is
then restarted too, as by ``millrace up``. In the end, counts over ``FINAL``, the views and the
usage by the minute are compared with the published records.
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


# Ways of counting the stored records, and the published figures that they must equal.
_COUNTS = {
    "requests FINAL": ("SELECT count() FROM requests FINAL", "requests"),
    "distinct requests": ("SELECT uniqExact(request_id) FROM requests", "requests"),
    "requests_once": ("SELECT count() FROM requests_once", "requests"),
    "deliveries FINAL": ("SELECT count() FROM deliveries FINAL", "deliveries"),
    "distinct deliveries": ("SELECT uniqExact(request_id) FROM deliveries", "deliveries"),
    "worker_samples FINAL": ("SELECT count() FROM worker_samples FINAL", "samples"),
    "prompt tokens": ("SELECT sum(prompt_tokens) FROM requests FINAL", "prompt_tokens"),
    "cost": ("SELECT sum(cost) FROM requests_once", "cost"),
    "requests by the minute": ("SELECT sum(requests) FROM usage_by_minute FINAL", "requests"),
}
Counts = dict[str, Decimal]


class Drill:
    """System over one Kafka, from its start to the counting."""

    def __init__(self, seed: int, kafka: Kafka, process: TelemetryProcess) -> None:
        self._kafka = kafka
        self._process = process
        self._draw = random.Random(seed)

    async def run(self, rounds: int) -> None:
        for number in range(rounds):
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
            # Kill in the middle of inserts again: new rows have landed since the kill.
            await self._moves(newest)
            took_s = time.monotonic() - started_s
            print(
                f"{number + 1:3} {event} killed; rows land again after {took_s:.1f} s", flush=True
            )

    async def _restart(self, event: str) -> None:
        if event == "kafka":
            # In this thread, because a server dies with the thread that started it.
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
        """Wait until all records are stored, or the timeout."""
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
        """Count the stored records; return None while the store cannot be reached."""
        answer = await self._process.sql(
            f"SELECT {', '.join(f'({sql})' for sql, _ in _COUNTS.values())}"
        )
        parts = answer.split("\t")
        if len(parts) != len(_COUNTS):
            return None
        return dict(zip(_COUNTS, map(Decimal, parts), strict=True))


def _differences(counts: Counts, published: Published) -> list[str]:
    """List each way of counting that differs from the published figures."""
    wanted = {name: Decimal(getattr(published, field)) for name, (_, field) in _COUNTS.items()}
    return [
        f"{name}: {found}, and {wanted[name]} were published"
        for name, found in counts.items()
        if found != wanted[name]
    ]


async def drill(name: str, rounds: int, rate: float, seed: int, directory: Path) -> bool:
    """Return whether every record is stored once."""
    with NatsServer(directory / "nats") as nats, running_kafka(name, directory) as kafka:
        process = TelemetryProcess(directory, nats.url, kafka.config)
        process.start()
        try:
            await process.answers()
            with record_load(nats.url, rate) as load:
                one = Drill(seed, kafka, process)
                await one._moves("")
                await one.run(rounds)
                published = load.end()
                counts = await one.settle(published)
        finally:
            process.kill()
    wrong = _differences(counts, published)
    requests, deliveries = counts["distinct requests"], counts["distinct deliveries"]
    missing = max(Decimal(), published.requests - requests)
    missing += max(Decimal(), published.deliveries - deliveries)
    double = counts["requests FINAL"] - requests + counts["deliveries FINAL"] - deliveries
    total = published.requests + published.deliveries + published.samples
    print(
        f"{name}: {rounds} rounds, {total} records; {missing} missing, {double} double"
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
    """Run ``rounds`` for each Kafka, or for ``kafka``; ``rate`` is records a second."""
    if smoke:
        rounds, rate = 2, 200.0
    names = [kafka] if kafka else ["embedded"] if smoke else available()
    all_met = True
    for name in names:
        with tempfile.TemporaryDirectory(prefix="millrace-telemetry-") as folder:
            all_met = asyncio.run(drill(name, rounds, rate, seed, Path(folder))) and all_met
    if not all_met:
        sys.exit(1)  # also for a smoke run: no record may be missing
