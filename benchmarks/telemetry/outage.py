"""``outage``: duration of the lag after ClickHouse was down.

nats-server, a Kafka and a publisher of records run as processes. Bridge, sink and ClickHouse's
embedded engine run in this process, over a store that rejects inserts for ``--outage-s``. Records
are published all the time, at ``--rate`` a second. The lag is the number of records in the outbox
and in Kafka. The pipeline has caught up when as many rows have landed as waited at the end of the
outage, and no more wait than are published in ``_ALLOWANCE_S``, the time of a batch and of reading
the lag. In the end every record must be stored once.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.support.command import PartResult
from benchmarks.telemetry.record_load import (
    Published,
    RecordLoad,
    available,
    record_load,
    running_kafka,
)
from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig, Config, KafkaConfig, NatsConfig
from millrace.telemetry.service import TelemetryService
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import PlainTable, Store, StoreUnavailableError
from tests.support.servers import NatsServer
from tests.support.waiting import eventually

GOAL_S = 60.0
_ALLOWANCE_S = 2.0
_WARM_UP_S = 3.0
_LOOK_S = 0.25
_SAY_S = 10.0


class AwayStore(Store):
    """Store that rejects inserts while it is ``away``."""

    away = False

    @classmethod
    def over(cls, store: Store) -> AwayStore:
        """Wrap the connections of ``store``, which still closes them."""
        one = cls.__new__(cls)
        one.__dict__.update(store.__dict__)
        return one

    async def insert(self, table: PlainTable, columns: Sequence[Sequence[Any]], token: str) -> None:
        if self.away:
            raise StoreUnavailableError("away, as the benchmark wants it")
        await super().insert(table, columns, token)


class Outage:
    """Outage, from before it to the counting.

    ``most_behind`` is the longest queue; ``cpu_s_per_record`` is the CPU time of bridge, sink and
    engine together during the recovery.
    """

    def __init__(
        self, rate: float, limit_s: float, bus: Bus, store: AwayStore, service: TelemetryService
    ) -> None:
        self._rate = rate
        self._limit_s = limit_s
        self._bus = bus
        self._store = store
        self._service = service
        self.most_behind = 0
        self.cpu_s_per_record = 0.0

    async def run(self, outage_s: float) -> float:
        """Return the seconds from the store's return until the pipeline has caught up.

        Raises AssertionError if that exceeds the limit.
        """
        await self._until(self._is_level, self._limit_s)
        await asyncio.sleep(_WARM_UP_S)
        self._store.away = True
        print(f"ClickHouse is unreachable for {outage_s:g} s", flush=True)
        away_until_s = time.monotonic() + outage_s
        await self._until(lambda _: time.monotonic() > away_until_s, 2 * outage_s + 60)
        self._store.away = False
        returned_s, cpu_s = time.monotonic(), time.process_time()
        num_stored = self._service.sink.num_stored
        backlog = await self.behind()
        print(f"ClickHouse is back; {backlog:,} records behind", flush=True)

        def has_caught_up(behind: int) -> bool:
            landed = self._service.sink.num_stored - num_stored >= backlog
            return landed and self._is_level(behind)

        await self._until(has_caught_up, self._limit_s)
        took_s = time.monotonic() - returned_s
        num_stored = self._service.sink.num_stored - num_stored
        self.cpu_s_per_record = (time.process_time() - cpu_s) / num_stored
        return took_s

    async def behind(self) -> int:
        """Return the number of published records that are not in ClickHouse."""
        return await self._bus.outbox.num_waiting() + sum(self._service.sink.lag().values())

    def _is_level(self, behind: int) -> bool:
        known = bool(self._service.sink.lag())
        return known and behind <= self._rate * _ALLOWANCE_S

    async def _until(self, reached: Callable[[int], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        say_s = time.monotonic() + _SAY_S
        while True:
            behind = await self.behind()
            self.most_behind = max(self.most_behind, behind)
            if reached(behind):
                return
            if time.monotonic() > deadline_s:
                raise AssertionError(f"still {behind:,} records behind after {limit_s:g} s")
            if time.monotonic() > say_s:
                print(f"  {behind:>9,} behind", flush=True)
                say_s += _SAY_S
            await asyncio.sleep(_LOOK_S)

    async def settle(self, load: RecordLoad) -> Published:
        """Stop publishing and wait until all published records are stored."""
        published = await asyncio.to_thread(load.end)
        num_records = published.requests + published.deliveries + published.samples

        async def landed() -> bool:
            return await self._service.ledger.mark() >= num_records

        await eventually(landed, timeout_s=self._limit_s, what="all records landing")
        return published


async def measure(name: str, outage_s: float, rate: float, limit_s: float, directory: Path) -> bool:
    """Return whether the lag was gone in time, and every record stored once."""
    with NatsServer(directory / "nats") as server, running_kafka(name, directory) as kafka:
        store = await Store.open(ClickHouseConfig(path=str(directory / "store")))
        try:
            await migrate(store)
            outage, took_s, counts = await _one(
                *(outage_s, rate, limit_s), server.url, kafka.config, store
            )
        finally:
            await store.close()
    print(
        f"{name}: {outage_s:g} s away at {rate:g} records/s, {outage.most_behind:,} "
        f"behind at most; caught up in {took_s:.1f} s (goal {GOAL_S:g} s), a record took "
        f"{outage.cpu_s_per_record * 1e6:.0f} us of processor time from outbox to table; {counts}",
        flush=True,
    )
    return took_s <= GOAL_S and counts == "0 missing, 0 double"


async def _one(
    outage_s: float, rate: float, limit_s: float, nats_url: str, kafka: KafkaConfig, store: Store
) -> tuple[Outage, float, str]:
    away = AwayStore.over(store)
    bus = await nats.connect(NatsConfig(url=nats_url), "outage", part=Part.SCHEDULER)
    config = Config(kafka=kafka, clickhouse=ClickHouseConfig(url="http://unused:1"))
    service = TelemetryService(config, away, SystemClock())
    running = asyncio.create_task(service.run(bus))
    try:
        with record_load(nats_url, rate) as load:
            outage = Outage(rate, limit_s, bus, away, service)
            took_s = await outage.run(outage_s)
            published = await outage.settle(load)
    finally:
        service.stop()
        await running
        await bus.close()
    [[requests, distinct, deliveries]] = await store.rows(
        "SELECT (SELECT count() FROM requests FINAL), (SELECT uniqExact(request_id) FROM requests),"
        " (SELECT count() FROM deliveries FINAL)"
    )
    missing = published.requests - distinct + max(0, published.deliveries - deliveries)
    double = requests - distinct + max(0, deliveries - published.deliveries)
    return outage, took_s, f"{missing} missing, {double} double"


def run(
    outage_s: float = 300.0,
    rate: float = 2_000.0,
    limit_s: float = 600.0,
    kafka: Literal["apache", "embedded"] | None = None,
    smoke: bool = False,
) -> PartResult:
    """Publish ``rate`` records a second; the recovery may take ``limit_s``."""
    if smoke:
        outage_s, rate, kafka = 2.0, 200.0, "embedded"
    with tempfile.TemporaryDirectory(prefix="millrace-outage-") as folder:
        name = kafka or available()[0]
        return PartResult(None, asyncio.run(measure(name, outage_s, rate, limit_s, Path(folder))))
