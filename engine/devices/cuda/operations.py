"""Operations of a decoder step by the kernels of a device."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import torch

from millrace.engine.kernels.gpu.device_batch import CacheLayer, DeviceBatch
from millrace.engine.kernels.gpu.kernel_set import Attention, KernelSet
from millrace.engine.kernels.operations import HeadNorms, Linear, Rotation


class DeviceMetadata(NamedTuple):
    """Metadata of a step; ``work`` is how attention divides it."""

    batch: DeviceBatch
    rotation: Rotation
    work: Any


class DeviceOperations:
    """Operations by a device's kernels; none reads values, so that a step can be recorded.

    The residual stream has the weights' dtype.
    """

    has_wide_residual = False

    def __init__(
        self,
        kernels: KernelSet,
        attention: Attention,
        caches: Rows[CacheLayer],
        *,
        num_heads: int,
        epsilon: float,
    ) -> None:
        self._kernels = kernels
        self._attention = attention
        self._caches = caches
        self._num_heads = num_heads
        self._epsilon = epsilon

    def prepare(self, batch: DeviceBatch, rotation: Rotation) -> DeviceMetadata:
        return DeviceMetadata(batch, rotation, self._attention.prepare(batch))

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(rows, weight, self._epsilon)

    def add_norm(
        self, total: torch.Tensor, rows: torch.Tensor, linear: Linear, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return total, self._kernels.add_rms_norm(total, linear(rows), weight, self._epsilon)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.swiglu(gate_up)

    def attend(
        self, layer: int, heads: torch.Tensor, norms: HeadNorms | None, metadata: DeviceMetadata
    ) -> torch.Tensor:
        batch, rotation, work = metadata
        cache = self._caches[layer]
        self._kernels.rotate_store(heads, *rotation, norms, self._epsilon, cache, batch.slots)
        queries = heads[:, : self._num_heads]
        attended = heads.new_empty(queries.shape)
        self._attention.attend(layer, queries, cache, batch, work, attended)
        return attended.flatten(1)
