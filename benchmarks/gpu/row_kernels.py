"""Norms, gates, heads and copies: kernels bound by memory."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from benchmarks.gpu.attention_kernels import Heads, random_layer
from benchmarks.gpu.kernel_cases import (
    FP8_ERROR,
    Cost,
    Tiles,
    Work,
    check,
    measure,
    relative_error,
    returned,
    timed,
)
from benchmarks.gpu.scope import Scope
from millrace.engine.kernels.gpu import blocks, heads, rows
from millrace.engine.kernels.gpu.device_batch import CacheLayer
from millrace.engine.kernels.gpu.reference import operations as reference
from millrace.engine.kernels.gpu.tiles import HeadTile, RowTile, power_of_two
from millrace.engine.kernels.operations import HeadNorms

_EPSILON = 1e-5


def run(scope: Scope) -> None:
    hidden, inner = (64, 96) if scope.smoke else (4096, 14_336)
    for num_rows in (3,) if scope.smoke else (256, 8192):
        _norms_and_gates(scope, num_rows, hidden, inner)
        _heads(scope, num_rows)
    _copies(scope)


def _norms_and_gates(scope: Scope, num_rows: int, hidden: int, inner: int) -> None:
    elements = num_rows * hidden
    shape = f"{num_rows} x {hidden}"
    norm_tiles = Tiles(
        rows,
        [RowTile(power_of_two(hidden), num_warps) for num_warps in (1, 2, 4, 8, 16)],
        lambda tile: {"norm_tile": tile},
    )
    measure(
        scope,
        f"rms_norm, {shape}",
        partial(_rms_norm_work, scope, num_rows, hidden),
        Cost(2 * elements * scope.dtype.itemsize),
        tiles=norm_tiles,
    )
    measure(
        scope,
        f"add_rms_norm, {shape}",
        partial(_add_rms_norm_work, scope, num_rows, hidden),
        Cost(4 * elements * scope.dtype.itemsize),
        tiles=norm_tiles,
    )
    measure(
        scope,
        f"swiglu, {num_rows} x {inner}",
        partial(_swiglu_work, scope, num_rows, inner),
        Cost(3 * num_rows * inner * scope.dtype.itemsize),
        tiles=Tiles(
            rows,
            [RowTile(*tile) for tile in product((512, 1024, 2048, 4096), (2, 4, 8))],
            lambda tile: {"swiglu_tile": tile},
        ),
    )


def _normal(scope: Scope, number: int, *shape: int) -> torch.Tensor:
    return scope.normal(scope.generator(number), *shape)


def _rms_norm_work(scope: Scope, num_rows: int, width: int, number: int) -> Work:
    values = _normal(scope, 2 * number, num_rows, width)
    weight = _normal(scope, 2 * number + 1, width)
    return Work(
        lambda: rows.rms_norm(values, weight, _EPSILON),
        returned,
        lambda: [reference.rms_norm(values.float(), weight.float(), _EPSILON)],
    )


def _add_rms_norm_work(scope: Scope, num_rows: int, width: int, number: int) -> Work:
    total = _normal(scope, 3 * number, num_rows, width)
    delta = _normal(scope, 3 * number + 1, num_rows, width)
    weight = _normal(scope, 3 * number + 2, width)

    def expected() -> list[torch.Tensor]:
        added = (total.float() + delta.float()).to(scope.dtype).float()
        return [added, reference.rms_norm(added, weight.float(), _EPSILON)]

    return Work(
        lambda: rows.add_rms_norm(total, delta, weight, _EPSILON),
        lambda normed: [total, *returned(normed)],
        expected,
    )


def _swiglu_work(scope: Scope, num_rows: int, width: int, number: int) -> Work:
    values = _normal(scope, number, num_rows, 2 * width)
    return Work(
        lambda: rows.swiglu(values),
        returned,
        lambda: [reference.swiglu(values.float())],
    )


def _heads(scope: Scope, num_rows: int) -> None:
    """Measure QK-norm, rotation and the cache write, for Qwen3 and for Llama with an fp8 cache."""
    layer = Heads(4, 2, 32) if scope.smoke else Heads(32, 8, 128)
    half = power_of_two(layer.head_dim // 2)
    measure(
        scope,
        f"rotate_store with norms, {num_rows} tokens",
        partial(_rotate_store_work, scope, layer, num_rows, True, False),
        _rotate_store_cost(scope, layer, num_rows, fp8=False),
        tiles=Tiles(
            heads,
            [HeadTile(count, half, warps) for count, warps in product((2, 4, 8, 16), (1, 2, 4, 8))],
            lambda tile: {"head_tile": tile},
        ),
    )
    measure(
        scope,
        f"rotate_store, fp8 cache, {num_rows} tokens",
        partial(_rotate_store_work, scope, layer, num_rows, False, True),
        _rotate_store_cost(scope, layer, num_rows, fp8=True),
        tolerance=FP8_ERROR,
    )


def _rotate_store_cost(scope: Scope, layer: Heads, num_tokens: int, *, fp8: bool) -> Cost:
    """Return the cost: heads read, queries written back, keys and values written to the cache."""
    num_pairs = 2 * layer.num_kv_heads
    heads_moved = 2 * layer.num_heads + num_pairs
    stored = num_pairs * ((layer.head_dim + 4) if fp8 else layer.head_dim * scope.dtype.itemsize)
    tables = 2 * (layer.head_dim // 2) * 4
    moved = heads_moved * layer.head_dim * scope.dtype.itemsize + stored + tables
    return Cost(num_tokens * moved)


def _rotate_store_work(
    scope: Scope, layer: Heads, num_tokens: int, normed: bool, fp8: bool, number: int
) -> Work:
    generator = scope.generator(number)
    num_heads = layer.num_heads + 2 * layer.num_kv_heads
    values = _normal(scope, 5 * number + 1, num_tokens, num_heads, layer.head_dim)
    norms = None
    if normed:
        norms = HeadNorms(
            _normal(scope, 5 * number + 2, layer.head_dim),
            _normal(scope, 5 * number + 3, layer.head_dim),
        )
    angles = torch.rand(num_tokens, layer.head_dim // 2, device=scope.device, generator=generator)
    cosines, sines = angles.cos(), angles.sin()
    num_blocks = -(-num_tokens // layer.block_size) + 2
    cache = random_layer(layer, num_blocks, dtype=scope.dtype, fp8=fp8, generator=generator)
    order = torch.randperm(num_blocks * layer.block_size, device=scope.device, generator=generator)
    slots = order[:num_tokens]

    def written(_: torch.Tensor | None) -> list[torch.Tensor]:
        stored = cache.data.flatten(0, 1)[slots].float()
        if cache.scales is not None:
            stored *= cache.scales.flatten(0, 1)[slots][..., None]
        return [values[:, : layer.num_heads], stored]

    def expected() -> list[torch.Tensor]:
        turned = values.to(torch.float32, copy=True)
        wide = CacheLayer(torch.zeros(cache.data.shape, device=scope.device), None)
        reference.rotate_store(turned, cosines, sines, norms, _EPSILON, wide, slots)
        return [turned[:, : layer.num_heads], wide.data.flatten(0, 1)[slots]]

    return Work(
        lambda: heads.rotate_store(values, cosines, sines, norms, _EPSILON, cache, slots),
        written,
        expected,
    )


def _copies(scope: Scope) -> None:
    """Measure copies of blocks of all layers, within the device and to and from pinned memory."""
    num_layers, num_pairs, block_bytes = (2, 3, 512) if scope.smoke else (32, 256, 65_536)
    moved = 2 * num_layers * num_pairs * block_bytes
    make = partial(_copy, scope, num_layers, num_pairs, block_bytes)
    measure(
        scope,
        f"copy_blocks, {num_pairs} of all layers",
        partial(make, False),
        Cost(moved),
        tolerance=0.0,
    )
    if scope.smoke or scope.sweeps or scope.rehearsal is not None:
        return
    name = f"copy_blocks, {num_pairs} to the host"
    with scope.case(name):
        link = _host_bandwidth(scope, moved // 2)
        work = make(True, 0)
        timing = timed(scope.device, [work.run], replays=5)
        check(work, 0.0, relative_error)
        scope.emit(name, moved / 2e9 / timing.median_s, "GB/s", ceiling=link / 1e9)


def _copy(
    scope: Scope, num_layers: int, num_pairs: int, block_bytes: int, to_host: bool, number: int
) -> Work:
    generator = scope.generator(number)
    shape = (num_layers, 2 * num_pairs, block_bytes // 2)
    source = scope.normal(generator, *shape)
    if to_host:
        target = torch.empty(shape, dtype=scope.dtype, pin_memory=True)
    else:
        target = torch.full_like(source, torch.nan)
    source_ids, target_ids = (
        torch.randperm(2 * num_pairs, device=scope.device, generator=generator)[:num_pairs]
        for _ in range(2)
    )
    return Work(
        lambda: blocks.copy_blocks(source, target, source_ids, target_ids),
        lambda _: [target[:, target_ids.to(target.device)]],
        lambda: [source[:, source_ids]],
    )


def _host_bandwidth(scope: Scope, size_bytes: int) -> float:
    """Return the bytes per second from the device's copy engine to pinned host memory."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=scope.device)
    target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    copy = partial(target.copy_, source, non_blocking=True)
    return size_bytes / timed(scope.device, [copy], replays=5).median_s
