"""A rank's slice of a quantized weight."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from millrace.engine.quantization.weight import Activations, QuantizedWeight
from millrace.registry.checkpoints.shard import Slice
from millrace.schemas.errors import CheckpointError


def sliced(weight: QuantizedWeight, part: Slice, module: str) -> QuantizedWeight | torch.Tensor:
    """Copies of the ``part`` of a ``weight`` [num_outputs, num_inputs], that of ``module``; its
    values are those of the same part of the whole.

    A slice of inputs that begins or ends within a group has smaller groups, each with the scale of
    the one it was in. Where inputs are in an order of their own, neighbours are of any group and
    have no scale in common: such a slice is wide, in float32. Rows that are rounded by a scale of
    their own have it from this rank's inputs alone: rounded a little finer than the whole would.

    Raises CheckpointError where inputs are rounded in groups that the slice does not keep.
    """
    columns = part.columns
    if columns is not None and weight.order is not None:
        if weight.activations is not Activations.WIDE:
            raise CheckpointError(
                f"The inputs of {module} are rounded ({weight.activations.value}) and in an order "
                "of their own, which is not computed over several ranks: take a checkpoint without "
                "activation order, or set engine.tensor_parallel to 1."
            )
        values = _rows(weight, part.rows).values()
        return _own_columns(values, columns)
    weight = _rows(weight, part.rows)
    return weight if columns is None else _columns(weight, columns, module)


def _rows(weight: QuantizedWeight, rows: range | None) -> QuantizedWeight:
    if rows is None:
        return weight
    own = slice(rows.start, rows.stop)
    return replace(
        weight,
        codes=weight.codes[own].clone(),
        scales=weight.scales[own].clone(),
        zeros=None if weight.zeros is None else weight.zeros[own].clone(),
    )


def _columns(weight: QuantizedWeight, columns: range, module: str) -> QuantizedWeight:
    codes = _own_columns(weight.codes, columns)
    if weight.scales.shape[1] == 1:
        return replace(weight, codes=codes, group_inputs=len(columns))
    size = _group_inputs(weight, columns)
    if weight.activations is Activations.FLOAT8_GROUP and size != weight.group_inputs:
        raise CheckpointError(
            f"The inputs of {module} are rounded in groups of {weight.group_inputs}, and a rank's "
            f"begin at {columns.start} and end at {columns.stop}: set engine.tensor_parallel to a "
            "number of ranks that divides the groups."
        )
    groups = torch.arange(columns.start, columns.stop, size) // weight.group_inputs
    groups = groups.to(weight.scales.device)
    return replace(
        weight,
        codes=codes,
        scales=weight.scales.index_select(1, groups),
        zeros=None if weight.zeros is None else weight.zeros.index_select(1, groups),
        group_inputs=size,
    )


def _own_columns(matrix: torch.Tensor, columns: range) -> torch.Tensor:
    own = matrix[:, columns.start : columns.stop]
    return own.clone(memory_format=torch.contiguous_format)


def _group_inputs(weight: QuantizedWeight, columns: range) -> int:
    """The largest size of groups within the weight's own that fill the slice; but the last of all
    may be shorter."""
    size = math.gcd(weight.group_inputs, columns.start)
    return size if columns.stop == weight.num_inputs else math.gcd(size, columns.stop)
