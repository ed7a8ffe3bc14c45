"""Operations of a decoder step on a CPU: in plain torch or by compiled kernels."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.devices.cpu.attention import (
    PrefillChunk,
    TorchAttention,
    TorchAttentionMetadata,
)
from millrace.engine.kernels.cpu import HEAD_DIMS, WIDTH_MULTIPLE, CpuKernels
from millrace.engine.kernels.operations import HeadNorms, Linear, Rotation
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.registry.checkpoints.checkpoint import ModelConfig


class TorchMetadata(NamedTuple):
    """Metadata of a step: ``cosines``, signed ``sines`` [num_tokens, 1, head_dim], heads' dtype."""

    cosines: torch.Tensor
    sines: torch.Tensor
    attention: TorchAttentionMetadata


class TorchOperations:
    """Operations in torch, for any device and any shape. The residual stream is float32."""

    has_wide_residual = True

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
        dtype = torch.promote_types(rows.dtype, torch.float32)
        normed = F.rms_norm(rows.to(dtype), weight.shape, weight.to(dtype), self._epsilon)
        return normed.to(weight.dtype)

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


class CpuMetadata(NamedTuple):
    """Metadata of a step for the compiled kernels.

    ``slots`` is int64 [num_tokens], the slot of each row's key and value. ``tables``, ``starts``
    and ``lengths`` describe the single-token rows, see ``CpuKernels.decode_attention``. ``chunks``
    holds the other rows by window.
    """

    rotation: Rotation
    slots: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    chunks: dict[int | None, list[PrefillChunk]]


class CpuOperations:
    """Operations by the compiled kernels.

    Single-token rows attend directly over the paged cache. Chunks use torch's attention, which
    multiplies matrices faster. The residual stream is float32.
    """

    has_wide_residual = True

    def __init__(self, attention: TorchAttention, kernels: CpuKernels, *, epsilon: float) -> None:
        self.attention = attention
        self._kernels = kernels
        self._epsilon = epsilon
        num_layers = len(attention.windows)
        self._caches = [attention.paged(layer) for layer in range(num_layers)]

    def prepare(self, batch: FlatBatch, rotation: Rotation) -> CpuMetadata:
        single, several = batch.ranges[: batch.num_single], batch.ranges[batch.num_single :]
        tables, starts, lengths = self.tables(single)
        return CpuMetadata(
            Rotation(rotation.cosines.contiguous(), rotation.sines.contiguous()),
            self.attention.slots(batch.ranges),
            tables,
            starts,
            lengths,
            self.attention.chunks(several),
        )

    def tables(self, ranges: list[QueryRange]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tables, starts and lengths of the ranges' sequences.

        See ``CpuKernels.decode_attention``. Lengths include the new tokens.
        """
        tables, starts, lengths = array("i"), array("q"), array("i")
        for query in ranges:
            starts.append(len(tables))
            lengths.append(query.num_context_tokens + query.num_tokens)
            tables.extend(query.block_table)
        if not ranges:
            none = torch.empty(0, dtype=torch.int32)
            return none, none.long(), none
        return (
            torch.frombuffer(tables, dtype=torch.int32),
            torch.frombuffer(starts, dtype=torch.int64),
            torch.frombuffer(lengths, dtype=torch.int32),
        )

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(rows, weight, self._epsilon)

    def add_norm(
        self, total: torch.Tensor, rows: torch.Tensor, linear: Linear, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = linear.plus(total, rows)
        return total, self.rms_norm(total, weight)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.swiglu(gate_up)

    def attend(
        self, layer: int, heads: torch.Tensor, norms: HeadNorms | None, metadata: CpuMetadata
    ) -> torch.Tensor:
        attention = self.attention
        cache = self._caches[layer]
        window = attention.windows[layer]
        self._kernels.rotate_store(
            heads, *metadata.rotation, norms, self._epsilon, cache, metadata.slots
        )
        num_queries = attention.num_heads
        attended = heads.new_empty(heads.shape[0], num_queries, heads.shape[2])
        if len(metadata.lengths):
            self._kernels.decode_attention(
                heads,
                cache,
                metadata.tables,
                metadata.starts,
                metadata.lengths,
                attended,
                window=window,
            )
        chunks = metadata.chunks[window]
        if chunks:
            keys_values = heads[:, num_queries:]
            attention.attend_chunks(layer, heads[:, :num_queries], keys_values, attended, chunks)
        return attended.flatten(1)


def suits(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the compiled kernels compute models of this shape."""
    widths = [config.hidden_size, config.intermediate_size]
    if config.experts is not None:
        widths.append(config.experts.intermediate_size)
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and config.head_dim in HEAD_DIMS
        and all(width % WIDTH_MULTIPLE == 0 for width in widths)
    )
