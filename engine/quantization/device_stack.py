"""Products with stacks of quantized experts by Triton's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.engine.kernels.gpu.quantized.experts import quantized_down, quantized_gate_up
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.quantization.device_linear import packed, rounded
from millrace.engine.quantization.weight import QuantizedWeight


class QuantizedStack:
    """One of the weights of each expert, of one layout. Rows and results are of ``dtype``."""

    def __init__(self, weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> None:
        self._stack = PackedWeight.stacked([packed(weight) for weight in weights])
        self._rounding = weights[0].rounding
        self._dtype = dtype

    @property
    def size(self) -> WeightSize:
        return self._stack.size

    def __len__(self) -> int:
        return len(self._stack)

    def gate_up(
        self, rows: torch.Tensor, choices: SortedChoices, *, num_chosen: int, fixed: bool
    ) -> torch.Tensor:
        """See ``ExpertStack``."""
        return quantized_gate_up(
            rounded(rows, self._rounding),
            self._stack,
            choices,
            num_chosen=num_chosen,
            dtype=self._dtype,
            fixed=fixed,
        )

    def down(
        self, rows: torch.Tensor, choices: SortedChoices, weights: torch.Tensor, *, fixed: bool
    ) -> torch.Tensor:
        """See ``ExpertStack``."""
        return quantized_down(
            rounded(rows, self._rounding),
            self._stack,
            choices,
            weights,
            dtype=self._dtype,
            fixed=fixed,
        )
