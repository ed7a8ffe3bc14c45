"""Linear maps of quantized weights on a device: by its kernels if they support the weight.

Functions that need Triton import it themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from millrace.engine.kernels.gpu.quantized.packing import chunk_of
from millrace.engine.kernels.operations import Linear, SwiGLU
from millrace.engine.quantization.linear import MakeQuantized
from millrace.engine.quantization.weight import Activations, QuantizedWeight, Rounding

_log = logging.getLogger(__name__)

_INT8 = (Activations.INT8_TOKEN, Activations.INT8_TENSOR)
NO_KERNELS = "the engine's kernels are torch's"
# Compute units support float8 from this capability on.
_FLOAT8_CAPABILITY = (8, 9)


class RoundedLinear(Linear):
    """Linear map that rounds its input rows first."""

    def __init__(self, linear: Linear, rounding: Rounding) -> None:
        self.size = linear.size
        self._linear = linear
        self._rounding = rounding

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs]."""
        return self._linear(self._rounding(rows))

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the product; may overwrite ``total``."""
        return self._linear.plus(total, self._rounding(rows))

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """Return ``swiglu`` of the product."""
        return self._linear.gated(self._rounding(rows), swiglu)


def quantized_linears(
    product: Callable[[torch.Tensor, torch.Tensor | None], Linear],
    dtype: torch.dtype,
    *,
    fixed: bool,
    has_kernels: bool,
) -> MakeQuantized:
    """Return a maker of linear maps for rows of ``dtype``.

    It uses the kernels if there are any and they support the weight, else ``product`` of the weight
    widened to ``dtype``. ``fixed`` is as in QuantizedDeviceLinear, and ``product`` must respect it,
    too.
    """
    said: set[str] = set()

    def make(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
        reason = why_not_packed(weight) if has_kernels else NO_KERNELS
        if reason is None:
            from millrace.engine.quantization.device_linear import QuantizedDeviceLinear

            return QuantizedDeviceLinear(weight, bias, dtype, fixed=fixed)
        if reason not in said:
            said.add(reason)
            _log.warning("some quantized weights are widened to %s: %s", dtype, reason)
        linear = product(weight.values().to(dtype), bias)
        if weight.activations.may_stay_wide:
            return linear
        return RoundedLinear(linear, weight.rounding)

    return make


def why_not_packed(weight: QuantizedWeight) -> str | None:
    """Return why the kernels cannot multiply by ``weight``, or None if they can."""
    activations = weight.activations
    is_wide = activations.may_stay_wide
    is_float8 = weight.codes.dtype is torch.float8_e4m3fn
    if not is_wide and weight.bits == 8:
        if is_float8 is (activations in _INT8):
            return f"codes of {weight.codes.dtype} for rows of {activations.value}"
        if weight.zeros is not None:
            return "zeros of 8 bits for rows of 8 bits"
    if weight.offsets is not None and (weight.zeros is not None or not is_wide):
        return f"offsets beside zeros or for rows of {activations.value}"
    group_inputs = _group_inputs(weight)
    if activations is Activations.FLOAT8_GROUP and group_inputs:
        if weight.order is not None:
            return "groups of rows in another order"
        if group_inputs & (group_inputs - 1):
            return f"rows rounded in groups of {group_inputs}"
    # Matrix units take 32 neighbours of 8 bits, or 16 of wide rows. A byte of two codes gives one
    # to each half.
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
        return "float8 on a device that does not support it"
    return None


def _group_inputs(weight: QuantizedWeight) -> int:
    """Return the inputs of a group, or 0 for a single group without offsets."""
    has_one = weight.scales.shape[1] == 1 and weight.offsets is None
    return 0 if has_one else weight.group_inputs
