"""Copies between the KV cache and memory of the host."""

from __future__ import annotations

import torch

from workers.engine.kv_cache import KVCache


class PlainHostMemory:
    """One allocation in the layout of the cache, made when it is first written to.

    ``store`` and ``load`` copy runs of neighbouring blocks at once, in all layers: about 5 us a
    run beside the bytes.
    """

    def __init__(self, cache: KVCache, host_bytes: int) -> None:
        layers, _, *block = cache.data.shape
        self.block_bytes = cache.data[:, 0].numel() * cache.data.itemsize
        self.num_slots = host_bytes // self.block_bytes
        self._cache = cache.data
        self._shape = (layers, self.num_slots, *block)
        self._slots: torch.Tensor | None = None

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks of the cache into slots. Raises RuntimeError if there is no memory."""
        if self._slots is None:
            # Pages are taken as they are written; a GPU copies only to and from locked ones.
            self._slots = torch.empty(
                self._shape, dtype=self._cache.dtype, pin_memory=self._cache.is_cuda
            )
        _copy_blocks(self._cache, blocks, self._slots, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy slots into blocks of the cache."""
        assert self._slots is not None, "nothing was stored"
        _copy_blocks(self._slots, slots, self._cache, blocks)


@torch.inference_mode()
def _copy_blocks(
    source: torch.Tensor, sources: list[int], target: torch.Tensor, targets: list[int]
) -> None:
    pairs = sorted(zip(targets, sources, strict=True))
    start = 0
    for end in range(1, len(pairs) + 1):
        if end < len(pairs):
            (before_to, before_from), (to, from_) = pairs[end - 1], pairs[end]
            if to == before_to + 1 and from_ == before_from + 1:
                continue
        (to, from_), count = pairs[start], end - start
        target[:, to : to + count].copy_(source[:, from_ : from_ + count])
        start = end
