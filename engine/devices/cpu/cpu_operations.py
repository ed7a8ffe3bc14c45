"""The operations of a decoder step by compiled kernels, on a CPU."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from millrace.engine.devices.cpu.attention import PrefillChunk, TorchAttention
from millrace.engine.kernels.cpu import HEAD_DIMS, WIDTH_MULTIPLE, CpuKernels, PagedCache
from millrace.engine.kernels.operations import HeadNorms, Linear, Rotation
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.registry.checkpoints.checkpoint import ModelConfig


class CpuMetadata(NamedTuple):
    """``slots``: int64 [num_tokens], where each row's key and value go. ``tables``, ``starts`` and
    ``lengths`` are those of the single-token rows, see ``CpuKernels.decode_attention``; ``chunks``
    are the other rows, by window."""

    rotation: Rotation
    slots: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    chunks: dict[int | None, list[PrefillChunk]]


class CpuOperations:
    """Single-token rows attend straight over the paged cache; chunks by torch's own attention,
    which multiplies matrices faster."""

    def __init__(self, attention: TorchAttention, kernels: CpuKernels, *, epsilon: float) -> None:
        self._attention = attention
        self._kernels = kernels
        self._epsilon = epsilon
        num_layers = len(attention.windows)
        self._caches = [attention.paged(layer) for layer in range(num_layers)]

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache."""
        return self._attention.block_size

    def cache(self, layer: int) -> PagedCache:
        """The KV cache of a layer."""
        return self._caches[layer]

    def window(self, layer: int) -> int | None:
        """How many tokens a token of a layer sees, itself the last; None is all."""
        return self._attention.windows[layer]

    def prepare(self, batch: FlatBatch, rotation: Rotation) -> CpuMetadata:
        single, several = batch.ranges[: batch.num_single], batch.ranges[batch.num_single :]
        tables, starts, lengths = self.tables(single)
        return CpuMetadata(
            Rotation(rotation.cosines.contiguous(), rotation.sines.contiguous()),
            self.slots(batch.ranges),
            tables,
            starts,
            lengths,
            self._attention.chunks(several),
        )

    def slots(self, ranges: list[QueryRange]) -> torch.Tensor:
        """Where each row's key and value go: int64 [num_tokens]."""
        return self._attention.slots(ranges)

    def tables(self, ranges: list[QueryRange]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tables, starts and lengths of the ranges' sequences, see
        ``CpuKernels.decode_attention``; a length counts the new tokens."""
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
        attention = self._attention
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
    """Whether the kernels compute models of this shape."""
    widths = [config.hidden_size, config.intermediate_size]
    if config.experts is not None:
        widths.append(config.experts.intermediate_size)
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and config.head_dim in HEAD_DIMS
        and all(width % WIDTH_MULTIPLE == 0 for width in widths)
    )
