"""Matrices of an adapter in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.registry.checkpoints.adapters.outline import AdapterOutline
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import (
    WHOLE,
    WHOLE_MODEL,
    Shard,
    attention_slices,
    mlp_slices,
    stage_layers,
)
from millrace.schemas.errors import AdapterError, CheckpointError


class LowRank(NamedTuple):
    """Low-rank update of one matrix of a checkpoint.

    The update is ``b`` [num_outputs, rank], scale included, times ``a`` [rank, num_inputs].
    """

    a: torch.Tensor
    b: torch.Tensor


class LayerSlices(NamedTuple):
    """Low-rank updates of each product of a layer, one per matrix of the product.

    The products are queries, keys and values; the attention's output; gate and up; the MLP's
    output. An entry is None where the adapter has no matrix.
    """

    qkv: tuple[LowRank | None, LowRank | None, LowRank | None]
    output: tuple[LowRank | None]
    gate_up: tuple[LowRank | None, LowRank | None]
    down: tuple[LowRank | None]


def read_adapter_weights(
    outline: AdapterOutline, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE_MODEL
) -> list[LayerSlices]:
    """Read all layers of an adapter in ``dtype`` to the CPU.

    With a ``shard`` of the whole model's ``config``, read only its share: the layers of its stage,
    and its outputs of ``b`` or its inputs of ``a``.

    Raises:
        AdapterError: The file cannot be read, or a number is not finite.
    """
    layers = stage_layers(config, shard)
    found: dict[tuple[int, str], LowRank] = {}
    parts = attention_slices(config, shard) | mlp_slices(config.intermediate_size, shard)
    try:
        for matrix in outline.matrices:
            if matrix.layer not in layers:
                continue
            part = parts.get(matrix.target, WHOLE)
            a_shape, b_shape = (matrix.rank, matrix.num_inputs), (matrix.num_outputs, matrix.rank)
            a = outline.tensors.load(matrix.a, a_shape, columns=part.columns)
            b = outline.tensors.load(matrix.b, b_shape, rows=part.rows)
            if part.columns is not None:
                a = contiguous(a)
            # Copies, so that the file can be closed.
            low_rank = LowRank(
                _finite(converted(a, dtype), matrix.a, outline),
                _finite(converted(b, dtype, matrix.scale), matrix.b, outline),
            )
            found[matrix.layer, matrix.target] = low_rank
    except CheckpointError as error:
        raise AdapterError(error.message) from error

    def slices(layer: int) -> LayerSlices:
        def of(target: str) -> LowRank | None:
            return found.get((layer, target))

        return LayerSlices(
            (of("q_proj"), of("k_proj"), of("v_proj")),
            (of("o_proj"),),
            (of("gate_proj"), of("up_proj")),
            (of("down_proj"),),
        )

    return [slices(layer) for layer in layers]


def _finite(made: torch.Tensor | None, name: str, outline: AdapterOutline) -> torch.Tensor:
    if made is None:
        raise AdapterError(f"{outline.folder}: tensor {name} has numbers that are not finite.")
    return made


# torch splits operations on 32,768 elements or more among threads.
_PIECE_ELEMENTS = 16_384


def converted(tensor: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor | None:
    """Return a copy of a contiguous ``tensor`` times ``scale``, rounded once.

    Returns None if a number is not finite.
    """
    out = torch.empty(tensor.shape, dtype=dtype)
    for source, target in zip(_pieces(tensor), _pieces(out), strict=True):
        target.copy_(source if scale == 1.0 else source.float() * scale)
        if not target.isfinite().all():
            return None
    return out


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a view whose first dimension is also the outermost in memory."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    rows = max(1, _PIECE_ELEMENTS // max(1, tensor[0].numel()))
    for source, target in zip(torch.split(tensor, rows), torch.split(out, rows), strict=True):
        target.copy_(source)
    return out


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1), _PIECE_ELEMENTS)
