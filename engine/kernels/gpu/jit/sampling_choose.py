"""Choice of a row's token from the summary of ``summarise_kernel``; one program takes a row."""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.random_stream import exponentials
from millrace.engine.kernels.gpu.jit.sampling_logits import (
    GROUP,
    INF_BITS,
    KEY,
    LOG_MIN_P,
    MOST_COUNTED,
    NO_GAP,
    RECORD_WORDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    gap_bits,
    group_logits,
    half_word,
    penalties,
    weights_of,
    word,
)
from millrace.engine.kernels.gpu.jit.sampling_narrow import largest_gap

# Bound of the relative error of a group's mass in the summary.
_SLACK = tl.constexpr(1e-3)


@triton.jit
def _first_largest(values, places):
    """Return the first of the ``places`` where ``values`` is largest."""
    return tl.min(tl.where(values == tl.max(values), places, NO_GAP))


@triton.jit
def _group(logits, counts, record, vocab_size, group):
    """Load the logits of one group of 64 neighbouring tokens of the vocabulary: [64]."""
    groups = tl.zeros((1,), tl.int32) + group
    values = group_logits(logits, counts, record, groups, groups >= 0, vocab_size, True)
    return tl.reshape(values, (GROUP,))


@triton.jit
def _kept_weights(values, best, temperature, edge):
    """Return the weights of a group's tokens, 0 for tokens beyond the ``edge``."""
    bits = gap_bits(values, best, temperature)
    return tl.where(bits <= edge, weights_of(bits), 0.0)


@triton.jit
def _summary(tops, masses, groups, num_groups, best, temperature):
    """Return (the least gap, the weight) of each of a row's groups."""
    inside = groups < num_groups
    group_tops = tl.load(tops + groups, mask=inside, other=-float("inf"))
    peaks = tl.where(inside, gap_bits(group_tops, best, temperature), NO_GAP)
    relative = tl.load(masses + groups, mask=inside, other=0.0)
    return peaks, tl.where(peaks < INF_BITS, relative * weights_of(peaks), 0.0)


@triton.jit
def _race_groups(
    key, index, logits, counts, record, vocab_size, best, temperature, edge, peaks, weights, groups
):
    """Return the group of the drawn token: the largest weight over an exponential variate wins.

    ``weights`` are the groups' weights before narrowing, as upper bounds. The exact weights are
    computed for groups that may win.
    """
    times = exponentials(key, index, groups + GROUP)
    most = tl.where(peaks <= edge, weights, 0.0).to(tl.float64) * (1 + _SLACK) / times
    largest = tl.max(most)
    score = tl.full((), -1.0, tl.float64)
    winner = tl.full((), 0, tl.int32)
    while largest > tl.maximum(score, 0.0):
        group = tl.min(tl.where(most == largest, groups, NO_GAP))
        values = _group(logits, counts, record, vocab_size, group)
        weight = tl.sum(_kept_weights(values, best, temperature, edge)).to(tl.float64)
        own = weight / tl.sum(tl.where(groups == group, times, 0.0))
        ahead = (own > score) | ((own == score) & (group < winner))
        winner = tl.where(ahead, group, winner)
        score = tl.where(ahead, own, score)
        most = tl.where(groups == group, 0.0, most)
        largest = tl.max(most)
    return winner


@triton.jit(do_not_specialize_on_alignment=["state_rows", "token_indices", "tokens_out"])
def choose_kernel(
    logits,
    state_rows,
    token_indices,
    records,
    counts,
    tops,
    masses,
    listing,
    gathered,
    tokens_out,
    row_stride,
    vocab_size,
    num_groups,
    ALL_GROUPS: tl.constexpr,
    LIKELIEST_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state_row = tl.load(state_rows + row).to(tl.int64)
    record = records + state_row * RECORD_WORDS
    logits += row * row_stride
    counts += state_row * vocab_size
    groups = tl.arange(0, ALL_GROUPS)
    tops += row * num_groups
    masses += row * num_groups
    group_tops = tl.load(tops + groups, mask=groups < num_groups, other=-float("inf"))
    best = tl.max(group_tops)
    temperature = half_word(record, TEMPERATURE).to(tl.float32, bitcast=True)
    key = word(record, KEY)
    index = tl.load(token_indices + row)
    token = tl.full((), -1, tl.int32)
    if tl.abs(best) < float("inf"):
        edge = tl.full((), INF_BITS, tl.int32)
        if temperature > 0:
            top_k = half_word(record, TOP_K)
            top_p = word(record, TOP_P).to(tl.float64, bitcast=True)
            if (top_k < vocab_size) | (top_p < 1):
                peaks, weights = _summary(tops, masses, groups, num_groups, best, temperature)
                edge = largest_gap(
                    top_k, top_p, tl.sum(weights.to(tl.float64)), peaks, groups, num_groups,
                    logits, counts, record, vocab_size, best, temperature,
                    listing + row * num_groups, gathered + row * CAPACITY,
                    LIKELIEST_GROUPS, TILE_GROUPS, CAPACITY,
                )  # fmt: skip
            farthest = tl.abs(half_word(record, LOG_MIN_P).to(tl.float32, bitcast=True))
            edge = tl.minimum(edge, farthest.to(tl.int32, bitcast=True))
            # Read again, which is faster than keeping it in registers.
            peaks, weights = _summary(tops, masses, groups, num_groups, best, temperature)
            group = _race_groups(
                key, index, logits, counts, record, vocab_size, best, temperature, edge, peaks,
                weights, groups,
            )  # fmt: skip
        else:
            group = _first_largest(group_tops, groups)
        members = tl.arange(0, GROUP)
        values = _group(logits, counts, record, vocab_size, group)
        if temperature > 0:
            kept = _kept_weights(values, best, temperature, edge).to(tl.float64)
            member = _first_largest(kept / exponentials(key, index, members), members)
        else:
            member = _first_largest(values, members)
        token = group * GROUP + member
        penalised, _, _, _ = penalties(record)
        if penalised:
            tl.debug_barrier()  # all threads have read the counts
            entry = tl.load(counts + token)
            counted = (entry & MOST_COUNTED) < MOST_COUNTED
            tl.store(counts + token, tl.where(counted, entry + 1, entry))
    tl.store(tokens_out + row, token.to(tl.int64))
