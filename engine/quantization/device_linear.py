"""Products with quantized weights by Triton kernels."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.quantized.library import (
    library_linear,
    library_takes,
    prefers_library,
)
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.product import quantized_linear
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows, round_groups, round_rows
from millrace.engine.kernels.operations import Linear
from millrace.engine.quantization.weight import Activations, QuantizedWeight, Rounding

_PACKED_BITS, _INT4_ZERO = 4, 8


class QuantizedDeviceLinear(Linear):
    """Linear map of a weight that ``device.why_not_packed`` accepts.

    ``bias`` is [num_outputs]. Rows and results are of ``dtype``. With ``fixed`` it is
    batch-invariant: one kernel with one order of summation, so that a row's result does not depend
    on the number of rows.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        fixed: bool,
    ) -> None:
        self._weight = packed(weight)
        self.size = self._weight.size
        self._bias = bias
        self._dtype = dtype
        self._fixed = fixed
        self._order = weight.order
        self._rounding = weight.rounding
        # float32 [1, num_outputs] if torch may compute this.
        self._library_scales: torch.Tensor | None = None
        is_rounded = not weight.activations.may_stay_wide
        if is_rounded and not fixed and library_takes(self._weight, dtype):
            self._library_scales = self._weight.scales.float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._multiplied(rows, None)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._multiplied(rows, total)

    def _multiplied(self, rows: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        operand = rounded(rows, self._rounding)
        if (
            self._library_scales is not None
            and isinstance(operand, RoundedRows)
            and prefers_library(len(rows))
        ):
            result = library_linear(operand, self._weight, self._library_scales, self._bias)
            return result if total is None else total.add_(result)
        return quantized_linear(
            operand,
            self._weight,
            self._bias,
            residual=total,
            dtype=self._dtype,
            fixed=self._fixed,
        )


def packed(weight: QuantizedWeight) -> PackedWeight:
    """Return ``weight`` in the kernels' layout, on its device."""
    codes, offsets = weight.codes, weight.offsets
    if offsets is not None and weight.bits == _PACKED_BITS and weight.code_zero == 0:
        # The kernels' codes are signed.
        codes, offsets = codes - _INT4_ZERO, offsets + weight.scales * _INT4_ZERO
    return PackedWeight.of(
        codes,
        weight.scales,
        weight.zeros,
        offsets,
        group_inputs=weight.group_inputs,
        bits=weight.bits,
    )


def rounded(rows: torch.Tensor, rounding: Rounding) -> torch.Tensor | RoundedRows:
    """Return ``rows`` [num_rows, num_inputs] rounded for the kernels."""
    kind = rounding.activations
    if kind.may_stay_wide:
        return rows
    if kind is Activations.FLOAT8_GROUP and rows.shape[1] > rounding.group_inputs:
        return round_groups(rows, rounding.group_inputs)
    is_int8 = kind in (Activations.INT8_TOKEN, Activations.INT8_TENSOR)
    dtype = torch.int8 if is_int8 else torch.float8_e4m3fn
    return round_rows(rows, dtype, rounding.scale)
