"""Products with quantized weights of every layout, by every tile, on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.gpu_compile.compiling import Compilation
from millrace.engine.kernels.gpu.quantized.experts import quantized_products
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.product import quantized_linear
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.sorted_choices import sort_by_expert
from millrace.engine.quantization.device_linear import packed, rounded
from millrace.engine.quantization.weight import Activations, QuantizedWeight

_META = torch.device("meta")
_FLOAT8 = torch.float8_e4m3fn
_HIDDEN = 4096


class Layout(NamedTuple):
    """Layout: bits of codes, inputs of a group (0 for a single group), and rounding of rows."""

    name: str
    bits: int
    group_inputs: int = 0
    activations: Activations = Activations.WIDE
    is_float8: bool = False
    zeroed: bool = False
    has_offsets: bool = False


LAYOUTS = (
    Layout("int4", 4, 128),
    Layout("int4 zeros", 4, 128, zeroed=True),
    Layout("int4 groups of 32", 4, 32),
    Layout("int4 offsets", 4, 32, Activations.INT16_GROUP, has_offsets=True),
    Layout("int4 channels", 4, 0),
    Layout("int4, int8 rows", 4, 128, Activations.INT8_TOKEN),
    Layout("int4 zeros, float8 rows", 4, 128, Activations.FLOAT8_TOKEN, zeroed=True),
    Layout("int8", 8, 0),
    Layout("int8 groups, zeros", 8, 128, zeroed=True),
    Layout("int8 groups of 32", 8, 32, Activations.INT16_GROUP),
    Layout("int8, int8 rows", 8, 0, Activations.INT8_TOKEN),
    Layout("int8, int8 rows of one scale", 8, 0, Activations.INT8_TENSOR),
    Layout("float8", 8, 0, is_float8=True),
    Layout("float8 blocks", 8, 128, is_float8=True),
    Layout("float8, float8 rows", 8, 0, Activations.FLOAT8_TOKEN, is_float8=True),
    Layout("float8 blocks, groups of rows", 8, 128, Activations.FLOAT8_GROUP, is_float8=True),
)
_OUTPUTS = (1024, 4096, 28_672)
# Fewest and most rows of each tile: odd numbers, and multiples of 16.
_ROWS = (1, 2, 15, 16, 17, 32, 33, 64, 65, 512, 513, 8192)
_CHOICES = (1, 33, 1000, 8192)
_NUM_EXPERTS, _NUM_CHOSEN = 16, 2


def compile_quantized(compilation: Compilation, names: Sequence[str] | None) -> None:
    """Compile every kernel of products with quantized weights, and of the rounding of rows.

    ``names`` selects layouts; None selects all.
    """
    chosen = [layout for layout in LAYOUTS if not names or layout.name in names]
    with compilation.instead_of_launching(), torch.inference_mode():
        for layout in chosen:
            # float32 has one tile for all, and serves comparisons.
            for dtype, outputs in ((torch.bfloat16, _OUTPUTS), (torch.float32, _OUTPUTS[1:2])):
                for num_outputs in outputs:
                    compilation.user = f"{layout.name}, {dtype}, {num_outputs} outputs"
                    _linears(layout, dtype, num_outputs)
            compilation.user = f"{layout.name}, experts"
            _experts(layout, torch.bfloat16)


def _weight(layout: Layout, num_outputs: int) -> QuantizedWeight:
    group_inputs = layout.group_inputs or _HIDDEN
    size = (num_outputs, _HIDDEN // group_inputs)
    codes_dtype = _FLOAT8 if layout.is_float8 else torch.int8
    return QuantizedWeight(
        codes=torch.empty(num_outputs, _HIDDEN, dtype=codes_dtype, device=_META),
        scales=torch.empty(size, device=_META),
        group_inputs=group_inputs,
        bits=layout.bits,
        zeros=torch.empty(size, dtype=torch.int16, device=_META) if layout.zeroed else None,
        activations=layout.activations,
        activation_scale=0.1 if layout.activations.is_static else None,
        offsets=torch.empty(size, device=_META) if layout.has_offsets else None,
    )


def _linears(layout: Layout, dtype: torch.dtype, num_outputs: int) -> None:
    weight = _weight(layout, num_outputs)
    made = replace(packed(weight), scales=packed(weight).scales.to(dtype))
    for num_rows in _ROWS:
        # With all additions, which take the most registers.
        operand = _rows(weight, num_rows, dtype)
        bias = torch.empty(num_outputs, dtype=dtype, device=_META)
        total = torch.empty(num_rows, num_outputs, dtype=dtype, device=_META)
        for fixed in (False, True):
            quantized_linear(operand, made, bias, residual=total, dtype=dtype, fixed=fixed)


def _experts(layout: Layout, dtype: torch.dtype) -> None:
    weight = _weight(layout, 1536)
    stack = PackedWeight.stacked([packed(weight)] * _NUM_EXPERTS)
    for num_rows in _CHOICES:
        size = (num_rows, _NUM_CHOSEN)
        choices = sort_by_expert(torch.empty(size, dtype=torch.int16, device=_META), _NUM_EXPERTS)
        weights = torch.empty(size, device=_META)
        operand = _rows(weight, num_rows, dtype)
        inner = _rows(weight, num_rows * _NUM_CHOSEN, dtype)
        for fixed in (False, True):
            quantized_products(
                operand, stack, choices, num_chosen=_NUM_CHOSEN, dtype=dtype, fixed=fixed
            )
            quantized_products(
                inner,
                stack,
                choices,
                num_chosen=_NUM_CHOSEN,
                weights=weights,
                dtype=dtype,
                fixed=fixed,
            )


def _rows(weight: QuantizedWeight, num_rows: int, dtype: torch.dtype) -> torch.Tensor | RoundedRows:
    rows = torch.empty(num_rows, _HIDDEN, dtype=dtype, device=_META)
    return rounded(rows, weight.rounding)
