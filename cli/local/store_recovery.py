"""Recovery of an embedded stack's stores: free space at the start, and restarts after a full
disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from millrace.bus.storage import NATS, Storage
from millrace.bus.store.watch import StoreWatch, free_bytes
from millrace.cli.local.supervisor import StartError
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import StorageConfig

_MIB = 1024 * 1024
# Time for nats-server to come back, in seconds, before it is restarted once more.
_RESTART_GAP_S = 6.0


def with_folders(config: StorageConfig, data: Path, *, keeps_kafka: bool = False) -> StorageConfig:
    """Return the settings with the folders of the stores on ``data``; Kafka's only if it is Apache
    Kafka.

    Raises StartError if its disk has no room.
    """
    free = free_bytes(str(data))
    if free < config.min_free_bytes:
        raise StartError(
            f"the disk of {data} has {free // _MIB} MiB free, and nothing is accepted with less "
            f"than {config.min_free_bytes // _MIB} MiB. Free some, give another folder with "
            "--data, or lower storage.min_free_bytes."
        )
    return replace(
        config,
        nats_dir=str(data / "nats"),
        redis_dir=str(data / "redis"),
        kafka_dir=str(data / "kafka") if keeps_kafka else "",
        clickhouse_dir=str(data / "clickhouse"),
    )


class StoreRecovery:
    """Restarter of a nats-server that gave up streams because its disk was full: it does not retry
    by itself. Acknowledged data is on its disk."""

    def __init__(
        self,
        config: StorageConfig,
        storage: Storage,
        restart: Callable[[str], Awaitable[None]],
        clock: Clock,
        say: Callable[[str], None] = print,
    ) -> None:
        """Create the recovery.

        Args:
            restart: Ends a process by name; its supervisor then starts it again.
        """
        self._watch = StoreWatch(config, clock, storage)
        self._restart = restart
        self._clock = clock
        self._say = say
        self._restarted_s: float | None = None
        self._tasks = Tasks()

    def start(self) -> None:
        """Watch the stores in a task, which ``close`` ends."""
        check = partial(self.check, spares_bus=True)
        self._tasks.repeat(check, self._watch.rest_s, self._clock, "store recovery")

    async def close(self) -> None:
        await self._tasks.close()

    async def check(self, *, spares_bus: bool = False) -> None:
        """Check the stores once, as ``StoreWatch.look`` does, and restart NATS if that helps."""
        await self._watch.look(spares_bus=spares_bus)
        streams = self._watch.failed_streams
        if not streams or self._watch.is_short(NATS):
            return
        now_s = self._clock.monotonic()
        if self._restarted_s is not None and now_s - self._restarted_s < _RESTART_GAP_S:
            return
        self._restarted_s = now_s
        cause = next(iter(streams.values()))
        self._say(
            f"nats gave its streams {', '.join(sorted(streams))} up ({cause}) and there is room "
            "now; starting it again"
        )
        await self._restart("nats")
