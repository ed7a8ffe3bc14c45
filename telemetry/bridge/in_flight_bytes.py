"""How much may be put into a Kafka that forgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from aiokafka import TopicPartition

from millrace.telemetry.bridge.producer_batch import Landed
from millrace.telemetry.kafka.kafka import Offsets

# The embedded cluster drops a partition's oldest messages past 5 MB. The outbox holds the rest.
_MOST_BYTES = 3_000_000


class Backlog:
    """The bytes of each partition that the sink has not stored yet."""

    def __init__(self, num_behind: Callable[[Offsets], int]) -> None:
        self._num_behind = num_behind
        self._loads: dict[TopicPartition, deque[Landed]] = {}

    def add(self, landed: Mapping[TopicPartition, Landed]) -> None:
        for partition, load in landed.items():
            self._loads.setdefault(partition, deque()).append(load)

    @property
    def is_full(self) -> bool:
        """Whether some partition holds as much as it may."""
        return any(self._held_bytes(partition) >= _MOST_BYTES for partition in self._loads)

    def _held_bytes(self, partition: TopicPartition) -> int:
        loads = self._loads[partition]
        while loads and self._num_behind({partition: loads[0].end}) == 0:
            loads.popleft()
        return sum(load.num_bytes for load in loads)
