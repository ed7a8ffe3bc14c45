"""The operations of a decoder step in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.devices.cpu.attention import TorchAttention, TorchAttentionMetadata
from millrace.engine.kernels.operations import HeadNorms, Linear, Rotation
from millrace.engine.step.batch import FlatBatch


class TorchMetadata(NamedTuple):
    """``cosines`` and signed ``sines``: [num_tokens, 1, head_dim] in the dtype of the heads."""

    cosines: torch.Tensor
    sines: torch.Tensor
    attention: TorchAttentionMetadata


class TorchOperations:
    """Any device, any shape."""

    def __init__(self, attention: TorchAttention, *, epsilon: float) -> None:
        self._attention = attention
        self._epsilon = epsilon

    def prepare(self, batch: FlatBatch, rotation: Rotation) -> TorchMetadata:
        dtype = self._attention.dtype
        cosines, sines = (values.unsqueeze(1) for values in rotation)
        return TorchMetadata(
            torch.cat((cosines, cosines), -1).to(dtype),
            torch.cat((-sines, sines), -1).to(dtype),
            self._attention.prepare(batch),
        )

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, weight.shape, weight, self._epsilon)

    def add_norm(
        self, total: torch.Tensor, rows: torch.Tensor, linear: Linear, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = linear.plus(total, rows)
        return total, self.rms_norm(total, weight)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def attend(
        self, layer: int, heads: torch.Tensor, norms: HeadNorms | None, metadata: TorchMetadata
    ) -> torch.Tensor:
        num_queries = self._attention.num_heads
        num_rotated = num_queries + self._attention.num_kv_heads
        if norms is not None:
            for part, weight in (
                (heads[:, :num_queries], norms.query),
                (heads[:, num_queries:num_rotated], norms.key),
            ):
                part.copy_(self.rms_norm(part, weight))
        rotated = heads[:, :num_rotated]
        other = rotated.roll(rotated.shape[-1] // 2, -1)
        rotated.mul_(metadata.cosines).addcmul_(other, metadata.sines)
        return self._attention.attend(
            layer, heads[:, :num_queries], heads[:, num_queries:], metadata.attention
        )
