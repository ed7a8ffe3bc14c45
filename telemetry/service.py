"""Telemetry process: migrations, bridge, sink, HTTP interface and answers, restarted after
failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from aiokafka.errors import KafkaError

from millrace.bus.api import Bus
from millrace.bus.storage import CLICKHOUSE, KAFKA
from millrace.bus.store.watch import StoreWatch, store_conditions
from millrace.bus.tenancy.tenants import TenantStore
from millrace.bus.transport import Subscription
from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.catalogue_watch import CatalogueWatch
from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import AlertCondition, AlertWatch
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import Config, StorageConfig
from millrace.schemas.control import WorkerStatus
from millrace.schemas.errors import ConfigError
from millrace.telemetry.bridge.bridge import Bridge
from millrace.telemetry.http.answers import SavedQueryAnswers
from millrace.telemetry.http.interface import HttpServer
from millrace.telemetry.rollups.budgets import EVERY_S as BUDGETS_EVERY_S
from millrace.telemetry.rollups.budgets import record_budgets
from millrace.telemetry.rollups.prices import record_prices
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.sink.insertion import Insertion
from millrace.telemetry.sink.sink import Sink
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.outbox_ledger import OutboxLedger
from millrace.telemetry.store.reading import StreamingReader
from millrace.telemetry.store.store import Store

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 3.0
_NS_PER_S = 10**9
# Half of the shortest time for which an alert's condition must hold.
_LOOK_EVERY_S = 15.0


class RecordFlow(NamedTuple):
    """Progress of records: ``num_waiting`` are not in Kafka, ``num_behind`` are in Kafka and not in
    ClickHouse, where the latest landed at ``last_stored_s`` (Unix time, 0: none so far).
    ``usage_age_s`` is the lag of usage by the minute behind the stored rows, in seconds; None:
    unknown."""

    now_s: float
    num_waiting: int
    num_behind: int
    last_stored_s: float
    usage_age_s: float | None
    troubles: Mapping[str, str]
    free_bytes: Mapping[str, int]


def conditions_of(flow: RecordFlow) -> Iterator[AlertCondition]:
    """Return the alert conditions of a telemetry process."""
    stood_s = flow.now_s - flow.last_stored_s if flow.num_behind and flow.last_stored_s else 0.0
    yield _over("MillraceOutboxFills", flow.num_waiting)
    yield _over("MillraceTelemetryBehind", flow.num_behind)
    yield _over("MillraceTelemetryStands", stood_s)
    yield _over("MillraceUsageOld", flow.usage_age_s)
    yield from store_conditions((KAFKA, CLICKHOUSE), flow.troubles, flow.free_bytes)


def _over(name: str, value: float | None) -> AlertCondition:
    return AlertCondition(
        name=name, value=value, holds=value is not None and value > RULES[name].bound
    )


class TelemetryService:
    """Owner of the store from ``open`` to ``close``; ``run`` moves records until ``stop``."""

    def __init__(
        self, config: Config, store: Store, clock: Clock, catalogue: Catalogue | None = None
    ) -> None:
        """Create the service; the prices of ``catalogue`` are recorded already."""
        known = catalogue or Catalogue({})
        self._catalogue = CatalogueWatch(config.catalogue, known, clock, self._on_catalogue)
        self._config = config
        self._clock = clock
        self._stop = asyncio.Event()
        self.store = store
        self.ledger = OutboxLedger(store)
        self.alerts = AlertWatch(clock)
        self.answers = SavedQueryAnswers(store.reader, self.alerts.alerts)
        self.bridge: Bridge | None = None
        self.rollups = Rollups(store, clock, config.telemetry.rollup_interval_s)
        self.sink = Sink(
            config.kafka,
            config.telemetry,
            store,
            self.ledger,
            clock,
            self.rollups.touched,
            self.rollups.sampled,
        )
        self.stores = RecordStores(config.storage, clock, self.sink.insertion)
        self.unstored = UnstoredRecords(clock)

    @classmethod
    async def open(cls, config: Config, clock: Clock) -> TelemetryService:
        """Open the store, migrate it, and record the catalogue's prices in it.

        Raises ConfigError, StoreUnavailableError, MigrationError.
        """
        store = await Store.open(config.clickhouse)
        try:
            applied = await migrate(store)
            catalogue = await _note_prices(config, store, clock)
        except BaseException:
            await store.close()
            raise
        if applied:
            logger.info("migrated the database", extra={"migrations": applied})
        return cls(config, store, clock, catalogue)

    def serve_http(self) -> HttpServer | None:
        """Return the HTTP interface over an embedded store; None for a server, which has its own.
        Raises ConfigError."""
        reader = self.store.reader
        if not isinstance(reader, StreamingReader):
            return None
        return HttpServer(reader, self._config.clickhouse, self.store.views)

    def stop(self) -> None:
        """Have ``run`` store the current batch and return."""
        self._stop.set()

    async def run(self, bus: Bus) -> None:
        """Move records and answer queries until ``stop``; a failed part is restarted."""
        bridge = self.bridge = self.stores.bridge = Bridge(
            bus=bus,
            config=self._config.kafka,
            ledger=self.ledger,
            clock=self._clock,
            num_behind=self.sink.num_behind,
            on_new_cluster=self.sink.begin_again,
            on_shipped=self.sink.shipped,
        )
        tasks = Tasks()
        redis = RedisLink(self._config.redis, self._clock)

        async def note_budgets() -> None:
            # The link logs that Redis is away; the next scan finds the changes since.
            with suppress(RedisUnreachableError):
                await record_budgets(
                    self.store, TenantStore(redis), self._config.gateway.tiers, self._clock
                )

        def start(name: str, part: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
            return tasks.keep(part, self._clock, name, foreseen=(KafkaError,))

        try:
            self.stores.watch.start()
            tasks.repeat(self._look, _LOOK_EVERY_S, self._clock, "alerts")
            tasks.repeat(note_budgets, BUDGETS_EVERY_S, self._clock, "budgets")
            self._catalogue.start()
            serve, watch = bus.control.serve_telemetry, bus.workers.watch
            parts = [
                start("bridge", bridge.run),
                start("sink", self.sink.run),
                start("answers", lambda: self._hold(serve(self.answers.answer))),
                start("unstored", lambda: self._hold(watch(self.unstored.on_status))),
            ]
            rollups = start("rollups", self.rollups.run)
            await self._stop.wait()
            bridge.stop()
            self.sink.stop()
            _, late = await asyncio.wait(parts, timeout=_FLUSH_TIMEOUT_S)
            # Stop all at once: each may wait for an unreachable Kafka before it closes.
            for part in late:
                part.cancel()
            # Stop the rollups last, since they must count the last batch.
            self.rollups.stop()
            _, still = await asyncio.wait([rollups], timeout=_FLUSH_TIMEOUT_S)
            for part in still:
                part.cancel()
            late |= still
            if late:
                # No data is lost: uncommitted records come again at the next start, and uncounted
                # rows are found then.
                logger.warning(
                    "stopped without flushing", extra={"parts": [t.get_name() for t in late]}
                )
                # Cancel once only: a second time would interrupt the clean-up.
                await asyncio.wait(late)
        finally:
            await self._catalogue.close()
            await tasks.close()
            await redis.close()
            await self.stores.watch.close()

    async def _look(self) -> None:
        num_waiting = 0 if self.bridge is None else self.bridge.num_waiting
        flow = RecordFlow(
            now_s=self._clock.now_ns() / _NS_PER_S,
            num_waiting=num_waiting + self.unstored.count(),
            num_behind=sum(self.sink.lag().values()),
            last_stored_s=self.sink.last_stored_s,
            usage_age_s=self.rollups.age_s,
            troubles=self.stores.troubles(),
            free_bytes=self.stores.watch.free,
        )
        self.alerts.look(conditions_of(flow))

    async def _on_catalogue(self, catalogue: Catalogue, _changed: frozenset[str]) -> None:
        await record_prices(self.store, catalogue, self._clock)

    async def close(self) -> None:
        """Close the store."""
        await self.store.close()

    async def _hold(self, subscribing: Awaitable[Subscription]) -> None:
        """Subscribe until ``stop``."""
        subscription = await subscribing
        try:
            await self._stop.wait()
        finally:
            await subscription.close()


async def _note_prices(config: Config, store: Store, clock: Clock) -> Catalogue | None:
    """Record the catalogue's prices and return it; None if it cannot be read.

    Requests are stored with their cost even if this process does not know the prices.
    """
    try:
        catalogue = load_catalogue(config.catalogue)
    except ConfigError as error:
        logger.warning(
            "the catalogue cannot be read, so its prices are not recorded",
            extra={"reason": error.message},
        )
        return None
    await record_prices(store, catalogue, clock)
    return catalogue


_WORKER_SILENCE_S = 10.0


class RecordStores:
    """State of Kafka and ClickHouse: room on their disks, and acceptance of records."""

    def __init__(self, config: StorageConfig, clock: Clock, insertion: Insertion) -> None:
        self.watch = StoreWatch(config, clock)
        self._insertion = insertion
        self.bridge: Bridge | None = None

    def troubles(self) -> dict[str, str]:
        """Return each store in trouble, with the rest of a sentence about it."""
        troubles = {
            store: why
            for store, why in self.watch.troubles().items()
            if store in (CLICKHOUSE, KAFKA)
        }
        if self._insertion.is_full:
            troubles[CLICKHOUSE] = "refuses rows because its disk is full; they wait in Kafka"
        if self.bridge is not None and self.bridge.trouble:
            troubles[KAFKA] = f"{self.bridge.trouble}; they wait in the outbox"
        return troubles


class UnstoredRecords:
    """Count of records that are not in the outbox yet: workers hold ended requests until their
    records are stored, and report the number with every heartbeat."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_worker: dict[str, tuple[int, float]] = {}

    def on_status(self, status: WorkerStatus) -> None:
        if status.retired:
            self._by_worker.pop(status.worker_id, None)
        else:
            self._by_worker[status.worker_id] = (status.num_ending, self._clock.monotonic())

    def count(self) -> int:
        """Return the sum over the recently heard workers."""
        oldest_s = self._clock.monotonic() - _WORKER_SILENCE_S
        self._by_worker = {
            worker_id: known for worker_id, known in self._by_worker.items() if known[1] >= oldest_s
        }
        return sum(num_ending for num_ending, _ in self._by_worker.values())
