"""Slice of a quantized weight for a rank."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from millrace.engine.quantization.weight import Activations, QuantizedWeight
from millrace.registry.checkpoints.shard import Slice
from millrace.schemas.errors import CheckpointError


def sliced(weight: QuantizedWeight, part: Slice, module: str) -> QuantizedWeight | torch.Tensor:
    """Copy the ``part`` of a ``weight`` [num_outputs, num_inputs] of ``module``.

    Its values equal those of the same part of the whole. A slice of inputs that begins or ends
    within a group has smaller groups with the scale of the original group. With inputs in an order
    of their own, neighbours belong to any group and share no scale: such a slice is wide, in
    float32. Rows that are rounded by a scale of their own get it from this rank's inputs alone,
    which rounds a little finer than the whole would.

    Raises:
        CheckpointError: Inputs are rounded in groups that the slice does not keep.
    """
    columns = part.columns
    if columns is not None and weight.order is not None:
        if not weight.activations.may_stay_wide:
            raise CheckpointError(
                f"The inputs of {module} are rounded ({weight.activations.value}) and reordered, "
                "which several ranks do not support. Use a checkpoint without activation order, or "
                "set engine.tensor_parallel to 1."
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
        offsets=None if weight.offsets is None else weight.offsets[own].clone(),
    )


def _columns(weight: QuantizedWeight, columns: range, module: str) -> QuantizedWeight:
    codes = _own_columns(weight.codes, columns)
    if weight.scales.shape[1] == 1:
        return replace(weight, codes=codes, group_inputs=len(columns))
    size = _group_inputs(weight, columns)
    if weight.activations is Activations.FLOAT8_GROUP and size != weight.group_inputs:
        raise CheckpointError(
            f"The inputs of {module} are rounded in groups of {weight.group_inputs}, but a rank's "
            f"inputs begin at {columns.start} and end at {columns.stop}. Set "
            "engine.tensor_parallel to a number of ranks that divides the groups."
        )
    groups = torch.arange(columns.start, columns.stop, size) // weight.group_inputs
    groups = groups.to(weight.scales.device)
    return replace(
        weight,
        codes=codes,
        scales=weight.scales.index_select(1, groups),
        zeros=None if weight.zeros is None else weight.zeros.index_select(1, groups),
        offsets=None if weight.offsets is None else weight.offsets.index_select(1, groups),
        group_inputs=size,
    )


def _own_columns(matrix: torch.Tensor, columns: range) -> torch.Tensor:
    own = matrix[:, columns.start : columns.stop]
    return own.clone(memory_format=torch.contiguous_format)


def _group_inputs(weight: QuantizedWeight, columns: range) -> int:
    """Return the largest group size that divides the weight's groups and fills the slice.

    The last group of the weight may be shorter.
    """
    size = math.gcd(weight.group_inputs, columns.start)
    return size if columns.stop == weight.num_inputs else math.gcd(size, columns.stop)
