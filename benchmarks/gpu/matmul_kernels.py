"""Linear maps of few rows, which are bound by reading the weights, and of many rows."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from benchmarks.gpu.kernel_cases import Call, Cost, Tiles, Work, measure, returned
from benchmarks.gpu.scope import Scope
from millrace.engine.kernels.gpu import matmul
from millrace.engine.kernels.gpu.matmul import gated_linear, linear
from millrace.engine.kernels.gpu.reference.operations import swiglu
from millrace.engine.kernels.gpu.tiles import ProductTile


class Shape(NamedTuple):
    """Shape of a weight [num_outputs, num_inputs]."""

    name: str
    num_outputs: int
    num_inputs: int

    def cost(self, num_rows: int, itemsize: int) -> Cost:
        elements = (
            self.num_outputs * self.num_inputs
            + num_rows * self.num_inputs
            + num_rows * self.num_outputs
        )
        return Cost(elements * itemsize, 2 * num_rows * self.num_outputs * self.num_inputs)


_LLAMA_SHAPES = (
    Shape("qkv", 6144, 4096),
    Shape("output", 4096, 4096),
    Shape("gate_up", 28_672, 4096),
    Shape("down", 4096, 14_336),
    Shape("head", 128_256, 4096),
)
_SMOKE_SHAPES = (Shape("qkv", 96, 64),)
_SKINNY_ROWS = (1, 4, 16)


def run(scope: Scope) -> None:
    for num_rows in _SKINNY_ROWS[:2] if scope.smoke else _SKINNY_ROWS:
        for shape in _SMOKE_SHAPES if scope.smoke else _LLAMA_SHAPES:
            _measure(scope, f"linear {shape.name}, {num_rows} rows", shape, num_rows, "bytes")
        _measure_gated(scope, num_rows)
    shape = _SMOKE_SHAPES[0] if scope.smoke else _LLAMA_SHAPES[2]
    # For many rows, the tables choose tiles by the rows of a chunk.
    for num_rows in (20,) if scope.smoke else (64, 256) if scope.sweeps else (256, 8192):
        name = f"linear {shape.name}, {num_rows} rows"
        _measure(scope, name, shape, num_rows, "flops")
        _measure(scope, f"{name}, fixed order", shape, num_rows, "flops", fixed=True)


def _measure_gated(scope: Scope, num_rows: int) -> None:
    """Measure the gate-up projection with the gate in the same pass."""
    shape = _SMOKE_SHAPES[0] if scope.smoke else _LLAMA_SHAPES[2]
    measure(
        scope,
        f"gated linear {shape.name}, {num_rows} rows",
        partial(_gated_linear, scope, shape, num_rows),
        shape.cost(num_rows, scope.dtype.itemsize),
        rival=partial(_torch_gated_linear, scope, shape, num_rows),
        tiles=_tiles(num_rows, "gated_product_tile"),
    )


def _measure(
    scope: Scope, name: str, shape: Shape, num_rows: int, bound_by: str, *, fixed: bool = False
) -> None:
    measure(
        scope,
        name,
        partial(_linear, scope, shape, num_rows, fixed),
        shape.cost(num_rows, scope.dtype.itemsize),
        bound_by=bound_by,
        rival=partial(torch_linear, scope, shape, num_rows),
        tiles=None if fixed else _tiles(num_rows, "product_tile"),
    )


def _tiles(num_rows: int, function: str) -> Tiles:
    if num_rows == 1:
        others = product((1,), (2, 4, 8, 16, 32), (256, 512), (4, 8), (2, 4, 6))
    elif num_rows in _SKINNY_ROWS:
        others = product((16,), (16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (3, 4, 5))
    else:
        row_counts = (16, 32, 64) if num_rows <= 64 else (64, 128)
        others = product(row_counts, (64, 128, 256), (64, 128), (4, 8), (3, 4))
    return Tiles(matmul, [ProductTile(*tile) for tile in others], lambda tile: {function: tile})


def _operands(
    scope: Scope, shape: Shape, num_rows: int, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows and weights of a model's scale."""
    normal, std = partial(scope.normal, scope.generator(number)), shape.num_inputs**-0.5
    rows = normal(num_rows, shape.num_inputs)
    return rows, normal(shape.num_outputs, shape.num_inputs, std=std)


def _linear(scope: Scope, shape: Shape, num_rows: int, fixed: bool, number: int) -> Work:
    rows, weight = _operands(scope, shape, num_rows, number)
    return Work(
        lambda: linear(rows, weight, None, fixed=fixed),
        returned,
        lambda: [rows.float() @ weight.float().t()],
    )


def _gated_linear(scope: Scope, shape: Shape, num_rows: int, number: int) -> Work:
    rows, weight = _operands(scope, shape, num_rows, number)
    return Work(
        lambda: gated_linear(rows, weight),
        returned,
        lambda: [swiglu(rows.float() @ weight.float().t())],
    )


def _torch_gated_linear(scope: Scope, shape: Shape, num_rows: int, number: int) -> Call:
    rows, weight = _operands(scope, shape, num_rows, number)

    def run() -> torch.Tensor:
        gate, up = F.linear(rows, weight).chunk(2, -1)
        return F.silu(gate).mul_(up)

    return run


def torch_linear(scope: Scope, shape: Shape, num_rows: int, number: int) -> Call:
    rows, weight = _operands(scope, shape, num_rows, number)
    return lambda: F.linear(rows, weight)
