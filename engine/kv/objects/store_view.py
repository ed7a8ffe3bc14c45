"""An object store as one engine knows it."""

from __future__ import annotations

from collections.abc import Callable

from millrace.engine.kv.objects.block_objects import BlockObjects
from millrace.engine.kv.objects.circuit import Circuit
from millrace.engine.kv.objects.known_objects import KnownObjects

# What a store is taken to be like before something was measured, and what a later measurement
# counts.
_ASSUMED_WAIT_S, _ASSUMED_BYTES_PER_S, _ASSUMED_FOUND = 0.03, 1e9, 0.5
_NEWEST_WEIGHT = 0.2
# Where next to nothing was found lately, long prompts are still worth a look.
_LEAST_FOUND = 0.1


class StoreSpeed:
    """How long a store takes to answer, how fast blocks come then, and which share of the looks
    found some."""

    def __init__(self) -> None:
        self.wait_s = _ASSUMED_WAIT_S
        self.bytes_per_s = _ASSUMED_BYTES_PER_S
        self._is_measured = False
        self._found = _ASSUMED_FOUND

    def brings_s(self, num_bytes: int) -> float:
        """What so many bytes are predicted to take. That a look may be in vain counts as waiting
        once more for each that is, so that looking pays where this is less than computing."""
        return self.wait_s / max(self._found, _LEAST_FOUND) + num_bytes / self.bytes_per_s

    def note_answer(self, wait_s: float) -> None:
        """A request that brought nothing took so long."""
        self.wait_s += _NEWEST_WEIGHT * (wait_s - self.wait_s)

    def note_bytes(self, num_bytes: int, read_s: float) -> None:
        measured = num_bytes / max(read_s - self.wait_s, read_s / 2, 1e-9)
        weight = _NEWEST_WEIGHT if self._is_measured else 1.0
        self.bytes_per_s += weight * (measured - self.bytes_per_s)
        self._is_measured = True

    def note_look(self, *, found: bool) -> None:
        self._found += _NEWEST_WEIGHT * (found - self._found)


class StoreView:
    """The objects of an engine's blocks, those of prefixes of at least ``min_tokens``: which were
    there lately, how fast they come, and whether the store is to be asked now."""

    def __init__(
        self, objects: BlockObjects, min_tokens: int, monotonic: Callable[[], float]
    ) -> None:
        self.objects = objects
        self.min_tokens = min_tokens
        self.known = KnownObjects(monotonic)
        self.circuit = Circuit(monotonic)
        self.speed = StoreSpeed()
