"""Object cache of an engine: blocks in an object store that all workers of a kind share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.kv.disk_cache import SlotMemory
from millrace.engine.kv.objects.block_objects import BlockObjects
from millrace.engine.kv.objects.object_tier import ObjectTier
from millrace.engine.kv.objects.object_writer import ObjectWriter
from millrace.engine.kv.objects.store_view import StoreView
from millrace.engine.threads.tasks import TaskThreads

# Writing has a lower priority than steps. Reading does not, since sequences wait for it.
_WRITE_NICENESS = 10
# One thread for writing for this many for reading.
_WRITING_SHARE = 4


class ObjectFigures(NamedTuple):
    """Figures of the exchange with an object store.

    Attributes:
        num_absent: Reads of objects that the store did not have.
        num_failures: Requests that failed or returned other contents.
        num_dropped_blocks: Blocks not written, after a failure or for lack of time.
        is_left_alone: True while the store is not used after a failure.
    """

    num_written_blocks: int = 0
    num_written_bytes: int = 0
    num_read_blocks: int = 0
    num_read_bytes: int = 0
    num_absent: int = 0
    num_failures: int = 0
    num_dropped_blocks: int = 0
    is_left_alone: bool = False


class ObjectCache:
    """Object cache: a ``tier`` of arrivals that reads from a store, and a ``writer``.

    For the step's thread. ``wake`` is called on any thread when there is something to ``settle``.
    """

    def __init__(
        self,
        objects: BlockObjects,
        memory: SlotMemory,
        tables: BlockTables,
        config: ResolvedEngineConfig,
        wake: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        assert tables.host is not None
        self._block_bytes = objects.block_bytes
        view = StoreView(objects, config.object_cache_min_tokens, monotonic)
        self._circuit = view.circuit
        num_reads = config.object_cache_requests
        self.tier = ObjectTier(
            view,
            memory,
            tables.pool.block_size_tokens,
            monotonic=monotonic,
            threads=TaskThreads("kv-object-read", num_reads),
        )
        num_writes = max(num_reads // _WRITING_SHARE, 1)
        self.writer = ObjectWriter(
            view,
            memory,
            tables,
            delay_s=config.idle_offload_s,
            monotonic=monotonic,
            on_done=wake,
            threads=TaskThreads("kv-object-write", num_writes, niceness=_WRITE_NICENESS),
        )
        tables.on_release = self.writer.note
        tables.host.pinned_elsewhere.append(self.writer.pinned_keys)

    def figures(self) -> ObjectFigures:
        """Return counters and state."""
        tier, writer, size = self.tier, self.writer, self._block_bytes
        return ObjectFigures(
            writer.num_written_blocks,
            writer.num_written_blocks * size,
            tier.num_read_blocks,
            tier.num_read_blocks * size,
            tier.num_absent,
            tier.num_failures + writer.num_failures,
            writer.num_dropped_blocks,
            self._circuit.is_open,
        )
