"""Summary of each group of a row's logits: the largest logit and the group's mass.

This is the only pass over all logits that every row takes. Each program takes a part of one row.
"""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.sampling_logits import (
    GROUP,
    RECORD_WORDS,
    TEMPERATURE,
    group_logits,
    half_word,
    penalties,
)


@triton.jit
def _relative_mass(values, tops, sharpness):
    """Return the sum of exp((logit - top) * sharpness) of each group."""
    origin = tl.where(tops == -float("inf"), 0.0, tops)
    return tl.sum(tl.exp((values - origin[:, None]) * sharpness), 1)


@triton.jit
def _summarise(
    logits, counts, record, tops, masses, groups, num_groups, vocab_size, PENALISED: tl.constexpr
):
    """Summarise some ``groups`` of one row."""
    inside = groups < num_groups
    values = group_logits(logits, counts, record, groups, inside, vocab_size, PENALISED)
    group_tops = tl.max(values, 1)
    tl.store(tops + groups, group_tops, mask=inside)
    temperature = half_word(record, TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature > 0:
        # A tiny temperature has an infinite inverse, which must not turn 0 into NaN.
        sharpness = tl.minimum(tl.div_rn(1.0, temperature), 3.0e38)
        tl.store(masses + groups, _relative_mass(values, group_tops, sharpness), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["state_rows"])
def summarise_kernel(
    logits,
    state_rows,
    records,
    counts,
    tops,
    masses,
    row_stride,
    vocab_size,
    num_groups,
    BLOCK_GROUPS: tl.constexpr,
    PART_GROUPS: tl.constexpr,
):
    """Compute the largest logit of each group after penalties.

    For rows that are drawn, also compute the group's mass relative to it.
    """
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_GROUPS
    state_row = tl.load(state_rows + row).to(tl.int64)
    record = records + state_row * RECORD_WORDS
    logits += row * row_stride
    counts += state_row * vocab_size
    tops += row * num_groups
    masses += row * num_groups
    penalised, _, _, _ = penalties(record)
    if penalised:
        # In parts, so that the registers for penalties do not slow down other rows.
        for start in range(0, BLOCK_GROUPS, PART_GROUPS):
            groups = first + start + tl.arange(0, PART_GROUPS)
            _summarise(
                logits, counts, record, tops, masses, groups, num_groups, vocab_size, True
            )  # fmt: skip
    else:
        groups = first + tl.arange(0, BLOCK_GROUPS)
        _summarise(
            logits, counts, record, tops, masses, groups, num_groups, vocab_size, False
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["picked"])
def summarise_raw_kernel(
    logits,
    picked,
    tops,
    masses,
    row_stride,
    vocab_size,
    num_groups,
    BLOCK_GROUPS: tl.constexpr,
):
    """Summarise the ``picked`` rows of the model's raw logits, at temperature 1."""
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    inside = groups < num_groups
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = logits + tl.load(picked + row).to(tl.int64) * row_stride
    values = tl.load(
        source + tokens, mask=inside[:, None] & (tokens < vocab_size), other=-float("inf")
    ).to(tl.float32)
    values = tl.where(values != values, float("inf"), values)
    group_tops = tl.max(values, 1)
    out = row * num_groups + groups
    tl.store(tops + out, group_tops, mask=inside)
    tl.store(masses + out, _relative_mass(values, group_tops, 1.0), mask=inside)
