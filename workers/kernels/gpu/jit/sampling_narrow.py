"""Top-k and top-p as the largest gap that a row keeps.

Both ask for the least gap up to which enough tokens lie, or enough of their mass. It is found by
bisection on the bits of gaps, among the likeliest groups in registers; that nearly always does.
If not, passes over all groups that may matter cut the range in nine until few tokens are in it.
Sums are taken in an order that depends on the row alone.
"""

import triton
import triton.language as tl

from workers.kernels.gpu.jit.sampling_logits import (
    GROUP,
    INF_BITS,
    NO_GAP,
    gap_bits,
    group_logits,
    weights_of,
)

# Beyond this gap no float32 weight is above 0.
_WEIGHTLESS = tl.constexpr(104.0)
# What a bound that comes from a sum is given, far above what rounding does to it.
_SLACK = tl.constexpr(1e-3)
# How much of a sum may be lost to rounding in a pass.
_ROUNDING = tl.constexpr(1e-6)


@triton.jit
def _least_reaching(bits, weights, before, target, low, high):
    """The least value in (low, high] up to which ``before`` and the weights reach the target;
    ``high`` if none does."""
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = before + tl.sum(tl.where(bits <= middle, weights, 0.0)) >= target
        low = tl.where(reached, low, middle)
        high = tl.where(reached, middle, high)
    return high


@triton.jit
def _peak_rank(peaks, rank):
    """The ``rank``-th smallest of the groups' least gaps, ``peaks``, from 1 on."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), INF_BITS, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum((peaks <= middle).to(tl.int32)) >= rank
        low = tl.where(reached, low, middle)
        high = tl.where(reached, middle, high)
    return high


@triton.jit
def _list_groups(listing, chosen, groups):
    """Write the ``chosen`` of the ``groups`` to ``listing``, in order; returns how many."""
    tl.debug_barrier()  # nobody reads an earlier list any more
    ones = chosen.to(tl.int32)
    tl.store(listing + tl.cumsum(ones, 0) - 1, groups, mask=chosen)
    tl.debug_barrier()
    return tl.sum(ones)


@triton.jit
def _listed_gaps(
    logits, counts, record, vocab_size, best, temperature, listing, start, num_listed,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Bits of the gaps in groups ``start`` … of the listing: [TILE_GROUPS, 64]."""
    places = start + tl.arange(0, TILE_GROUPS)
    listed = places < num_listed
    groups = tl.load(listing + places, mask=listed, other=0)
    values = group_logits(logits, counts, record, groups, listed, vocab_size)
    return gap_bits(values, best, temperature)


@triton.jit
def _measure(bits, BY_MASS: tl.constexpr):
    """What tokens count for: their weights, or 1 for each that is possible."""
    if BY_MASS:
        return weights_of(bits)
    else:  # noqa: RET505 (Triton compiles what is behind an if)
        return (bits < INF_BITS).to(tl.float32)


