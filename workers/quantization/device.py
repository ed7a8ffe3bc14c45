"""Products with quantized weights by the kernels of a device."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from millrace.workers.kernels.gpu.quantized.library import (
    library_linear,
    library_takes,
    prefers_library,
)
from millrace.workers.kernels.gpu.quantized.packing import PackedWeight, chunk_of
from millrace.workers.kernels.gpu.quantized.product import quantized_linear
from millrace.workers.kernels.gpu.quantized.rounding import RoundedRows, round_groups, round_rows
from millrace.workers.kernels.operations import Linear, SwiGLU
from millrace.workers.quantization.linear import MakeQuantized
from millrace.workers.quantization.weight import Activations, QuantizedWeight, Rounding

_log = logging.getLogger(__name__)

_INT8 = (Activations.INT8_TOKEN, Activations.INT8_TENSOR)
# From this capability on, compute units know float8.
_FLOAT8_CAPABILITY = (8, 9)


class QuantizedDeviceLinear:
    """A linear map of a weight that ``why_not_packed`` has nothing against. ``bias``:
    [num_outputs]. Rows and results are of ``dtype``.

    ``fixed``: always by one kernel of one order, so that a row's result does not depend on how many
    others there are.
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
        self._bias = bias
        self._dtype = dtype
        self._fixed = fixed
        self._order = weight.order
        self._rounding = weight.rounding
        # float32 [1, num_outputs] where torch may compute this.
        self._library_scales: torch.Tensor | None = None
        is_rounded = weight.activations is not Activations.WIDE
        if is_rounded and not fixed and library_takes(self._weight, dtype):
            self._library_scales = self._weight.scales.float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._multiplied(rows, None)

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the product; ``total`` may be overwritten."""
        return self._multiplied(rows, total)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the product."""
        return swiglu(self(rows))

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


class RoundedLinear:
    """A linear map of rows that are rounded first."""

    def __init__(self, linear: Linear, rounding: Rounding) -> None:
        self._linear = linear
        self._rounding = rounding

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._linear(self._rounding(rows))

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the product; ``total`` may be overwritten."""
        return self._linear.plus(total, self._rounding(rows))

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the product."""
        return self._linear.gated(self._rounding(rows), swiglu)


def quantized_linears(
    product: Callable[[torch.Tensor, torch.Tensor | None], Linear],
    dtype: torch.dtype,
    *,
    fixed: bool,
    has_kernels: bool,
) -> MakeQuantized:
    """Makes linear maps of rows of ``dtype``: by kernels if there are any and they take the weight,
    else by ``product`` of the weight widened to ``dtype``. ``fixed`` as in QuantizedDeviceLinear;
    ``product`` must keep it as well."""
    said: set[str] = set()

    def make(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
        reason = why_not_packed(weight) if has_kernels else "the kernels are the references"
        if reason is None:
            return QuantizedDeviceLinear(weight, bias, dtype, fixed=fixed)
        if reason not in said:
            said.add(reason)
            _log.warning("some quantized weights are widened to %s: %s", dtype, reason)
        linear = product(weight.values().to(dtype), bias)
        if weight.activations is Activations.WIDE:
            return linear
        return RoundedLinear(linear, weight.rounding)

    return make


def why_not_packed(weight: QuantizedWeight) -> str | None:
    """Why the kernels cannot multiply by ``weight``; None if they can."""
    activations = weight.activations
    is_wide = activations is Activations.WIDE
    is_float8 = weight.codes.dtype is torch.float8_e4m3fn
    if not is_wide and weight.bits == 8:
        if is_float8 is (activations in _INT8):
            return f"codes of {weight.codes.dtype} for rows of {activations.value}"
        if weight.zeros is not None:
            return "zeros of 8 bits for rows of 8 bits"
    group_inputs = _group_inputs(weight)
    if activations is Activations.FLOAT8_GROUP and group_inputs:
        if weight.order is not None:
            return "groups of rows in another order"
        if group_inputs & (group_inputs - 1):
            return f"rows rounded in groups of {group_inputs}"
    # Matrix units take 32 neighbours of 8 bits, of wide ones 16; from a byte of two codes, each
    # half.
    least = (16 if is_wide else 32) * (2 if weight.bits == 4 else 1)
    if chunk_of(weight.num_inputs, group_inputs, weight.bits) < least:
        return f"{weight.num_inputs} inputs in groups of {weight.group_inputs}"
    uses_float8 = is_float8 or not (is_wide or activations in _INT8)
    device = weight.codes.device
    if (
        uses_float8
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY
    ):
        return "float8 on a device that does not know it"
    return None


def packed(weight: QuantizedWeight) -> PackedWeight:
    """``weight`` as the kernels read it, on its device."""
    return PackedWeight.of(
        weight.codes,
        weight.scales,
        weight.zeros,
        group_inputs=weight.group_inputs,
        bits=weight.bits,
    )


def rounded(rows: torch.Tensor, rounding: Rounding) -> torch.Tensor | RoundedRows:
    """``rows`` [num_rows, num_inputs] as the kernels multiply them."""
    kind = rounding.activations
    if kind is Activations.WIDE:
        return rows
    if kind is Activations.FLOAT8_GROUP and rows.shape[1] > rounding.group_inputs:
        return round_groups(rows, rounding.group_inputs)
    dtype = torch.int8 if kind in _INT8 else torch.float8_e4m3fn
    return round_rows(rows, dtype, rounding.scale)


def _group_inputs(weight: QuantizedWeight) -> int:
    """0 where there is one group."""
    return weight.group_inputs if weight.scales.shape[1] > 1 else 0
