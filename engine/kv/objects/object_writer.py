"""Writer of blocks to an object store, after the requests that computed them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.kv.disk_cache import SlotMemory
from millrace.engine.kv.objects.block_objects import ObjectStoreError
from millrace.engine.kv.objects.store_view import StoreView
from millrace.engine.threads.tasks import TaskThreads

# Limit of blocks that wait to be written, which hold host memory. It is also at most half of that
# memory.
_MAX_UNWRITTEN_BYTES = 128 << 20
# Maximum keys of prefixes that are due later, 30 MB of keys.
_MAX_NOTED_KEYS = 1 << 19


class _Prefix:
    """Prefix to write at ``due_s``, from the block ``next`` on."""

    __slots__ = ("due_s", "keys", "next")

    def __init__(self, keys: list[bytes], due_s: float) -> None:
        self.keys = keys
        self.due_s = due_s
        self.next = 0


class _Written(NamedTuple):
    """Result of writing a run.

    Attributes:
        answer_s: Seconds of the request that checked for the object; None without one.
        was_there: True if the object existed.
        why: Error of the request; empty if there was no attempt. None if the run is in the store.
    """

    keys: list[bytes]
    answer_s: float | None = None
    was_there: bool = False
    why: str | None = None


class ObjectWriter:
    """Writer of the long prefixes of sequences that ended ``delay_s`` ago.

    It writes the blocks that are still here. Blocks that only the device has are copied into host
    memory first, a few per call. Writing is on threads of its own; all other calls are for one
    thread: ``note`` when a sequence releases its table, and ``settle`` regularly. ``on_done`` is
    called on those threads when there is something to settle. If more prefixes are due than can be
    written, the newest are dropped.
    """

    def __init__(
        self,
        view: StoreView,
        memory: SlotMemory,
        tables: BlockTables,
        *,
        delay_s: float,
        monotonic: Callable[[], float],
        on_done: Callable[[], None],
        threads: TaskThreads,
    ) -> None:
        assert tables.host is not None
        self._objects = objects = view.objects
        self._known = view.known
        self._circuit = view.circuit
        self._speed = view.speed
        self._memory = memory
        self._tables = tables
        self._host = tables.host
        self._delay_s = delay_s
        min_blocks = -(-view.min_tokens // tables.pool.block_size_tokens)
        self._min_blocks = max(min_blocks, objects.num_blocks)
        self._monotonic = monotonic
        self._on_done = on_done
        self._threads = threads
        room_bytes = min(_MAX_UNWRITTEN_BYTES, self._host.num_slots * objects.block_bytes // 2)
        self._max_runs = max(room_bytes // (objects.num_blocks * objects.block_bytes), 1)
        self._noted: deque[_Prefix] = deque()
        self._noted_ends: set[bytes] = set()
        self._num_noted_keys = 0
        self._unsettled: list[list[bytes]] = []
        self._writing: dict[bytes, list[bytes]] = {}  # by last key, unsettled ones included
        self._written: deque[_Written] = deque()
        self.num_written_blocks = 0
        self.num_dropped_blocks = 0
        self.num_failures = 0

    @property
    def is_busy(self) -> bool:
        """True while blocks are being written or wait for it."""
        return bool(self._writing or self._noted)

    def note(self, keys: Sequence[bytes], now_s: float) -> None:
        """Note the end of a sequence whose blocks with these keys are in the prefix cache."""
        num_blocks = self._objects.num_blocks
        end = len(keys) // num_blocks * num_blocks
        if len(keys) < self._min_blocks:
            return
        last_key = keys[end - 1]
        if last_key in self._noted_ends or self._known.is_present(last_key):
            return
        if self._num_noted_keys + end > _MAX_NOTED_KEYS:
            self.num_dropped_blocks += end
            return
        self._num_noted_keys += end
        self._noted_ends.add(last_key)
        self._noted.append(_Prefix(list(keys[:end]), now_s + self._delay_s))

    def settle(self) -> None:
        """Take over finished writes, and start to write what is due."""
        while self._written:
            self._note_written(self._written.popleft())
        if self._noted and not self._circuit.is_open:
            self._take_due()
        if self._unsettled and self._memory.is_settled:
            runs, self._unsettled = self._unsettled, []
            for keys in runs:
                pieces = [self._memory.pieces(self._host.slot_of(key)) for key in keys]
                self._threads.submit(partial(self._write, keys, pieces))

    def _take_due(self) -> None:
        now_s, num_left = self._monotonic(), self._host.blocks_at_a_time
        while self._noted and self._noted[0].due_s <= now_s and len(self._writing) < self._max_runs:
            prefix = self._noted[0]
            keys = prefix.keys[prefix.next : prefix.next + self._objects.num_blocks]
            if keys and not (keys[-1] in self._writing or self._known.is_present(keys[-1])):
                missing = [key for key in keys if key not in self._host]
                num_left -= len(missing)
                if num_left < 0:
                    return
                if not self._hold(keys, missing):
                    keys = []  # later blocks cannot be used without this run
            prefix.next += len(keys)
            if not keys:
                self._noted.popleft()
                self._noted_ends.remove(prefix.keys[-1])
                self._num_noted_keys -= len(prefix.keys)

    def _hold(self, keys: list[bytes], missing: list[bytes]) -> bool:
        """Pin a run in host memory until it is written.

        Return whether all its blocks are available.
        """
        found = [self._tables.cached.block_of(key) for key in missing]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(missing):
            return False
        here = [key for key in keys if key in self._host]
        self._host.pin(here)  # so that the new copies do not evict these
        if missing and self._host.store(missing, blocks) < len(missing):
            self._host.unpin(here)
            return False
        self._host.pin(missing)
        self._writing[keys[-1]] = keys
        self._unsettled.append(keys)
        return True

    def _write(self, keys: list[bytes], pieces: list[list[memoryview]]) -> None:
        """Write a run, on one of the writer's threads."""
        written = _Written(keys, why="")
        try:
            if not self._circuit.is_open:
                written = self._put(keys, pieces)
        except ObjectStoreError as error:
            written = _Written(keys, why=str(error))
        finally:
            self._written.append(written)
            self._on_done()

    def _put(self, keys: list[bytes], pieces: list[list[memoryview]]) -> _Written:
        """Write a run unless the store has it. Raises ObjectStoreError."""
        answer_s = None
        if not self._known.is_damaged(keys[-1]):
            begin_s = time.perf_counter()
            is_there = self._objects.has(keys[-1])
            answer_s = time.perf_counter() - begin_s
            if is_there:
                return _Written(keys, answer_s, was_there=True)
        self._objects.write(keys, pieces)
        return _Written(keys, answer_s)

    def _note_written(self, written: _Written) -> None:
        keys = written.keys
        del self._writing[keys[-1]]
        self._host.unpin(keys)
        if written.answer_s is not None:
            self._speed.note_answer(written.answer_s)
        if written.why is None:
            self._known.note_present(keys[-1])
            self._circuit.note_success()
            if not written.was_there:
                self.num_written_blocks += len(keys)
            return
        self.num_dropped_blocks += len(keys)
        if written.why:
            self.num_failures += 1
            self._circuit.note_failure(written.why)

    def pinned_keys(self) -> Iterator[bytes]:
        """Iterate over the keys whose copies in host memory are being written."""
        for keys in self._writing.values():
            yield from keys
