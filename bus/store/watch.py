"""Watch for stores without free space, as one process sees them, for its admission and health."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.bus.storage import CLICKHOUSE, KAFKA, NATS, REDIS, Storage
from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import AlertCondition
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import StorageConfig
from millrace.schemas.errors import BusUnavailableError, StoreFullError

if TYPE_CHECKING:
    # This client takes 70 ms to import, and telemetry does not need it.
    from millrace.runtime.redis.link import RedisLink

logger = logging.getLogger(__name__)

# A store has room again only this factor above the mark, so that it does not alternate.
_ENOUGH = 1.25
_DIRECT_SHARE = 0.5
# A stream fails when it cannot be written. While its disk has room, the server is asked for failed
# streams only this often.
_ASK_EVERY_S = 5.0
# A process that connects to the bus resets the queue to accept jobs, so refusal is asserted again
# this often.
_ASSERT_EVERY_S = 5.0
_MIB = 1024 * 1024
# Fastest assumed growth of used space. A disk is checked after at most this many intervals.
_FASTEST_BYTES_PER_S = 4 * 1024 * _MIB
_MOST_INTERVALS = 5


def free_bytes(folder: str) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet. Raises OSError."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def folders_of(config: StorageConfig) -> dict[str, str]:
    """Return the configured folders by store."""
    folders = {
        NATS: config.nats_dir,
        REDIS: config.redis_dir,
        KAFKA: config.kafka_dir,
        CLICKHOUSE: config.clickhouse_dir,
    }
    return {store: folder for store, folder in folders.items() if folder}


class StoreWatch:
    """Store watch: checks the stores every ``check_interval_s``, less often with ample free space.

    It sees the free space on the disks of configured folders, failed streams of the bus (with
    ``storage``), and whether Redis can write (with ``redis``). With ``gates`` it makes the queue
    refuse all publishers' jobs while hardly any space is left.
    """

    def __init__(
        self,
        config: StorageConfig,
        clock: Clock,
        storage: Storage | None = None,
        redis: RedisLink | None = None,
        *,
        gates: bool = False,
        read_free_bytes: Callable[[str], int] = free_bytes,
    ) -> None:
        self._config = config
        self._clock = clock
        self._storage = storage
        self._redis = redis
        self._gates = gates
        self._read_free_bytes = read_free_bytes
        self._folders = folders_of(config)
        self._short: set[str] = set()
        self._closed_s: float | None = None
        # Unknown at first: a gateway that closed the queue may have been killed since.
        self._is_open = False
        self._asked_s = float("-inf")
        self._told: dict[str, str] = {}
        self._tasks = Tasks()
        self.free: dict[str, int] = {}
        self.failed_streams: dict[str, str] = {}

    def start(self) -> None:
        """Check the stores repeatedly, in a task that ``close`` ends."""
        self._tasks.repeat(partial(self.look, spares_bus=True), self.rest_s, self._clock, "stores")

    def rest_s(self) -> float:
        """Return the seconds until the next check."""
        interval_s = self._config.check_interval_s
        if self._told or self._closed_s is not None or not self.free:
            return interval_s
        spare_bytes = min(self.free.values()) - self._config.min_free_bytes
        num_intervals = int(spare_bytes / _FASTEST_BYTES_PER_S / interval_s)
        return interval_s * max(1, min(num_intervals, _MOST_INTERVALS))

    async def close(self) -> None:
        await self._tasks.close()

    async def look(self, *, spares_bus: bool = False) -> None:
        """Check all stores once. Never raises: the last state of an unreachable store stays.

        ``spares_bus``: ask the bus for failed streams only now and then while all is well.
        """
        if self._folders:
            self.free |= await asyncio.to_thread(self._look_at_disks)
        self._note_short()
        if not spares_bus or self._is_bus_due():
            await self._look_at_bus()
        if self._redis is not None:
            await self._redis.look_for_room()
        self._tell()

    def _look_at_disks(self) -> dict[str, int]:
        """Return the free bytes of the stores whose disks are visible."""
        free = {}
        for store, folder in self._folders.items():
            try:
                free[store] = self._read_free_bytes(folder)
            except OSError as error:
                logger.debug(
                    "a disk cannot be looked at", extra={"store": store, "why": repr(error)}
                )
        return free

    def is_short(self, store: str) -> bool:
        """Return whether a store's disk is nearly full."""
        return store in self._short

    def troubles(self) -> dict[str, str]:
        """Return the stores in trouble, each with the rest of a sentence that begins with its
        name."""
        troubles = {
            store: f"has {self.free[store] // _MIB} MiB of room left on its disk, which is less "
            f"than the {self._config.min_free_bytes // _MIB} MiB of storage.min_free_bytes"
            for store in sorted(self._short)
        }
        if self.failed_streams:
            streams = ", ".join(sorted(self.failed_streams))
            cause = next(iter(self.failed_streams.values()))
            troubles[NATS] = (
                f"has given its streams {streams} up ({cause}) and takes nothing for them until "
                "nats-server is started again"
            )
        if self._redis is not None and self._redis.is_full:
            troubles[REDIS] = "cannot write to its disk"
        return troubles

    def check(self) -> None:
        """Raise StoreFullError while NATS, the store of accepted jobs, has no room."""
        trouble = self.troubles().get(NATS)
        if trouble is not None:
            raise StoreFullError(NATS, trouble)

    def _note_short(self) -> None:
        least = self._config.min_free_bytes
        for store, free in self.free.items():
            if free < (least * _ENOUGH if store in self._short else least):
                self._short.add(store)
            else:
                self._short.discard(store)

    def _is_bus_due(self) -> bool:
        has_room = NATS in self.free and not self.is_short(NATS)
        is_well = has_room and not self.failed_streams and self._closed_s is None
        return not is_well or self._clock.monotonic() - self._asked_s >= _ASK_EVERY_S

    async def _look_at_bus(self) -> None:
        if self._storage is None:
            return
        self._asked_s = self._clock.monotonic()
        try:
            self.failed_streams = await self._storage.failed_streams()
            if self._gates:
                await self._keep_gate(self._storage)
        except BusUnavailableError as error:
            logger.debug("the state of the bus's store is unknown", extra={"why": error.message})

    async def _keep_gate(self, storage: Storage) -> None:
        if NATS not in self.free:
            return
        now_s = self._clock.monotonic()
        if self.free[NATS] < self._config.min_free_bytes * _DIRECT_SHARE:
            if self._closed_s is None or now_s - self._closed_s >= _ASSERT_EVERY_S:
                await storage.admit_jobs(admit=False)
                self._closed_s = now_s
                self._is_open = False
        elif not (self._is_open or self.is_short(NATS)):
            await storage.admit_jobs(admit=True)
            self._closed_s = None
            self._is_open = True

    def _tell(self) -> None:
        troubles = self.troubles()
        for store in troubles.keys() - self._told.keys():
            logger.error("a store has no room", extra={"store": store, "why": troubles[store]})
        for store in self._told.keys() - troubles.keys():
            logger.info("a store has room again", extra={"store": store})
        self._told = troubles


