"""Products with quantized weights beside those of bfloat16, and beside torch's own of 8 bits."""

from __future__ import annotations

from functools import partial
from itertools import product as every
from typing import NamedTuple

import torch

from benchmarks.gpu.expert_kernels import MIXTURE, Mixture
from benchmarks.gpu.kernel_cases import Call, Cost, Tiles, Work, measure, returned
from benchmarks.gpu.kernels import rehearse
from benchmarks.gpu.matmul_kernels import Shape, torch_linear
from benchmarks.gpu.scope import Scope
from benchmarks.gpu_compile.quantized import Layout
from millrace.engine.kernels.gpu import experts
from millrace.engine.kernels.gpu.quantized import product
from millrace.engine.kernels.gpu.quantized.experts import quantized_products
from millrace.engine.kernels.gpu.quantized.library import library_linear
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.product import quantized_linear
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.quantized.tiles import QuantizedTile, RowProductTile
from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices, sort_by_expert
from millrace.engine.quantization.device_linear import packed, rounded
from millrace.engine.quantization.weight import Activations, QuantizedWeight

_FLOAT8 = torch.float8_e4m3fn
_SCALE_BYTES = 2  # of scales that bfloat16 holds, and of zeros


def _num_bytes(layout: Layout, num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a weight."""
    num_groups = num_inputs // (layout.group_inputs or num_inputs)
    of_groups = num_groups * _SCALE_BYTES * (1 + layout.zeroed)
    return num_outputs * (num_inputs * layout.bits // 8 + of_groups)


def _drawn(
    scope: Scope, layout: Layout, generator: torch.Generator, num_outputs: int, num_inputs: int
) -> QuantizedWeight:
    """Return a weight of random codes."""
    most = 1 << layout.bits - 1
    group_inputs = layout.group_inputs or num_inputs
    size = (num_outputs, num_inputs // group_inputs)
    integers = partial(torch.randint, -most, most, generator=generator, device=scope.device)
    if layout.is_float8:
        wide = scope.normal(generator, num_outputs, num_inputs, std=64.0)
        codes = wide.clamp(-448, 448).to(_FLOAT8)
    else:
        codes = integers((num_outputs, num_inputs), dtype=torch.int8)
    scales = torch.rand(size, device=scope.device, generator=generator) + 0.5
    return QuantizedWeight(
        codes=codes,
        scales=(scales / (most * num_inputs**0.5)).bfloat16().float(),
        group_inputs=group_inputs,
        bits=layout.bits,
        zeros=integers(size, dtype=torch.int16) if layout.zeroed else None,
        activations=layout.activations,
    )


_INT8_ROWS = Layout("int8 by int8", 8, activations=Activations.INT8_TOKEN)
_FLOAT8_ROWS = Layout("float8 by float8", 8, activations=Activations.FLOAT8_TOKEN, is_float8=True)
_LAYOUTS = (
    Layout("int4", 4, 128),
    Layout("int4 with zeros", 4, 128, zeroed=True),
    Layout("int8", 8),
    Layout("float8", 8, is_float8=True),
    _INT8_ROWS,
    _FLOAT8_ROWS,
    Layout("float8 blocks", 8, 128, Activations.FLOAT8_GROUP, is_float8=True),
)
_LLAMA_SHAPES = (Shape("qkv", 6144, 4096), Shape("gate_up", 28_672, 4096))
_SMOKE_SHAPES = (Shape("qkv", 96, 256),)
_ROWS = (1, 8, 32, 128)
_SMOKE_ROWS = (1, 3)
# Least number of rows that torch's int8 product accepts.
_INT_MM_ROWS = 17
# Rows whose product takes about as long as reading an 8-bit weight; more are bound by FLOPs.
_FEW_ROWS = 64


def run(scope: Scope) -> None:
    rehearse(scope, measure_all)
    measure_all(scope)


def measure_all(scope: Scope) -> None:
    for shape in _SMOKE_SHAPES if scope.smoke else _LLAMA_SHAPES:
        for num_rows in _SMOKE_ROWS if scope.smoke else _ROWS:
            for layout in _layouts(scope):
                _measure_linear(scope, layout, shape, num_rows)
            if scope.smoke or num_rows >= _INT_MM_ROWS:
                _measure_torch(scope, shape, num_rows)
    for layout in _LAYOUTS[:1] if scope.smoke else (_LAYOUTS[0], _LAYOUTS[3], _LAYOUTS[-1]):
        _measure_experts(scope, layout)


def _layouts(scope: Scope) -> list[Layout]:
    """Return the layouts; without a GPU, only those with wide or int8 rows.

    Triton's interpreter halves some numbers that it rounds to float8.
    """
    known = (Activations.WIDE, Activations.INT8_TOKEN)
    return [layout for layout in _LAYOUTS if not scope.smoke or layout.activations in known]


def _cost(scope: Scope, layout: Layout, shape: Shape, num_rows: int) -> Cost:
    row_elements = num_rows * (shape.num_inputs + shape.num_outputs)
    weight_bytes = _num_bytes(layout, shape.num_outputs, shape.num_inputs)
    return Cost(
        weight_bytes + row_elements * scope.dtype.itemsize,
        2 * num_rows * shape.num_outputs * shape.num_inputs,
    )


def _bound_by(num_rows: int) -> str:
    return "bytes" if num_rows <= _FEW_ROWS else "flops"


def _measure_linear(scope: Scope, layout: Layout, shape: Shape, num_rows: int) -> None:
    """Measure rounding of the rows and the product, beside torch's with wide weights."""
    measure(
        scope,
        f"{layout.name} {shape.name}, {num_rows} rows",
        partial(_linear, scope, layout, shape, num_rows),
        _cost(scope, layout, shape, num_rows),
        bound_by=_bound_by(num_rows),
        rival=partial(torch_linear, scope, shape, num_rows),
        tiles=_tiles(num_rows),
    )


def _tiles(num_rows: int) -> Tiles:
    candidates: list[QuantizedTile | RowProductTile]
    if num_rows == 1:
        others = every((4, 8, 16), (1, 2, 4, 8), (4, 8), (2, 4, 6))
        candidates = [RowProductTile(*tile) for tile in others]
        return Tiles(product, candidates, lambda tile: {"row_product_tile": tile})
    if num_rows <= 16:
        others = every((16,), (16, 32, 64), (2, 4), (4, 6, 8, 10))
    else:
        others = every((32,) if num_rows <= 32 else (64, 128), (64, 128), (4, 8), (3, 4, 6))
    candidates = [QuantizedTile(*tile) for tile in others]
    return Tiles(product, candidates, lambda tile: {"quantized_tile": tile})


def _measure_torch(scope: Scope, shape: Shape, num_rows: int) -> None:
    """Measure torch's products for the two layouts that it supports."""
    products = [(_INT8_ROWS, "_int_mm", _int_mm)]
    if scope.dtype is torch.bfloat16:
        products.append((_FLOAT8_ROWS, "_scaled_mm", _scaled_mm))
    for layout, name, make in products:
        measure(
            scope,
            f"{layout.name} {shape.name}, {num_rows} rows, torch.{name}",
            partial(make, scope, layout, shape, num_rows),
            _cost(scope, layout, shape, num_rows),
            bound_by=_bound_by(num_rows),
        )


class _Operands(NamedTuple):
    rows: torch.Tensor
    weight: QuantizedWeight
    packed: PackedWeight

    @property
    def rounded(self) -> RoundedRows:
        result = rounded(self.rows, self.weight.rounding)
        assert isinstance(result, RoundedRows), "rows of this layout are rounded"
        return result

    def expected(self) -> list[torch.Tensor]:
        rows = self.weight.rounding(self.rows.float())
        return [rows @ self.weight.values().t()]


def _operands(scope: Scope, layout: Layout, shape: Shape, num_rows: int, number: int) -> _Operands:
    generator = scope.generator(number)
    rows = scope.normal(generator, num_rows, shape.num_inputs)
    weight = _drawn(scope, layout, generator, shape.num_outputs, shape.num_inputs)
    return _Operands(rows, weight, packed(weight))


def _linear(scope: Scope, layout: Layout, shape: Shape, num_rows: int, number: int) -> Work:
    operands = _operands(scope, layout, shape, num_rows, number)

    def run() -> torch.Tensor:
        rows = rounded(operands.rows, operands.weight.rounding)
        return quantized_linear(rows, operands.packed, dtype=scope.dtype)

    return Work(run, returned, operands.expected)


def _int_mm(scope: Scope, layout: Layout, shape: Shape, num_rows: int, number: int) -> Work:
    operands = _operands(scope, layout, shape, num_rows, number)
    scales = operands.weight.scales.view(1, -1)

    def run() -> torch.Tensor:
        rows = operands.rounded
        sums = torch._int_mm(rows.codes, operands.packed.codes.t())
        return (sums * rows.scales.view(-1, 1) * scales).to(scope.dtype)

    return Work(run, returned, operands.expected)


def _scaled_mm(scope: Scope, layout: Layout, shape: Shape, num_rows: int, number: int) -> Work:
    operands = _operands(scope, layout, shape, num_rows, number)
    scales = operands.weight.scales.view(1, -1)
    return Work(
        lambda: library_linear(operands.rounded, operands.packed, scales, None, torch.bfloat16),
        returned,
        operands.expected,
    )


_SMOKE_MIXTURE = Mixture(3, 4, 2, 128, 128)


def _measure_experts(scope: Scope, layout: Layout) -> None:
    mixture = _SMOKE_MIXTURE if scope.smoke else MIXTURE
    num_rows, num_experts, num_chosen, hidden, inner = mixture
    num_bytes = _num_bytes(layout, 2 * inner, hidden) + _num_bytes(layout, hidden, inner)
    row_elements = num_rows * num_chosen * (2 * inner + inner + hidden) + num_rows * hidden
    measure(
        scope,
        f"{layout.name}, {num_chosen} of {num_experts} experts, {num_rows} rows",
        partial(_experts, scope, layout, mixture),
        Cost(
            num_experts * num_bytes + row_elements * scope.dtype.itemsize,
            6 * num_rows * num_chosen * hidden * inner,
        ),
        rival=partial(_wide_experts, scope, mixture),
    )


def _experts(scope: Scope, layout: Layout, mixture: Mixture, number: int) -> Work:
    """Return both products of sorted choices, with independent rows."""
    num_rows, num_experts, num_chosen, hidden, inner = mixture
    generator = scope.generator(number)
    gates = [_drawn(scope, layout, generator, 2 * inner, hidden) for _ in range(num_experts)]
    downs = [_drawn(scope, layout, generator, hidden, inner) for _ in range(num_experts)]
    gate_stack = PackedWeight.stacked([packed(weight) for weight in gates])
    down_stack = PackedWeight.stacked([packed(weight) for weight in downs])
    rows = scope.normal(generator, num_rows, hidden)
    between = scope.normal(generator, num_rows * num_chosen, inner)
    weights, choices = _choices(scope, generator, mixture)
    dtype = scope.dtype

    def written(_: torch.Tensor | None) -> list[torch.Tensor]:
        return [results["gate_up"], results["down"]]

    results: dict[str, torch.Tensor] = {}

    def run() -> None:
        results["gate_up"] = quantized_products(
            rounded(rows, gates[0].rounding),
            gate_stack,
            choices,
            num_chosen=num_chosen,
            dtype=dtype,
        )
        results["down"] = quantized_products(
            rounded(between, downs[0].rounding),
            down_stack,
            choices,
            num_chosen=num_chosen,
            weights=weights,
            dtype=dtype,
        )

    def expected() -> list[torch.Tensor]:
        wide_gates = torch.stack([weight.values() for weight in gates])
        wide_downs = torch.stack([weight.values() for weight in downs])
        wide_rows, wide_between = rows.float(), between.float()
        return [
            reference_experts.products(
                gates[0].rounding(wide_rows), wide_gates, choices, num_chosen=num_chosen
            ),
            reference_experts.products(
                downs[0].rounding(wide_between),
                wide_downs,
                choices,
                num_chosen=num_chosen,
                weights=weights,
            ),
        ]

    return Work(run, written, expected)


def _wide_experts(scope: Scope, mixture: Mixture, number: int) -> Call:
    """Return the same products with wide weights, by their own kernel."""
    num_rows, num_experts, num_chosen, hidden, inner = mixture
    generator = scope.generator(number)
    normal = partial(scope.normal, generator)
    gates = normal(num_experts, 2 * inner, hidden, std=hidden**-0.5)
    downs = normal(num_experts, hidden, inner, std=inner**-0.5)
    rows, between = normal(num_rows, hidden), normal(num_rows * num_chosen, inner)
    weights, choices = _choices(scope, generator, mixture)

    def run() -> None:
        experts.products(rows, gates, choices, num_chosen=num_chosen)
        experts.products(between, downs, choices, num_chosen=num_chosen, weights=weights)

    return run


def _choices(
    scope: Scope, generator: torch.Generator, mixture: Mixture
) -> tuple[torch.Tensor, SortedChoices]:
    scores = scope.normal(generator, mixture.num_rows, mixture.num_experts)
    weights, chosen = experts.route(scores, mixture.num_chosen, normalized=True)
    return weights, sort_by_expert(chosen, mixture.num_experts)
