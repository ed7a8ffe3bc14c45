"""Stacks of quantized experts on a device: by its kernels if they support the weights.

Functions that need Triton import it themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from millrace.engine.kernels.gpu.kernel_set import ExpertKernels, Stack
from millrace.engine.kernels.gpu.quantized.experts import quantized_products
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.quantization.device import NO_KERNELS, why_not_packed
from millrace.engine.quantization.device_linear import packed, rounded
from millrace.engine.quantization.weight import QuantizedWeight, Rounding
from millrace.schemas.errors import CheckpointError

_log = logging.getLogger(__name__)

# Maker of the products with one of the weights of each expert, all of one shape.
MakeStack = Callable[[Sequence[QuantizedWeight]], Stack]


class QuantizedStack:
    """Stack of one weight of each expert, of one layout; rows and results are of ``dtype``."""

    def __init__(self, weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> None:
        self._stack = PackedWeight.stacked([packed(weight) for weight in weights])
        self._rounding = weights[0].rounding
        self._dtype = dtype

    @property
    def size(self) -> WeightSize:
        return self._stack.size

    def __len__(self) -> int:
        return len(self._stack)

    def products(
        self,
        rows: torch.Tensor,
        choices: SortedChoices,
        *,
        num_chosen: int,
        weights: torch.Tensor | None,
        fixed: bool,
    ) -> torch.Tensor:
        return quantized_products(
            rounded(rows, self._rounding),
            self._stack,
            choices,
            num_chosen=num_chosen,
            dtype=self._dtype,
            weights=weights,
            fixed=fixed,
        )


class RoundedStack:
    """Stack of wide weights [num_experts, num_outputs, num_inputs] that rounds its input rows."""

    def __init__(self, stack: torch.Tensor, rounding: Rounding, kernels: ExpertKernels) -> None:
        self._stack = stack
        self._rounding = rounding
        self._kernels = kernels
        self.size = WeightSize.of(stack)

    def __len__(self) -> int:
        return len(self._stack)

    def products(
        self,
        rows: torch.Tensor,
        choices: SortedChoices,
        *,
        num_chosen: int,
        weights: torch.Tensor | None,
        fixed: bool,
    ) -> torch.Tensor:
        return self._kernels.products(
            self._rounding(rows),
            self._stack,
            choices,
            num_chosen=num_chosen,
            weights=weights,
            fixed=fixed,
        )


def quantized_stacks(kernels: ExpertKernels, dtype: torch.dtype, *, has_kernels: bool) -> MakeStack:
    """Return a maker of stacks for rows of ``dtype``.

    It uses the kernels of quantized weights if there are any and they support the weights; else it
    widens them to ``dtype`` for ``kernels``. It raises CheckpointError for experts whose rows are
    rounded in different ways.
    """
    said: set[str] = set()

    def make(weights: Sequence[QuantizedWeight]) -> Stack:
        rounding = weights[0].rounding
        if any(weight.rounding != rounding for weight in weights):
            raise CheckpointError(
                "the experts of a layer round their inputs in several ways or by several constants "
                f"({rounding.activations.value}), but must share one constant or use dynamic "
                "scales."
            )
        reason = _why_not_stacked(weights) if has_kernels else NO_KERNELS
        if reason is None:
            return QuantizedStack(weights, dtype)
        if reason not in said:
            said.add(reason)
            _log.warning("some quantized experts are widened to %s: %s", dtype, reason)
        stack = torch.stack([weight.values().to(dtype) for weight in weights])
        if rounding.activations.may_stay_wide:
            return stack
        return RoundedStack(stack, rounding, kernels)

    return make


def _why_not_stacked(weights: Sequence[QuantizedWeight]) -> str | None:
    """Return why the kernels cannot multiply by a stack of ``weights``, or None if they can."""
    first = weights[0]
    for weight in weights:
        reason = why_not_packed(weight)
        if reason is not None:
            return reason
        if weight.order is not None:
            return "each expert has inputs in an order of its own"
        if (weight.bits, weight.codes.dtype) != (first.bits, first.codes.dtype) or (
            weight.scales.shape != first.scales.shape
            or (weight.offsets is None) != (first.offsets is None)
        ):
            return "experts of a layer are quantized in several ways"
    return None
