"""Products with quantized weights beside those of bfloat16, and beside torch's own of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from benchmarks.gpu.kernel_cases import Call, Cost, Work, measure, returned
from benchmarks.gpu.kernels import rehearse
from benchmarks.gpu.matmul_kernels import Shape
from benchmarks.gpu.scope import Scope
from millrace.engine.kernels.gpu import experts
from millrace.engine.kernels.gpu.quantized.experts import quantized_products
from millrace.engine.kernels.gpu.quantized.library import library_linear
from millrace.engine.kernels.gpu.quantized.packing import PackedWeight
from millrace.engine.kernels.gpu.quantized.product import (
    quantized_linear,
    tiled_quantized_linear,
)
from millrace.engine.kernels.gpu.quantized.rounding import RoundedRows
from millrace.engine.kernels.gpu.quantized.tiles import QuantizedTile, RowProductTile
from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices, sort_by_expert
from millrace.engine.quantization.device_linear import packed, rounded
from millrace.engine.quantization.weight import Activations, QuantizedWeight

_FLOAT8 = torch.float8_e4m3fn
_SCALE_BYTES = 2  # of scales that bfloat16 holds, and of zeros


class Layout(NamedTuple):
    """Codes of so many bits in groups of so many inputs, 0 for one, and how rows are rounded."""

    name: str
    bits: int
    group_inputs: int = 0
    activations: Activations = Activations.WIDE
    is_float8: bool = False
    zeroed: bool = False

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Of a weight."""
        num_groups = num_inputs // (self.group_inputs or num_inputs)
        of_groups = num_groups * _SCALE_BYTES * (1 + self.zeroed)
        return num_outputs * (num_inputs * self.bits // 8 + of_groups)

    def drawn(
        self, scope: Scope, generator: torch.Generator, num_outputs: int, num_inputs: int
    ) -> QuantizedWeight:
        """A weight of random codes."""
        most = 1 << self.bits - 1
        group_inputs = self.group_inputs or num_inputs
        size = (num_outputs, num_inputs // group_inputs)
        integers = partial(torch.randint, -most, most, generator=generator, device=scope.device)
        if self.is_float8:
            wide = scope.normal(generator, num_outputs, num_inputs, std=64.0)
            codes = wide.clamp(-448, 448).to(_FLOAT8)
        else:
            codes = integers((num_outputs, num_inputs), dtype=torch.int8)
        scales = torch.rand(size, device=scope.device, generator=generator) + 0.5
        return QuantizedWeight(
            codes=codes,
            scales=(scales / (most * num_inputs**0.5)).bfloat16().float(),
            group_inputs=group_inputs,
            bits=self.bits,
            zeros=integers(size, dtype=torch.int16) if self.zeroed else None,
            activations=self.activations,
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
# From which on torch's product of int8 takes rows.
_INT_MM_ROWS = 17
# Rows whose product takes about as long as reading a weight of 8 bits; more are bound by flops.
_FEW_ROWS = 64


def run(scope: Scope) -> None:
    rehearse(scope, measure_all)
    measure_all(scope)


def measure_all(scope: Scope) -> None:
    for shape in shapes(scope):
        for num_rows in row_counts(scope):
            for layout in layouts(scope):
                _measure_linear(scope, layout, shape, num_rows)
            if scope.smoke or num_rows >= _INT_MM_ROWS:
                _measure_torch(scope, shape, num_rows)
    for layout in _LAYOUTS[:1] if scope.smoke else (_LAYOUTS[0], _LAYOUTS[3], _LAYOUTS[-1]):
        _measure_experts(scope, layout)


def shapes(scope: Scope) -> Sequence[Shape]:
    return _SMOKE_SHAPES if scope.smoke else _LLAMA_SHAPES


def row_counts(scope: Scope) -> Sequence[int]:
    return _SMOKE_ROWS if scope.smoke else _ROWS


def layouts(scope: Scope) -> list[Layout]:
    """Without a GPU, those whose rows stay as they are or become int8: Triton's interpreter halves
    some numbers that it rounds to float8."""
    known = (Activations.WIDE, Activations.INT8_TOKEN)
    return [layout for layout in _LAYOUTS if not scope.smoke or layout.activations in known]


def cost_of(scope: Scope, layout: Layout, shape: Shape, num_rows: int) -> Cost:
    row_elements = num_rows * (shape.num_inputs + shape.num_outputs)
    weight_bytes = layout.num_bytes(shape.num_outputs, shape.num_inputs)
    return Cost(
        weight_bytes + row_elements * scope.dtype.itemsize,
        2 * num_rows * shape.num_outputs * shape.num_inputs,
    )


def _bound_by(num_rows: int) -> str:
    return "bytes" if num_rows <= _FEW_ROWS else "flops"


def _measure_linear(scope: Scope, layout: Layout, shape: Shape, num_rows: int) -> None:
    """Rounding of the rows and the product, beside torch's of wide weights."""
    measure(
        scope,
        f"{layout.name} {shape.name}, {num_rows} rows",
        partial(_linear, scope, layout, shape, num_rows),
        cost_of(scope, layout, shape, num_rows),
        bound_by=_bound_by(num_rows),
        rival=partial(_wide_linear, scope, shape, num_rows),
    )


def _measure_torch(scope: Scope, shape: Shape, num_rows: int) -> None:
    """What torch has for the two layouts that it knows."""
    products = [(_INT8_ROWS, "_int_mm", _int_mm)]
    if scope.dtype is torch.bfloat16:
        products.append((_FLOAT8_ROWS, "_scaled_mm", _scaled_mm))
    for layout, name, make in products:
        measure(
            scope,
            f"{layout.name} {shape.name}, {num_rows} rows, torch.{name}",
            partial(make, scope, layout, shape, num_rows),
            cost_of(scope, layout, shape, num_rows),
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
    weight = layout.drawn(scope, generator, shape.num_outputs, shape.num_inputs)
    return _Operands(rows, weight, packed(weight))


def _linear(scope: Scope, layout: Layout, shape: Shape, num_rows: int, number: int) -> Work:
    operands = _operands(scope, layout, shape, num_rows, number)

    def run() -> torch.Tensor:
        rows = rounded(operands.rows, operands.weight.rounding)
        return quantized_linear(rows, operands.packed, dtype=scope.dtype)

    return Work(run, returned, operands.expected)


def tiled_work(
    scope: Scope,
    layout: Layout,
    shape: Shape,
    num_rows: int,
    tile: QuantizedTile | RowProductTile,
    number: int,
) -> Work:
    """The product by a tile of choice, of rows that are rounded before."""
    operands = _operands(scope, layout, shape, num_rows, number)
    rows = rounded(operands.rows, operands.weight.rounding)
    return Work(
        lambda: tiled_quantized_linear(rows, operands.packed, None, None, scope.dtype, tile),
        returned,
        operands.expected,
    )


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
        lambda: library_linear(operands.rounded, operands.packed, scales, None),
        returned,
        operands.expected,
    )


def _wide_linear(scope: Scope, shape: Shape, num_rows: int, number: int) -> Call:
    normal = partial(scope.normal, scope.generator(number))
    rows = normal(num_rows, shape.num_inputs)
    weight = normal(shape.num_outputs, shape.num_inputs, std=shape.num_inputs**-0.5)
    return lambda: F.linear(rows, weight)


class _Mixture(NamedTuple):
    """``num_rows`` rows choose ``num_chosen`` experts each."""

    num_rows: int
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int


# As Qwen3-30B-A3B has them.
_MIXTURE = _Mixture(256, 128, 8, 2048, 768)
_SMOKE_MIXTURE = _Mixture(3, 4, 2, 128, 128)


def _measure_experts(scope: Scope, layout: Layout) -> None:
    mixture = _SMOKE_MIXTURE if scope.smoke else _MIXTURE
    num_rows, num_experts, num_chosen, hidden, inner = mixture
    num_bytes = layout.num_bytes(2 * inner, hidden) + layout.num_bytes(hidden, inner)
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


def _experts(scope: Scope, layout: Layout, mixture: _Mixture, number: int) -> Work:
    """Both products of sorted choices, of rows that do not depend on each other."""
    num_rows, num_experts, num_chosen, hidden, inner = mixture
    generator = scope.generator(number)
    gates = [layout.drawn(scope, generator, 2 * inner, hidden) for _ in range(num_experts)]
    downs = [layout.drawn(scope, generator, hidden, inner) for _ in range(num_experts)]
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


def _wide_experts(scope: Scope, mixture: _Mixture, number: int) -> Call:
    """The same of wide weights, by the kernel for these."""
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
    scope: Scope, generator: torch.Generator, mixture: _Mixture
) -> tuple[torch.Tensor, SortedChoices]:
    scores = scope.normal(generator, mixture.num_rows, mixture.num_experts)
    weights, chosen = experts.route(scores, mixture.num_chosen, normalized=True)
    return weights, sort_by_expert(chosen, mixture.num_experts)
