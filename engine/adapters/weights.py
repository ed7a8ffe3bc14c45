"""An adapter's matrices in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.adapters.pieces import contiguous, converted
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
    """What is added to one matrix of a checkpoint: ``b`` [num_outputs, rank], with the scale in it,
    times ``a`` [rank, num_inputs]."""

    a: torch.Tensor
    b: torch.Tensor


class LayerSlices(NamedTuple):
    """What is added to each product of a layer, by the matrices that the product is made of:
    queries, keys and values; the attention's output; gates and what they gate; the MLP's output.
    None where the adapter has nothing."""

    qkv: tuple[LowRank | None, LowRank | None, LowRank | None]
    output: tuple[LowRank | None]
    gate_up: tuple[LowRank | None, LowRank | None]
    down: tuple[LowRank | None]


def read_adapter_weights(
    outline: AdapterOutline, config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE_MODEL
) -> list[LayerSlices]:
    """All layers in ``dtype``, on the CPU; or of the whole model's ``config`` what a ``shard``
    multiplies with: the layers of its stage, of ``b`` its outputs, or of ``a`` its inputs. Raises
    AdapterError for a file that cannot be read, and for numbers that are not finite."""
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
            # Copies, so that the file may go.
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
