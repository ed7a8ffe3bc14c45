"""Where what sequences found in the KV cache had been."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from millrace.engine.step.sequence import Sequence


@dataclass(slots=True)
class TierHits:
    """Tokens that admitted sequences found, by the tier that their blocks came from: another
    worker's engine, the disk or an object store, for which somebody waited, or host memory. What
    was found besides was on the device."""

    block_size_tokens: int
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_object_tokens: int = 0
    num_peer_tokens: int = 0

    def note(
        self, sequence: Sequence, keys: SequenceOf[bytes], blocks: SequenceOf[int | None]
    ) -> None:
        """A sequence found blocks with these keys; None is one that is not on the device."""
        is_newcomer = not sequence.started  # one that was preempted finds what it left
        pulled = sequence.pulled_keys if is_newcomer else frozenset()
        read = sequence.disk_keys if is_newcomer else frozenset()
        stored = sequence.object_keys if is_newcomer else frozenset()
        for key, block in zip(keys, blocks, strict=True):
            if key in pulled:
                self.num_peer_tokens += self.block_size_tokens
            elif key in read:
                self.num_disk_tokens += self.block_size_tokens
            elif key in stored:
                self.num_object_tokens += self.block_size_tokens
            elif block is None:
                self.num_host_tokens += self.block_size_tokens
