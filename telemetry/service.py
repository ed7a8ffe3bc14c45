"""The telemetry process: migrations, bridge, sink, HTTP interface and answers, kept running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack

from bus.api import Bus
from registry.catalogue import load_catalogue
from runtime.clock import Clock
from schemas.config import Config
from schemas.errors import ConfigError
from telemetry.bridge.bridge import Bridge
from telemetry.http.answers import Answers
from telemetry.http.interface import HttpServer
from telemetry.rollups.prices import record_prices
from telemetry.rollups.rollups import Rollups
from telemetry.sink.sink import Sink
from telemetry.store.migrate import migrate
from telemetry.store.outbox_ledger import OutboxLedger
from telemetry.store.store import Store
from telemetry.stores import RecordStores, UnstoredRecords
from telemetry.supervision import keep_running

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 3.0


class TelemetryService:
    """Owns the store from ``open`` to ``close``; ``run`` moves records until ``stop``."""

    def __init__(self, config: Config, store: Store, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._stop = asyncio.Event()
        self.store = store
        self.ledger = OutboxLedger(store)
        self.answers = Answers(store.reader)
        self.bridge: Bridge | None = None
        self.rollups = Rollups(store, clock, config.telemetry.rollup_interval_s)
        self.sink = Sink(
            config.kafka, config.telemetry, store, self.ledger, clock, self.rollups.touched
        )
        self.stores = RecordStores(config.storage, clock, self.sink.insertion)
        self.unstored = UnstoredRecords(clock)

    @classmethod
    async def open(cls, config: Config, clock: Clock) -> TelemetryService:
        """Open the store, bring it up to date, and note the catalogue's prices in it.

        Raises ConfigError, StoreUnavailableError, MigrationError.
        """
        store = await Store.open(config.clickhouse)
        try:
            applied = await migrate(store)
            await _note_prices(config, store, clock)
        except BaseException:
            await store.close()
            raise
        if applied:
            logger.info("migrated the database", extra={"migrations": applied})
        return cls(config, store, clock)

    def serve_http(self) -> HttpServer | None:
        """The HTTP interface over an embedded store; a server has its own. Raises ConfigError."""
        if not self._config.clickhouse.path:
            return None
        return HttpServer(self.store.reader, self._config.clickhouse)

    def stop(self) -> None:
        """Have ``run`` store what is in hand and return."""
        self._stop.set()

    async def run(self, bus: Bus) -> None:
        """Move records and answer questions until ``stop``; a part that fails starts again."""
        bridge = self.bridge = self.stores.bridge = Bridge(
            bus=bus,
            config=self._config.kafka,
            ledger=self.ledger,
            clock=self._clock,
            num_behind=self.sink.num_behind,
            on_new_cluster=self.sink.begin_again,
        )

        async def answer() -> None:
            subscription = await bus.control.serve_telemetry(self.answers.answer)
            try:
                await self._stop.wait()
            finally:
                await subscription.close()

        async def count_unstored() -> None:
            subscription = await self.unstored.watch(bus)
            try:
                await self._stop.wait()
            finally:
                await subscription.close()

        async with AsyncExitStack() as stack:
            self.stores.watch.start()
            stack.push_async_callback(self.stores.watch.close)
            parts = [
                self._part(stack, "bridge", keep_running("bridge", bridge.run, self._clock)),
                self._part(stack, "sink", keep_running("sink", self.sink.run, self._clock)),
                self._part(stack, "answers", keep_running("answers", answer, self._clock)),
                self._part(
                    stack, "unstored", keep_running("unstored", count_unstored, self._clock)
                ),
            ]
            rollups = self._part(
                stack, "rollups", keep_running("rollups", self.rollups.run, self._clock)
            )
            await self._stop.wait()
            bridge.stop()
            self.sink.stop()
            _, late = await asyncio.wait(parts, timeout=_FLUSH_TIMEOUT_S)
            # All at once: each may wait for a Kafka that is unreachable before it lets go of it.
            for part in late:
                part.cancel()
            # After the last batch, which it is to count.
            self.rollups.stop()
            _, still = await asyncio.wait([rollups], timeout=_FLUSH_TIMEOUT_S)
            late |= still
            if late:
                # Nothing is lost by it: what was not committed comes again at the next start, and
                # what was not counted is found then.
                logger.warning(
                    "stopped without flushing", extra={"parts": [t.get_name() for t in late]}
                )

    async def close(self) -> None:
        """Let go of the store."""
        await self.store.close()

    @staticmethod
    def _part(
        stack: AsyncExitStack, name: str, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)

        async def end() -> None:
            if not task.cancelling():  # else it is letting go of what it holds
                task.cancel()
            await asyncio.wait([task])

        stack.push_async_callback(end)
        return task


async def _note_prices(config: Config, store: Store, clock: Clock) -> None:
    """Requests are stored with what they cost, whether or not this process knows the prices."""
    try:
        catalogue = load_catalogue(config.catalogue)
    except ConfigError as error:
        logger.warning("the catalogue's prices are not known here", extra={"reason": error.message})
        return
    await record_prices(store, catalogue, clock)
