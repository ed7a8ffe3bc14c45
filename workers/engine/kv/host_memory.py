"""Copies between the KV cache and memory of the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from millrace.workers.engine.kv.cache import KVCache, pieces_of
from millrace.workers.engine.kv.disk_cache import SlotMemory
from millrace.workers.engine.kv.host_cache import HostMemory
from millrace.workers.engine.threads import leave_core

# A thread more is worth starting for so many blocks.
_BLOCKS_PER_THREAD = 16


class SharedHostMemory(HostMemory, SlotMemory, Protocol):
    """Memory for blocks that other threads may fill and read as well."""


def host_memory_of(cache: KVCache, host_bytes: int) -> SharedHostMemory:
    """Memory for blocks of a cache, wherever that lies. Raises ConfigError if a device's cannot be
    had."""
    if not cache.blocks.is_cuda:
        return PlainHostMemory(cache, host_bytes)
    # Needs Triton, which there is for Linux only.
    from millrace.workers.engine.kv.locked_host_memory import LockedHostMemory

    return LockedHostMemory(cache, host_bytes)


class PlainHostMemory:
    """For a cache in the host's memory, too: one allocation in its layout, made when it is first
    written to.

    ``store`` and ``load`` copy runs of neighbouring blocks at once, in all layers: about 5 us a
    run beside the bytes.
    """

    bytes_per_s = None
    is_settled = True

    def __init__(self, cache: KVCache, host_bytes: int) -> None:
        num_layers, _, layer_bytes = cache.blocks.shape
        self.block_bytes = num_layers * layer_bytes
        self.num_slots = host_bytes // self.block_bytes
        self._cache = cache.blocks
        self._shape = (num_layers, self.num_slots, layer_bytes)
        self._slots: torch.Tensor | None = None

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks of the cache into slots. Raises RuntimeError if there is no memory."""
        _copy_blocks(self._cache, blocks, self._memory(), slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy slots into blocks of the cache."""
        assert self._slots is not None, "nothing was stored"
        _copy_blocks(self._slots, slots, self._cache, blocks)

    def pieces(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, a piece for each layer."""
        return pieces_of(self._memory(), slot)

    def _memory(self) -> torch.Tensor:
        if self._slots is None:
            self._slots = torch.empty(self._shape, dtype=torch.uint8)  # takes pages when written
        return self._slots


class _Run(NamedTuple):
    """``length`` neighbouring blocks."""

    source: int
    target: int
    length: int


def _copy_blocks(
    source: torch.Tensor, sources: list[int], target: torch.Tensor, targets: list[int]
) -> None:
    runs = _runs(sources, targets)
    # Plain threads, each with runs of its own: torch would split every copy over its threads, and
    # with anything else on the machine these wait for one another 2 MiB at a time.
    copy = partial(_copy_runs, source.numpy(), target.numpy())
    num_threads = min(torch.get_num_threads(), len(sources) // _BLOCKS_PER_THREAD + 1)
    shares = _shares(runs, len(sources), num_threads)
    if len(shares) == 1:
        copy(shares[0])
        return
    with ThreadPoolExecutor(len(shares), initializer=leave_core) as threads:
        for _ in threads.map(copy, shares):
            pass


def _runs(sources: list[int], targets: list[int]) -> list[_Run]:
    """The pairs by rising target, with neighbours that stay neighbours taken together."""
    runs: list[_Run] = []
    for to, from_ in sorted(zip(targets, sources, strict=True)):
        if runs:
            source, target, count = runs[-1]
            if to == target + count and from_ == source + count:
                runs[-1] = _Run(source, target, count + 1)
                continue
        runs.append(_Run(from_, to, 1))
    return runs


def _shares(runs: list[_Run], num_blocks: int, num_shares: int) -> list[list[_Run]]:
    """The runs, cut where need be, in shares of about equally many blocks."""
    size = -(-num_blocks // num_shares)
    shares: list[list[_Run]] = [[]]
    room = size
    for source, target, count in runs:
        while count:
            if room == 0:
                shares.append([])
                room = size
            part = min(count, room)
            shares[-1].append(_Run(source, target, part))
            source, target, count, room = source + part, target + part, count - part, room - part
    return shares


def _copy_runs(
    source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], runs: list[_Run]
) -> None:
    for from_, to, count in runs:
        target[:, to : to + count] = source[:, from_ : from_ + count]
