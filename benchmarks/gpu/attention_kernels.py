"""Attention over the paged cache: decode, skewed lengths, prefill, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.attention_batches import (
    AttentionInput,
    Heads,
    attention_flops,
    attention_input,
    bytes_read,
)
from benchmarks.gpu.goals import DECODE_ATTENTION, SKEWED_ATTENTION
from benchmarks.gpu.kernel_cases import BF16_ERROR, FP8_ERROR, Cost, Work, measure
from benchmarks.gpu.scope import Scope
from benchmarks.gpu.timing import Timing
from millrace.engine.kernels.gpu.attention import PagedAttention
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.reference.attention import attend

LLAMA_HEADS = Heads(32, 8, 128)
SMALL_HEADS = Heads(16, 8, 128)
_SMOKE_HEADS = Heads(4, 2, 32)
_SKEWED = [65_536, *[1024] * 63]
_SMOKE_SKEWED = [70, 9, 9]


class Case(NamedTuple):
    """``lengths`` of the sequences, the last ``num_rows`` tokens of each are queries."""

    name: str
    heads: Heads
    lengths: Sequence[int]
    num_rows: Sequence[int]
    fp8: bool = False
    deterministic: bool = False


def cases(*, smoke: bool) -> list[Case]:
    """All but the skewed one."""
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
    for case in cases(smoke=scope.smoke):
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
        partial(work, scope, case),
        cost_of(scope, case),
        bound_by="bytes" if max(case.num_rows) == 1 else "flops",
        tolerance=FP8_ERROR if case.fp8 else BF16_ERROR,
    )


def cost_of(scope: Scope, case: Case) -> Cost:
    """Keys and values, queries and results; two products for each pair of row and key."""
    rows = sum(case.num_rows) * case.heads.num_heads * case.heads.head_dim
    return Cost(
        bytes_read(case.heads, case.lengths, fp8=case.fp8, dtype=scope.dtype)
        + 2 * rows * scope.dtype.itemsize,
        attention_flops(case.heads, case.lengths, case.num_rows),
    )


def work(scope: Scope, case: Case, number: int) -> Work:
    """The attention of one layer on random inputs."""
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
    """The kernels of a model of one layer."""
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
    """As many as the device runs at a time."""
    if device.type != "cuda":
        return 4
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _attention_work(kernels: PagedAttention, given: AttentionInput) -> Work:
    """One layer's attention; how it is cut is prepared before, as it is once for all layers."""
    queries, cache, batch = given
    prepared = kernels.prepare(batch)
    out = torch.full_like(queries, torch.nan)

    def run() -> None:
        kernels.attend(0, queries, cache, batch, prepared, out)

    def expected() -> list[torch.Tensor]:
        scale = queries.shape[-1] ** -0.5
        return [attend(queries.float(), cache, batch, window=None, softcap=None, scale=scale)]

    return Work(run, lambda _: [out], expected)
