"""Attention over the paged cache: decode, skewed lengths, prefill, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

import torch

from benchmarks.gpu.kernel_cases import BF16_ERROR, FP8_ERROR, Cost, Tiles, Timing, Work, measure
from benchmarks.gpu.report import DECODE_ATTENTION, SKEWED_ATTENTION
from benchmarks.gpu.scope import Scope
from millrace.engine.kernels.gpu import attention
from millrace.engine.kernels.gpu.attention import PagedAttention
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.attention_tiles import AttentionTile, decode_tile, padded
from millrace.engine.kernels.gpu.device_batch import FP8_MAX, CacheLayer, DeviceBatch
from millrace.engine.kernels.gpu.reference.attention import attend


class Heads(NamedTuple):
    """Heads of a layer, and tokens in a block of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


class AttentionInput(NamedTuple):
    """Inputs of attention; ``queries`` is [num_tokens, num_heads, head_dim]."""

    queries: torch.Tensor
    cache: CacheLayer
    batch: DeviceBatch


def attention_input(
    heads: Heads,
    lengths: Sequence[int],
    num_rows: Sequence[int],
    *,
    dtype: torch.dtype,
    fp8: bool,
    generator: torch.Generator,
) -> AttentionInput:
    """Return a batch of sequences of ``lengths`` tokens, the last ``num_rows`` of each new.

    Sequences with one row must come first. All numbers, and the order of the blocks, are random.
    """
    device, size = generator.device, heads.block_size
    counts = [-(-length // size) for length in lengths]
    num_blocks = sum(counts)
    order = torch.randperm(num_blocks, device=device, generator=generator).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    for row, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
        tables[row, :count] = order[end - count : end]
    positions = torch.cat(
        [
            torch.arange(length - rows, length, device=device)
            for length, rows in zip(lengths, num_rows, strict=True)
        ]
    )
    owners = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(num_rows, device=device)
    )
    slots = tables[owners, positions // size].long() * size + positions % size
    starts = [0, *accumulate(num_rows)]
    queries = torch.randn(
        starts[-1], heads.num_heads, heads.head_dim, device=device, generator=generator
    )
    batch = DeviceBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=slots,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        block_tables=tables,
        num_single=sum(rows == 1 for rows in num_rows),
    )
    cache = random_layer(heads, num_blocks, dtype=dtype, fp8=fp8, generator=generator)
    return AttentionInput(queries.to(dtype), cache, batch)


def random_layer(
    heads: Heads, num_blocks: int, *, dtype: torch.dtype, fp8: bool, generator: torch.Generator
) -> CacheLayer:
    """Return one layer's cache of random numbers."""
    shape = (num_blocks, heads.block_size, 2, heads.num_kv_heads, heads.head_dim)
    data = torch.empty(shape, dtype=dtype, device=generator.device)
    data.normal_(generator=generator)
    if not fp8:
        return CacheLayer(data, None)
    scales = data.abs().amax(-1).float() / FP8_MAX
    return CacheLayer((data / scales[..., None]).to(torch.float8_e4m3fn), scales)


def bytes_read(heads: Heads, lengths: Sequence[int], *, fp8: bool, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of all tokens, with their scales."""
    element = heads.head_dim + 4 if fp8 else heads.head_dim * dtype.itemsize
    return sum(lengths) * 2 * heads.num_kv_heads * element


def attention_flops(heads: Heads, lengths: Sequence[int], num_rows: Sequence[int]) -> int:
    """Return the FLOPs of two products for each pair of a row and a token that it sees."""
    pairs = sum(
        rows * (2 * length - rows + 1) // 2 for length, rows in zip(lengths, num_rows, strict=True)
    )
    return 4 * heads.num_heads * heads.head_dim * pairs


LLAMA_HEADS = Heads(32, 8, 128)
SMALL_HEADS = Heads(16, 8, 128)
_SMOKE_HEADS = Heads(4, 2, 32)
_SKEWED = [65_536, *[1024] * 63]
_SMOKE_SKEWED = [70, 9, 9]


class Case(NamedTuple):
    """Case: ``lengths`` of the sequences, and ``num_rows``, the queries at the end of each."""

    name: str
    heads: Heads
    lengths: Sequence[int]
    num_rows: Sequence[int]
    fp8: bool = False
    deterministic: bool = False


def _cases(*, smoke: bool) -> list[Case]:
    """Return all cases except the skewed one."""
    if smoke:
        small = partial(Case, heads=_SMOKE_HEADS)
        return [
            small(DECODE_ATTENTION, lengths=[17, 33], num_rows=[1, 1]),
            small("decode attention, fp8 cache", lengths=[17, 33], num_rows=[1, 1], fp8=True),
            small("prefill attention", lengths=[20], num_rows=[20]),
            small("chunk attention", lengths=[40], num_rows=[8], deterministic=True),
        ]
    large = partial(Case, heads=LLAMA_HEADS)
    fours, ones = [4096] * 64, [1] * 64
    return [
        large(DECODE_ATTENTION, lengths=fours, num_rows=ones),
        large("decode attention, 64 x 4k, fp8 cache", lengths=fours, num_rows=ones, fp8=True),
        large("decode attention, 256 x 1k", lengths=[1024] * 256, num_rows=[1] * 256),
        Case("decode attention, 256 x 1k, GQA 2", SMALL_HEADS, [1024] * 256, [1] * 256),
        large("decode attention, 8 x 1k", lengths=[1024] * 8, num_rows=[1] * 8),
        large("decode attention, 1 x 32k", lengths=[32_768], num_rows=[1]),
        large("prefill attention, 8 x 1k", lengths=[1024] * 8, num_rows=[1024] * 8),
        large("prefill attention, 1 x 8k", lengths=[8192], num_rows=[8192]),
        large("chunk attention, 2k rows behind 6k", lengths=[8192], num_rows=[2048]),
        large(
            "chunk attention, deterministic", lengths=[8192], num_rows=[2048], deterministic=True
        ),
    ]


def run(scope: Scope) -> None:
    for case in _cases(smoke=scope.smoke):
        _measure(scope, case)
    heads = _SMOKE_HEADS if scope.smoke else LLAMA_HEADS
    skewed_lengths = _SMOKE_SKEWED if scope.smoke else _SKEWED
    balanced_lengths = [sum(skewed_lengths) // len(skewed_lengths)] * len(skewed_lengths)
    ones = [1] * len(skewed_lengths)
    skewed = _measure(
        scope, Case("decode attention, one 64k among 63 x 1k", heads, skewed_lengths, ones)
    )
    balanced = _measure(
        scope, Case("decode attention, as many tokens, balanced", heads, balanced_lengths, ones)
    )
    if skewed is not None and balanced is not None:
        scope.emit(SKEWED_ATTENTION, skewed.median_s / balanced.median_s, "x")


def _measure(scope: Scope, case: Case) -> Timing | None:
    return measure(
        scope,
        case.name,
        partial(_work, scope, case),
        _cost(scope, case),
        bound_by="bytes" if max(case.num_rows) == 1 else "flops",
        tolerance=FP8_ERROR if case.fp8 else BF16_ERROR,
        tiles=_tiles(scope, case),
    )


def _tiles(scope: Scope, case: Case) -> Tiles:
    group = padded(case.heads.num_heads // case.heads.num_kv_heads)
    if case.deterministic or max(case.num_rows) > 1:
        others = list(product((32, 64, 128), (4, 8), (2, 3, 4)))
        rows = sorted({max(count, group) for count in (64, 128)})
        candidates = [AttentionTile(count, *other) for count in rows for other in others]
        return Tiles(attention, candidates, lambda tile: {"prefill_tile": tile})
    cache_dtype = torch.float8_e4m3fn if case.fp8 else scope.dtype
    present = decode_tile(case.heads.head_dim, group, cache_dtype)
    others = list(product((32, 64, 128), (4, 8), (2, 3, 4, 5)))
    rows = sorted({max(count, group) for count in (present.rows, 16, 64)})
    return Tiles(
        attention,
        [AttentionTile(count, *other) for count in rows for other in others],
        lambda tile: {"decode_tile": tile, "decode_tokens": tile.tokens},
    )


def _cost(scope: Scope, case: Case) -> Cost:
    """Return the cost: keys, values, queries and results, and two products for each pair."""
    rows = sum(case.num_rows) * case.heads.num_heads * case.heads.head_dim
    return Cost(
        bytes_read(case.heads, case.lengths, fp8=case.fp8, dtype=scope.dtype)
        + 2 * rows * scope.dtype.itemsize,
        attention_flops(case.heads, case.lengths, case.num_rows),
    )


def _work(scope: Scope, case: Case, number: int) -> Work:
    """Return the attention of one layer on random inputs."""
    given = attention_input(
        case.heads,
        case.lengths,
        case.num_rows,
        dtype=scope.dtype,
        fp8=case.fp8,
        generator=scope.generator(number),
    )
    kernels = paged_attention(
        scope.device, case.heads, len(case.lengths), deterministic=case.deterministic
    )
    return _attention_work(kernels, given)


def paged_attention(
    device: torch.device, heads: Heads, num_sequences: int, *, deterministic: bool = False
) -> PagedAttention:
    """Return the kernels of a model with one layer."""
    return PagedAttention(
        AttentionShape(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            block_size=heads.block_size,
            windows=[None],
        ),
        max_sequences=num_sequences,
        num_programs=num_programs(device),
        device=device,
        deterministic=deterministic,
    )


def num_programs(device: torch.device) -> int:
    """Return the number of programs that the device runs at a time."""
    if device.type != "cuda":
        return 4
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _attention_work(kernels: PagedAttention, given: AttentionInput) -> Work:
    """Return one layer's attention; its division is prepared before, once for all layers."""
    queries, cache, batch = given
    prepared = kernels.prepare(batch)
    out = torch.full_like(queries, torch.nan)

    def run() -> None:
        kernels.attend(0, queries, cache, batch, prepared, out)

    def expected() -> list[torch.Tensor]:
        scale = queries.shape[-1] ** -0.5
        return [attend(queries.float(), cache, batch, window=None, softcap=None, scale=scale)]

    return Work(run, lambda _: [out], expected)