@triton.jit
def _sums_up_to(
    pivots, logits, counts, record, vocab_size, best, temperature, listing, num_listed,
    BY_MASS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The measure of the listed tokens up to each of 8 ``pivots``: float64 [8]."""
    sums = tl.zeros((8, TILE_GROUPS, 8), tl.float64)
    for start in range(0, num_listed, TILE_GROUPS):
        bits = _listed_gaps(
            logits, counts, record, vocab_size, best, temperature, listing, start, num_listed,
            TILE_GROUPS,
        )  # fmt: skip
        # The 8 that a thread has are added up there.
        bits = tl.reshape(bits, (TILE_GROUPS, 8, 8))
        weights = _measure(bits, BY_MASS)
        inside = bits[None, :, :, :] <= pivots[:, None, None, None]
        sums += tl.sum(tl.where(inside, weights[None, :, :, :], 0.0), 3).to(tl.float64)
    return tl.sum(tl.sum(sums, 2), 1)


@triton.jit
def _pivots(low, high, by_value):
    """8 values in [low, high] that cut it evenly, as numbers or as bits, in rising order."""
    parts = tl.arange(0, 8) + 1
    bits = low + ((high - low).to(tl.int64) * parts // 9).to(tl.int32)
    first = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    last = tl.minimum(high.to(tl.float32, bitcast=True), _WEIGHTLESS)
    values = first + (tl.maximum(last, first) - first) * (parts.to(tl.float32) / 9)
    bits = tl.where(by_value, values.to(tl.int32, bitcast=True), bits)
    return tl.minimum(tl.maximum(bits, low), high)


@triton.jit
def _search(
    target, high, logits, counts, record, vocab_size, best, temperature, listing, num_listed,
    gathered,
    BY_MASS: tl.constexpr, TILE_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """``_least_reaching`` up to ``high`` of all listed tokens, of which any number may be there.

    Passes cut the range evenly as numbers, then as bits, in turn: so it narrows fast where gaps
    are spread as usual, and however they are spread there are at most 20 passes.
    """
    low = tl.full((), -1, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    upto = tl.full((), float("inf"), tl.float64)
    num_inside = upto
    by_value = tl.full((), 1, tl.int32)
    while (high - low > 1) & (num_inside > CAPACITY):
        pivots = _pivots(low, high, by_value == 1)
        by_value = 1 - by_value
        sums = _sums_up_to(
            pivots, logits, counts, record, vocab_size, best, temperature, listing, num_listed,
            BY_MASS, TILE_GROUPS,
        )  # fmt: skip
        reached = sums >= target
        high = tl.min(tl.where(reached, pivots, high))
        low = tl.max(tl.where(reached, low, pivots))
        before = tl.max(tl.where(reached, before, sums))
        upto = tl.min(tl.where(reached, sums, upto))
        num_inside = upto - before
        if BY_MASS:
            # None of those inside weighs less than at the range's end.
            farthest = tl.minimum(high.to(tl.float32, bitcast=True), 2 * _WEIGHTLESS)
            num_inside = (num_inside + _ROUNDING * upto) * tl.exp(farthest.to(tl.float64))
    if high - low > 1:
        num_gathered = tl.full((), 0, tl.int32)
        tl.debug_barrier()  # nobody reads what an earlier search gathered any more
        for start in range(0, num_listed, TILE_GROUPS):
            bits = _listed_gaps(
                logits, counts, record, vocab_size, best, temperature, listing, start, num_listed,
                TILE_GROUPS,
            )  # fmt: skip
            bits = tl.reshape(bits, (TILE_GROUPS * GROUP,))
            inside = (bits > low) & (bits <= high)
            ones = inside.to(tl.int32)
            places = num_gathered + tl.cumsum(ones, 0) - 1
            tl.store(gathered + places, bits, mask=inside & (places < CAPACITY))
            num_gathered += tl.sum(ones)
        tl.debug_barrier()
        places = tl.arange(0, CAPACITY)
        bits = tl.load(gathered + places, mask=places < num_gathered, other=NO_GAP)
        bits = tl.where(places < num_gathered, bits, NO_GAP)
        weights = tl.where(bits == NO_GAP, 0.0, _measure(bits, BY_MASS)).to(tl.float64)
        high = _least_reaching(bits, weights, before, target, low, high)
    return high


@triton.jit
def largest_gap(
    top_k, top_p, mass, peaks, groups, num_groups, logits, counts, record, vocab_size, best,
    temperature, listing, gathered,
    TILE_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Bits of the largest gap that top-k, then top-p, leave of a row.

    ``peaks`` are the least gaps of its ``groups``, ``mass`` (float64) the weight of all its tokens.
    ``listing`` (int32 [num_groups]) and ``gathered`` (int32 [CAPACITY]) are overwritten.
    """
    by_count = top_k < vocab_size
    below = tl.full((), -1, tl.int32)
    nothing = tl.full((), 0.0, tl.float64)
    # Among the tile of likeliest groups first: all up to its bound are in it.
    bound = tl.full((), INF_BITS, tl.int32)
    if num_groups > TILE_GROUPS:
        bound = _peak_rank(peaks, tl.minimum(top_k, TILE_GROUPS))
    num_listed = _list_groups(listing, peaks <= bound, groups)
    found = num_listed <= TILE_GROUPS
    edge = bound
    if found:
        bits = _listed_gaps(
            logits, counts, record, vocab_size, best, temperature, listing, 0, num_listed,
            TILE_GROUPS,
        )  # fmt: skip
        weights = weights_of(bits).to(tl.float64)
        if by_count:
            found = (bound == INF_BITS) | (tl.sum((bits <= bound).to(tl.int32)) >= top_k)
            if found:
                ones = _measure(bits, False)
                edge = _least_reaching(bits, ones, nothing, top_k, below, bound)
        if found & (top_p < 1):
            inside = tl.sum(tl.where(bits <= edge, weights, 0.0))
            target = top_p * tl.where(by_count, inside, mass)
            found = (bound == INF_BITS) | (inside >= target)
            if found:
                edge = _least_reaching(bits, weights, nothing, target, below, edge)
    if not found:
        edge = tl.full((), INF_BITS, tl.int32)
        if by_count:
            if top_k <= num_groups:
                edge = _peak_rank(peaks, top_k)
        else:
            # What weighs less makes up less than 1 - top_p even if it were all tokens.
            spare = (1 - top_p) * mass / (num_groups * GROUP)
            farthest = tl.maximum(-tl.log(spare), 0.0) + _SLACK
            edge = farthest.to(tl.float32).to(tl.int32, bitcast=True)
        num_listed = _list_groups(listing, peaks <= edge, groups)
        if by_count:
            edge = _search(
                top_k.to(tl.float64), edge, logits, counts, record, vocab_size, best, temperature,
                listing, num_listed, gathered, False, TILE_GROUPS, CAPACITY,
            )  # fmt: skip
        if top_p < 1:
            left = mass
            if by_count:
                pivots = tl.zeros((8,), tl.int32) + edge
                sums = _sums_up_to(
                    pivots, logits, counts, record, vocab_size, best, temperature, listing,
                    num_listed, True, TILE_GROUPS,
                )  # fmt: skip
                left = tl.max(sums)
            edge = _search(
                top_p * left, edge, logits, counts, record, vocab_size, best, temperature,
                listing, num_listed, gathered, True, TILE_GROUPS, CAPACITY,
            )  # fmt: skip
    return edge
