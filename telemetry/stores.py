"""How the stores of the records are, as the telemetry process sees them."""

from __future__ import annotations

from millrace.bus.storage import CLICKHOUSE, KAFKA
from millrace.bus.store.watch import StoreWatch
from millrace.runtime.clock import Clock
from millrace.schemas.config import StorageConfig
from millrace.schemas.control import WorkerStatus
from millrace.telemetry.bridge.bridge import Bridge
from millrace.telemetry.sink.insertion import Insertion

_WORKER_SILENCE_S = 10.0


class RecordStores:
    """Kafka and ClickHouse: whether their disks have room, and whether they take what is sent."""

    def __init__(self, config: StorageConfig, clock: Clock, insertion: Insertion) -> None:
        self.watch = StoreWatch(config, clock)
        self._insertion = insertion
        self.bridge: Bridge | None = None

    def troubles(self) -> dict[str, str]:
        """Those of the two that are in trouble, each with the rest of a sentence about it."""
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
    """Records that did not get into the outbox so far: workers hold on to requests that are over
    until their records are stored, and tell how many with every heartbeat."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_worker: dict[str, tuple[int, float]] = {}

    def on_status(self, status: WorkerStatus) -> None:
        if status.retired:
            self._by_worker.pop(status.worker_id, None)
        else:
            self._by_worker[status.worker_id] = (status.num_ending, self._clock.monotonic())

    def count(self) -> int:
        """Of the workers that were heard of lately."""
        oldest_s = self._clock.monotonic() - _WORKER_SILENCE_S
        self._by_worker = {
            worker_id: known for worker_id, known in self._by_worker.items() if known[1] >= oldest_s
        }
        return sum(num_ending for num_ending, _ in self._by_worker.values())