class StoreMetrics(Collector):
    """Prometheus metrics of the stores."""

    def __init__(
        self,
        stores: Iterable[str],
        troubles: Callable[[], Mapping[str, str]],
        free: Callable[[], Mapping[str, int]],
    ) -> None:
        """Create the metrics for ``stores``. ``troubles`` returns the stores in trouble."""
        self._stores = set(stores)
        self._troubles = troubles
        self._free = free

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "millrace_store_healthy",
            "1 while a store accepts writes, 0 while it has no room, as in /healthz",
            labels=["store"],
        )
        troubles = self._troubles()
        for store in sorted(self._stores | troubles.keys()):
            healthy.add_metric([store], int(store not in troubles))
        room = GaugeMetricFamily(
            "millrace_store_free_bytes",
            "Free bytes on a store's disk, if the process can see that disk",
            labels=["store"],
        )
        for store, num_bytes in sorted(self._free().items()):
            room.add_metric([store], num_bytes)
        yield from (healthy, room)


_SHORT = "MillraceStoreShort"


def store_conditions(
    stores: Iterable[str], troubles: Mapping[str, str], free_bytes: Mapping[str, int]
) -> Iterator[AlertCondition]:
    """Yield alert conditions: each store accepts writes, and each visible disk has room.

    ``troubles`` has the stores that accept no writes, with the reason.
    """
    for store in stores:
        trouble = troubles.get(store)
        detail = "" if trouble is None else f"{store} {trouble}"
        yield AlertCondition(
            name="MillraceStoreFull", subject=store, holds=trouble is not None, detail=detail
        )
        free = free_bytes.get(store)
        if free is not None:
            yield AlertCondition(
                name=_SHORT, subject=store, value=free, holds=free < RULES[_SHORT].bound
            )
