"""Log-probabilities of the model's own logits; one program takes a row."""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.sampling_logits import GROUP, NO_GAP


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["picked", "tokens"])
def logprobs_kernel(
    logits,
    picked,
    tokens,
    tops,
    masses,
    out,
    row_stride,
    vocab_size,
    num_groups,
    num_top,
    ALL_GROUPS: tl.constexpr,
):
    """Write ``out`` float64 [num_picked, 1 + 2 * num_top].

    A row has the log-probability of its token, then the likeliest tokens in falling order, of equal
    ones the first, then their log-probabilities.
    """
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(picked + place).to(tl.int64)
    logits += row * row_stride
    out += place * (1 + 2 * num_top)
    groups = tl.arange(0, ALL_GROUPS)
    inside = groups < num_groups
    own = place * num_groups + groups
    remaining = tl.load(tops + own, mask=inside, other=-float("inf"))
    best = tl.max(remaining)
    weights = tl.exp(remaining - best).to(tl.float64)
    relative = tl.load(masses + own, mask=inside, other=0.0).to(tl.float64)
    normaliser = tl.log(tl.sum(weights * relative)) + best.to(tl.float64)
    token = tl.load(tokens + row)
    # A row without a token reports nothing, but is still read.
    chosen = tl.load(logits + tl.maximum(token, 0)).to(tl.float64)
    tl.store(out, chosen - normaliser)
    unfinished = inside
    lanes = tl.arange(0, GROUP)
    last_value = tl.full((), float("inf"), tl.float32)
    last_token = tl.full((), -1, tl.int32)
    for rank in range(num_top):
        largest = tl.max(remaining)
        group = tl.min(tl.where((remaining == largest) & unfinished, groups, NO_GAP))
        ids = group * GROUP + lanes
        values = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)
        # Tokens leave in falling order, so all tokens before the last one in the group have left.
        left = (values < last_value) | ((values == last_value) & (ids > last_token))
        left = left & (ids < vocab_size)
        value = tl.max(tl.where(left, values, -float("inf")))
        found = tl.min(tl.where(left & (values == value), ids, NO_GAP))
        tl.store(out + 1 + rank, found.to(tl.float64))
        tl.store(out + 1 + num_top + rank, value.to(tl.float64) - normaliser)
        last_value = value
        last_token = found
        left = left & (ids != found)
        next_value = tl.max(tl.where(left, values, -float("inf")))
        remaining = tl.where(groups == group, next_value, remaining)
        unfinished = unfinished & ((groups != group) | (tl.sum(left.to(tl.int32)) > 0))
