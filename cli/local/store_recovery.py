"""Keeps the stores of an embedded stack going: room to start with, and again after a full disk."""

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
# What nats-server may take to come back, before it is started once more.
_RESTART_GAP_S = 6.0


def with_folders(config: StorageConfig, data: Path, *, keeps_kafka: bool = False) -> StorageConfig:
    """Where the stores of a stack on ``data`` are; Kafka's is there if it is no stand-in. Raises
    StartError if its disk has no room."""
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
    """Starts nats-server again when it has given streams up and there is room for them: it would
    not try them again by itself. What was acknowledged to anybody is on its disk."""

    def __init__(
        self,
        config: StorageConfig,
        storage: Storage,
        restart: Callable[[str], Awaitable[None]],
        clock: Clock,
        say: Callable[[str], None] = print,
    ) -> None:
        """``restart`` ends a process of that name, which is then started again."""
        self._watch = StoreWatch(config, clock, storage)
        self._restart = restart
        self._clock = clock
        self._say = say
        self._restarted_s: float | None = None
        self._tasks = Tasks()

    def start(self) -> None:
        """Look after the stores in a task, which ``close`` ends."""
        check = partial(self.check, spares_bus=True)
        self._tasks.repeat(check, self._watch.rest_s, self._clock, "store recovery")

    async def close(self) -> None:
        await self._tasks.close()

    async def check(self, *, spares_bus: bool = False) -> None:
        """Look at the stores once, as ``StoreWatch.look`` does; restart NATS where that helps."""
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
