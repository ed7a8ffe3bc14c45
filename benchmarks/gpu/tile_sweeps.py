"""Which tile shapes the sweep tries, of which kernels, on which inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu import attention_kernels, matmul_kernels, quantized_kernels, row_kernels
from benchmarks.gpu.attention_kernels import Case
from benchmarks.gpu.kernel_cases import BF16_ERROR, FP8_ERROR, Work
from benchmarks.gpu.matmul_kernels import Shape
from benchmarks.gpu.quantized_kernels import Layout
from benchmarks.gpu.scope import Scope
from millrace.engine.kernels.gpu import attention, attention_tiles, heads, rows, tiles
from millrace.engine.kernels.gpu.attention_tiles import AttentionTile
from millrace.engine.kernels.gpu.quantized.tiles import (
    QuantizedTile,
    RowProductTile,
    quantized_tile,
    row_product_tile,
)
from millrace.engine.kernels.gpu.tiles import HeadTile, ProductTile, RowTile
from millrace.engine.quantization.weight import Activations

Tile = AttentionTile | HeadTile | ProductTile | QuantizedTile | RowProductTile | RowTile


class Sweep(NamedTuple):
    """One kernel on one shape. ``make(tile, number)`` makes a work of inputs number 0, 1, …;
    ``using(tile)`` has the kernel's wrapper take a tile while it is entered. ``present`` is the
    tables' own choice. ``amount`` of ``unit`` is done by a run."""

    name: str
    present: Tile
    candidates: Sequence[Tile]
    make: Callable[[Tile, int], Work]
    using: Callable[[Tile], AbstractContextManager[object]]
    bytes_moved: int
    amount: float
    unit: str
    tolerance: float = BF16_ERROR


def sweeps(scope: Scope) -> Iterator[Sweep]:
    """All of them, or a few with two candidates each in a smoke run."""
    for sweep in (*_attention(scope), *_products(scope), *_rows(scope), *_quantized(scope)):
        others = [tile for tile in sweep.candidates if tile != sweep.present]
        yield sweep._replace(candidates=others[:1] if scope.smoke else others)


def _attention(scope: Scope) -> Iterator[Sweep]:
    cases = attention_kernels.cases(smoke=scope.smoke)
    for case in cases:
        cost = attention_kernels.cost_of(scope, case)
        head_dim, group = case.heads.head_dim, case.heads.num_heads // case.heads.num_kv_heads
        make = partial(attention_kernels.work, scope, case)
        is_decode = max(case.num_rows) == 1 and not case.deterministic
        yield Sweep(
            name=case.name,
            present=_decode_present(scope, case)
            if is_decode
            else attention_tiles.prefill_tile(
                *(head_dim, group, scope.dtype, _cache_dtype(scope, case)),
                deterministic=case.deterministic,
            ),
            candidates=_decode_candidates(scope, case) if is_decode else _prefill_candidates(group),
            make=lambda _, number, make=make: make(number),  # type: ignore[misc]
            using=_decoding_by if is_decode else partial(_patched, attention, "prefill_tile"),
            bytes_moved=cost.bytes_moved,
            amount=cost.bytes_moved / 1e9 if is_decode else cost.flops / 1e12,
            unit="GB/s" if is_decode else "TFLOP/s",
            tolerance=FP8_ERROR if case.fp8 else BF16_ERROR,
        )


def _cache_dtype(scope: Scope, case: Case) -> torch.dtype:
    return torch.float8_e4m3fn if case.fp8 else scope.dtype


def _decode_present(scope: Scope, case: Case) -> AttentionTile:
    group = case.heads.num_heads // case.heads.num_kv_heads
    return attention_tiles.decode_tile(case.heads.head_dim, group, _cache_dtype(scope, case))


def _decode_candidates(scope: Scope, case: Case) -> list[Tile]:
    present = _decode_present(scope, case)
    return [
        AttentionTile(row_count, tokens, num_warps, num_stages)
        for row_count in sorted({present.rows, attention_tiles.padded(1), 64})
        for tokens, num_warps, num_stages in product((32, 64, 128), (4, 8), (2, 3, 4, 5))
        if row_count >= case.heads.num_heads // case.heads.num_kv_heads
    ]


def _prefill_candidates(group: int) -> list[Tile]:
    return [
        AttentionTile(max(row_count, attention_tiles.padded(group)), *others)
        for row_count in (64, 128)
        for others in product((32, 64, 128), (4, 8), (2, 3, 4))
    ]


@contextmanager
def _decoding_by(tile: Tile) -> Iterator[None]:
    """How the sequences are cut depends on the tile too."""
    assert isinstance(tile, AttentionTile)
    with ExitStack() as stack:
        stack.enter_context(_patched(attention, "decode_tile", tile))
        stack.enter_context(_patched(attention, "decode_tokens", tile.tokens))
        yield


def _patched(module: object, function: str, choice: object) -> AbstractContextManager[object]:
    return patch.object(module, function, lambda *_, **__: choice)


def _products(scope: Scope) -> Iterator[Sweep]:
    shapes = matmul_kernels.shapes(smoke=scope.smoke)
    few = (1, 4) if scope.smoke else matmul_kernels.SKINNY_ROWS
    many = (20,) if scope.smoke else (64, 256)
    for shape in shapes:
        for num_rows in few:
            yield _product(scope, shape, num_rows, _skinny_candidates(num_rows), "GB/s")
    gated = shapes[min(2, len(shapes) - 1)]
    for num_rows in few:
        yield _product(scope, gated, num_rows, _skinny_candidates(num_rows), "GB/s", gated=True)
    for num_rows in many:
        yield _product(scope, shapes[0], num_rows, _tiled_candidates(num_rows), "TFLOP/s")


