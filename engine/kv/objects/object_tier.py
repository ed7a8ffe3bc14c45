"""Object store as a tier from which blocks are fetched."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

from millrace.engine.kv.arrivals import Source, TierPart
from millrace.engine.kv.disk_cache import SlotMemory
from millrace.engine.kv.objects.block_objects import (
    NoObjectError,
    ObjectPlace,
    ObjectStoreError,
)
from millrace.engine.kv.objects.store_view import StoreView
from millrace.engine.step.sequence import Sequence
from millrace.engine.threads.tasks import TaskThreads
from millrace.schemas.prefix import extend_keys, root_key

_log = logging.getLogger(__name__)


class _Ended(enum.Enum):
    """Outcome of reading an object."""

    READ = "read"
    ABSENT = "absent"
    DAMAGED = "damaged"
    FAILED = "failed"
    NOT_READ = "not read"


class _Object(NamedTuple):
    """Object to read, and the memory for its blocks."""

    last_key: bytes
    places: list[ObjectPlace]


class _Reading:
    """Reading of the objects of a part, by several threads at once.

    The first object that does not arrive ends it, since later blocks cannot be used without it.
    """

    def __init__(self, part: TierPart, objects: list[_Object]) -> None:
        self.part = part
        self.objects = objects
        self.ended = [_Ended.NOT_READ] * len(objects)
        self.num_good = [0] * len(objects)
        self.answer_s: float | None = None
        self.why = ""
        self.begun_s = time.perf_counter()
        self.read_s = 0.0
        self._lock = threading.Lock()
        self._end = len(objects)
        self._num_left = len(objects)

    def is_wanted(self, number: int) -> bool:
        return number < self._end

    def note(self, number: int, ended: _Ended, num_good: int) -> bool:
        """Record the outcome of an object. Return whether it was the last one."""
        with self._lock:
            self.ended[number], self.num_good[number] = ended, num_good
            if ended is not _Ended.READ:
                self._end = min(self._end, number)
            self._num_left -= 1
            self.read_s = time.perf_counter() - self.begun_s
            return not self._num_left


class ObjectTier:
    """Tier that reads blocks of long prompts from an object store. See ``CacheTier``.

    The contents of the store are not known, since other workers write to it all the time. For each
    prompt that is long enough, the tier tries to read, unless the object was absent a moment ago.
    The sequence waits for the result, while others run.
    """

    source: Source = "object"

    def __init__(
        self,
        view: StoreView,
        memory: SlotMemory,
        block_size_tokens: int,
        *,
        monotonic: Callable[[], float],
        threads: TaskThreads,
    ) -> None:
        self._objects = view.objects
        self._known = view.known
        self._circuit = view.circuit
        self._speed = view.speed
        self._min_tokens = view.min_tokens
        self._memory = memory
        self._size = block_size_tokens
        self._monotonic = monotonic
        self._threads = threads
        self._readings: dict[TierPart, _Reading] = {}
        self.num_read_blocks = 0
        self.num_absent = 0
        self.num_failures = 0

    # --- interface of CacheTier ---

    def has(self, sequence: Sequence, _key: bytes, index: int, /) -> bool:
        """Return whether the store may have the block. See ``CacheTier``."""
        if sequence.num_tokens < self._min_tokens or self._circuit.is_open:
            return False
        end = (index // self._objects.num_blocks + 1) * self._objects.num_blocks
        keys = self._keys_of(sequence)
        return end <= len(keys) and not self._known.is_absent(keys[end - 1])

    def _keys_of(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of all full blocks of a sequence.

        An object is named by its last block. That may be the last block of the prompt, which is not
        itself looked up.
        """
        num_blocks = sequence.num_tokens // self._size
        keys = sequence.block_keys
        if len(keys) < num_blocks:
            extend_keys(
                keys,
                root_key(sequence.request.cache_salt),
                sequence.token_ids,
                num_blocks=num_blocks,
                block_size_tokens=self._size,
            )
        return keys

    def brings_s(self, _sequence: Sequence, num_blocks: int, /) -> float:
        """Predict the seconds of a read. See ``CacheTier``."""
        return self._speed.brings_s(num_blocks * self._objects.block_bytes)

    def begin(self, part: TierPart, on_done: Callable[[TierPart], None]) -> None:
        """Start to read a part. See ``CacheTier``."""
        reading = self._readings[part] = _Reading(part, self._objects_of(part))
        for number in range(len(reading.objects)):
            self._threads.submit(partial(self._read, reading, number, on_done))

    def _objects_of(self, part: TierPart) -> list[_Object]:
        keys, num_blocks = part.sequence.block_keys, self._objects.num_blocks
        index_of = {key: index for index, key in enumerate(keys)}
        wanted = [
            (index_of[key], key, slot) for key, slot in zip(part.keys, part.host_slots, strict=True)
        ]
        return [
            _Object(
                keys[(run + 1) * num_blocks - 1],
                [
                    ObjectPlace(index % num_blocks, key, self._memory.pieces(slot))
                    for index, key, slot in blocks
                ],
            )
            for run, blocks in groupby(wanted, key=lambda one: one[0] // num_blocks)
        ]

    # --- reading threads ---

    def _read(self, reading: _Reading, number: int, on_done: Callable[[TierPart], None]) -> None:
        one = reading.objects[number]
        ended, num_good = _Ended.FAILED, 0
        begin_s = time.perf_counter()
        try:
            if self._circuit.is_open or not (
                reading.is_wanted(number) and self._monotonic() < reading.part.deadline_s
            ):
                ended = _Ended.NOT_READ
            else:
                num_good = self._objects.read(one.last_key, one.places)
                ended = _Ended.READ if num_good == len(one.places) else _Ended.DAMAGED
        except NoObjectError:
            ended = _Ended.ABSENT
            reading.answer_s = time.perf_counter() - begin_s
        except ObjectStoreError as error:
            reading.why = str(error)
        finally:
            if reading.note(number, ended, num_good):
                on_done(reading.part)

    # --- results ---

    def finish(self, part: TierPart, _now_s: float) -> None:
        """Record the result of a read. See ``CacheTier``."""
        reading = self._readings.pop(part)
        part.num_good = self._num_leading(reading)
        for one, ended in zip(reading.objects, reading.ended, strict=True):
            self._note(one.last_key, ended, reading.why)
        if reading.answer_s is not None:
            self._speed.note_answer(reading.answer_s)
        first = reading.ended[0]
        if first in (_Ended.READ, _Ended.ABSENT):
            self._speed.note_look(found=first is _Ended.READ)
        num_good = sum(reading.num_good)
        self.num_read_blocks += num_good
        if num_good:
            self._speed.note_bytes(num_good * self._objects.block_bytes, reading.read_s)

    @staticmethod
    def _num_leading(reading: _Reading) -> int:
        """Count the good blocks before the first bad one."""
        num_leading = 0
        for one, num_good in zip(reading.objects, reading.num_good, strict=True):
            num_leading += num_good
            if num_good < len(one.places):
                break
        return num_leading

    def _note(self, last_key: bytes, ended: _Ended, why: str) -> None:
        match ended:
            case _Ended.READ:
                self._known.note_present(last_key)
                self._circuit.note_success()
            case _Ended.ABSENT:
                self.num_absent += 1
                self._known.note_absent(last_key)
                self._circuit.note_success()
            case _Ended.DAMAGED:
                self.num_failures += 1
                self._known.note_damaged(last_key)
                _log.warning("an object of the KV cache is damaged; its tokens are computed")
            case _Ended.FAILED:
                self.num_failures += 1
                self._circuit.note_failure(why)
            case _Ended.NOT_READ:
                """There is nothing to note."""