def _product(
    scope: Scope,
    shape: Shape,
    num_rows: int,
    candidates: Sequence[Tile],
    unit: str,
    *,
    gated: bool = False,
) -> Sweep:
    itemsize = scope.dtype.itemsize
    cost = shape.cost(num_rows, itemsize)
    width = shape.num_outputs // (1 + gated)
    table = tiles.gated_product_tile if gated else tiles.product_tile
    return Sweep(
        name=f"{'gated ' * gated}linear {shape.name}, {num_rows} rows",
        present=table(num_rows, width, shape.num_inputs, itemsize),
        candidates=candidates,
        make=partial(matmul_kernels.tiled_work, scope, shape, num_rows, gated),
        using=nullcontext,
        bytes_moved=cost.bytes_moved,
        amount=cost.bytes_moved / 1e9 if unit == "GB/s" else cost.flops / 1e12,
        unit=unit,
    )


def _skinny_candidates(num_rows: int) -> list[Tile]:
    if num_rows == 1:
        return [
            ProductTile(1, *others)
            for others in product((2, 4, 8, 16, 32), (256, 512), (4, 8), (2, 4, 6))
        ]
    return [
        ProductTile(16, *others)
        for others in product((16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (3, 4, 5))
    ]


def _tiled_candidates(num_rows: int) -> list[Tile]:
    row_counts = (16, 32, 64) if num_rows <= 64 else (64, 128)
    return [
        ProductTile(*others)
        for others in product(row_counts, (64, 128, 256), (64, 128), (4, 8), (3, 4))
    ]


def _quantized(scope: Scope) -> Iterator[Sweep]:
    for layout, shape, num_rows in product(
        quantized_kernels.layouts(scope),
        quantized_kernels.shapes(scope),
        quantized_kernels.row_counts(scope),
    ):
        cost = quantized_kernels.cost_of(scope, layout, shape, num_rows)
        make = partial(quantized_kernels.tiled_work, scope, layout, shape, num_rows)
        yield Sweep(
            name=f"quantized {layout.name} {shape.name}, {num_rows} rows",
            present=_quantized_present(scope, layout, shape, num_rows),
            candidates=_quantized_candidates(num_rows),
            make=make,
            using=nullcontext,
            bytes_moved=cost.bytes_moved,
            amount=cost.bytes_moved / 1e9,
            unit="GB/s",
        )


def _quantized_present(scope: Scope, layout: Layout, shape: Shape, num_rows: int) -> Tile:
    if num_rows == 1:
        return row_product_tile(shape.num_outputs, 64 if layout.bits == 4 else 128)
    is_wide = layout.activations is Activations.WIDE
    row_bytes = scope.dtype.itemsize if is_wide else 1
    return quantized_tile(num_rows, shape.num_outputs, row_bytes)


def _quantized_candidates(num_rows: int) -> list[Tile]:
    if num_rows == 1:
        return [
            RowProductTile(*others)
            for others in product((4, 8, 16), (1, 2, 4, 8), (4, 8), (2, 4, 6))
        ]
    if num_rows <= 16:
        return [
            QuantizedTile(16, *others) for others in product((16, 32, 64), (2, 4), (4, 6, 8, 10))
        ]
    row_tiles = (32,) if num_rows <= 32 else (64, 128)
    return [QuantizedTile(*others) for others in product(row_tiles, (64, 128), (4, 8), (3, 4, 6))]


def _rows(scope: Scope) -> Iterator[Sweep]:
    hidden, inner = row_kernels.widths(smoke=scope.smoke)
    for num_rows in (3,) if scope.smoke else (256, 8192):
        elements = num_rows * hidden * scope.dtype.itemsize
        norm_tiles = [RowTile(tiles.power_of_two(hidden), warps) for warps in (1, 2, 4, 8, 16)]
        for name, make, moved in (
            ("rms_norm", row_kernels.rms_norm_work, 2 * elements),
            ("add_rms_norm", row_kernels.add_rms_norm_work, 4 * elements),
        ):
            yield _row(
                f"{name}, {num_rows} x {hidden}",
                *(tiles.norm_tile(hidden), norm_tiles, partial(make, scope, num_rows, hidden)),
                *(partial(_patched, rows, "norm_tile"), moved),
            )
        yield _row(
            f"swiglu, {num_rows} x {inner}",
            tiles.swiglu_tile(inner),
            [RowTile(*tile) for tile in product((512, 1024, 2048, 4096), (2, 4, 8))],
            partial(row_kernels.swiglu_work, scope, num_rows, inner),
            partial(_patched, rows, "swiglu_tile"),
            3 * num_rows * inner * scope.dtype.itemsize,
        )
        layer = row_kernels.layer_heads(smoke=scope.smoke)
        half = tiles.power_of_two(layer.head_dim // 2)
        yield _row(
            f"rotate_store with norms, {num_rows} tokens",
            tiles.head_tile(layer.head_dim),
            [HeadTile(count, half, warps) for count, warps in product((2, 4, 8, 16), (1, 2, 4, 8))],
            partial(row_kernels.rotate_store_work, scope, layer, num_rows, True, False),
            partial(_patched, heads, "head_tile"),
            row_kernels.rotate_store_cost(scope, layer, num_rows, fp8=False).bytes_moved,
        )


def _row(
    name: str,
    present: Tile,
    candidates: Sequence[Tile],
    make: Callable[[int], Work],
    using: Callable[[Tile], AbstractContextManager[object]],
    moved: int,
) -> Sweep:
    return Sweep(
        name, present, candidates, lambda _, number: make(number), using, moved, moved / 1e9, "GB/s"
    )
