"""Top-k and top-p as the largest gap that a row keeps.

Both ask for the least gap up to which there are enough tokens, or enough of their mass. It is found
by bisection on the bits of gaps, among the likeliest groups in registers, which almost always
suffices. If not, passes over all groups that may matter cut the range into eight parts until few
tokens are in it. The order of sums depends on the row alone.
"""

import triton
import triton.language as tl

from millrace.engine.kernels.gpu.jit.sampling_logits import (
    GROUP,
    INF_BITS,
    NO_GAP,
    gap_bits,
    group_logits,
    weights_of,
)

# Beyond this gap every float32 weight is 0.
_WEIGHTLESS = tl.constexpr(104.0)
# Tolerance of a bound computed from a sum, far above the sum's rounding error.
_SLACK = tl.constexpr(1e-3)
# Share of a sum that may be lost to rounding in a pass.
_ROUNDING = tl.constexpr(1e-6)


@triton.jit
def _least_reaching(bits, weights, before, target, low, high):
    """Return the least value in (low, high] up to which ``before`` and weights reach ``target``.

    Returns ``high`` if no value does.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = before + tl.sum(tl.where(bits <= middle, weights, 0.0)) >= target
        low = tl.where(reached, low, middle)
        high = tl.where(reached, middle, high)
    return high


@triton.jit
def _peak_rank(peaks, rank):
    """Return the ``rank``-th smallest of the groups' least gaps, ``peaks``; ranks begin at 1."""
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
    """Write the ``chosen`` of the ``groups`` to ``listing``, in order; return their number."""
    tl.debug_barrier()  # all threads have read the earlier list
    ones = chosen.to(tl.int32)
    tl.store(listing + tl.cumsum(ones, 0) - 1, groups, mask=chosen)
    tl.debug_barrier()
    return tl.sum(ones)


@triton.jit
def _listed_gaps(
    logits, counts, record, vocab_size, best, temperature, listing, start, num_listed,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the bits of the gaps in groups ``start`` … of the listing: [TILE_GROUPS, 64]."""
    places = start + tl.arange(0, TILE_GROUPS)
    listed = places < num_listed
    groups = tl.load(listing + places, mask=listed, other=0)
    values = group_logits(logits, counts, record, groups, listed, vocab_size, True)
    return gap_bits(values, best, temperature)


@triton.jit
def _measure(bits, by_mass):
    """Return each token's measure: its weight, or 1 if it is possible."""
    return tl.where(by_mass, weights_of(bits), (bits < INF_BITS).to(tl.float32))


@triton.jit
def _among_likeliest(bits, bound, top_k, top_p, by_count, mass):
    """Return (the largest gap kept, whether it is certain).

    ``bits`` must include all tokens within the ``bound``.
    """
    edge = bound
    found = bound >= 0
    for phase in range(2):
        by_mass = phase == 1
        if found & tl.where(by_mass, top_p < 1, by_count):
            weights = _measure(bits, by_mass).to(tl.float64)
            inside = tl.sum(tl.where(bits <= edge, weights, 0.0))
            share = top_p * tl.where(by_count, inside, mass)
            target = tl.where(by_mass, share, top_k.to(tl.float64))
            found = (bound == INF_BITS) | (inside >= target)
            if found:
                low = tl.full((), -1, tl.int32)
                nothing = tl.full((), 0.0, tl.float64)
                edge = _least_reaching(bits, weights, nothing, target, low, edge)
    return edge, found


@triton.jit
def _pivots(low, high, by_value):
    """Return 8 rising values in (low, high] that cut it evenly, as numbers or as bits.

    The last value is ``high``.
    """
    parts = tl.arange(0, 8) + 1
    bits = low + ((high - low).to(tl.int64) * parts // 8).to(tl.int32)
    first = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    last = tl.minimum(high.to(tl.float32, bitcast=True), _WEIGHTLESS)
    values = first + (tl.maximum(last, first) - first) * (parts.to(tl.float32) / 8)
    bits = tl.where(by_value & (parts < 8), values.to(tl.int32, bitcast=True), bits)
    return tl.minimum(tl.maximum(bits, low), high)


@triton.jit
def _sums_up_to(
    pivots, by_mass, logits, counts, record, vocab_size, best, temperature, listing, num_listed,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the measure of the listed tokens up to each of 8 ``pivots``: float64 [8]."""
    sums = tl.zeros((8, TILE_GROUPS, 8), tl.float64)
    for start in range(0, num_listed, TILE_GROUPS):
        bits = _listed_gaps(
            logits, counts, record, vocab_size, best, temperature, listing, start, num_listed,
            TILE_GROUPS,
        )  # fmt: skip
        # A thread adds its own 8 values.
        bits = tl.reshape(bits, (TILE_GROUPS, 8, 8))
        weights = _measure(bits, by_mass)
        inside = bits[None, :, :, :] <= pivots[:, None, None, None]
        sums += tl.sum(tl.where(inside, weights[None, :, :, :], 0.0), 3).to(tl.float64)
    return tl.sum(tl.sum(sums, 2), 1)


@triton.jit
def _gather(
    low, high, logits, counts, record, vocab_size, best, temperature, listing, num_listed,
    gathered, TILE_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the listed tokens' gaps in (low, high], at most CAPACITY, padded with NO_GAP."""
    num_gathered = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # all threads have read the earlier bits
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
    return tl.load(gathered + places, mask=places < num_gathered, other=NO_GAP)


@triton.jit
def _among_listed(
    edge, top_k, top_p, by_count, mass, logits, counts, record, vocab_size, best, temperature,
    listing, num_listed, gathered, TILE_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the largest gap kept, at most the ``edge``, by all listed tokens.

    Passes cut the range evenly, as numbers and as bits in turn. So it narrows fast for usual
    distributions of gaps, and any distribution takes at most 22 passes.
    """
    for phase in range(2):
        by_mass = phase == 1
        if tl.where(by_mass, top_p < 1, by_count):
            # The first pass gives the mass that top-k keeps.
            share = tl.where(by_count, float("nan"), top_p * mass)
            target = tl.where(by_mass, share, top_k.to(tl.float64))
            low = tl.full((), -1, tl.int32)
            high = edge
            before = tl.full((), 0.0, tl.float64)
            upto = tl.full((), float("inf"), tl.float64)
            num_inside = upto
            by_value = low < 0
            while (high - low > 1) & (num_inside > CAPACITY):
                pivots = _pivots(low, high, by_value)
                sums = _sums_up_to(
                    pivots, by_mass, logits, counts, record, vocab_size, best, temperature,
                    listing, num_listed, TILE_GROUPS,
                )  # fmt: skip
                target = tl.where(target != target, top_p * tl.max(sums), target)
                reached = sums >= target
                high = tl.min(tl.where(reached, pivots, high))
                low = tl.max(tl.where(reached, low, pivots))
                before = tl.max(tl.where(reached, before, sums))
                upto = tl.min(tl.where(reached, sums, upto))
                # No token inside weighs less than a token at the range's end.
                farthest = tl.minimum(high.to(tl.float32, bitcast=True), 2 * _WEIGHTLESS)
                most = (upto - before + _ROUNDING * upto) * tl.exp(farthest.to(tl.float64))
                num_inside = tl.where(by_mass, most, upto - before)
                by_value = not by_value
            if high - low > 1:
                bits = _gather(
                    low, high, logits, counts, record, vocab_size, best, temperature, listing,
                    num_listed, gathered, TILE_GROUPS, CAPACITY,
                )  # fmt: skip
                weights = tl.where(bits == NO_GAP, 0.0, _measure(bits, by_mass)).to(tl.float64)
                high = _least_reaching(bits, weights, before, target, low, high)
            edge = high
    return edge


@triton.jit
def largest_gap(
    top_k, top_p, mass, peaks, groups, num_groups, logits, counts, record, vocab_size, best,
    temperature, listing, gathered,
    LIKELIEST_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the bits of the largest gap that top-k, then top-p, keep of a row.

    ``peaks`` are the least gaps of its ``groups``, ``mass`` (float64) is the weight of all its
    tokens. ``listing`` (int32 [num_groups]) and ``gathered`` (int32 [CAPACITY]) are overwritten.
    """
    by_count = top_k < vocab_size
    # As many groups as fit, ties included: all groups before the first that does not fit.
    bound = tl.full((), INF_BITS, tl.int32)
    if num_groups > LIKELIEST_GROUPS:
        bound = _peak_rank(peaks, LIKELIEST_GROUPS + 1) - 1
    num_listed = _list_groups(listing, peaks <= bound, groups)
    bits = _listed_gaps(
        logits, counts, record, vocab_size, best, temperature, listing, 0, num_listed,
        LIKELIEST_GROUPS,
    )  # fmt: skip
    edge, found = _among_likeliest(bits, bound, top_k, top_p, by_count, mass)
    if not found:
        edge = tl.full((), INF_BITS, tl.int32)
        if by_count:
            if top_k <= num_groups:
                edge = _peak_rank(peaks, top_k)
        else:
            # Tokens of less weight have less than 1 - top_p in total, even if all tokens were such.
            spare = (1 - top_p) * mass / (num_groups * GROUP)
            farthest = tl.maximum(-tl.log(spare), 0.0) + _SLACK
            edge = farthest.to(tl.float32).to(tl.int32, bitcast=True)
        num_listed = _list_groups(listing, peaks <= edge, groups)
        edge = _among_listed(
            edge, top_k, top_p, by_count, mass, logits, counts, record, vocab_size, best,
            temperature, listing, num_listed, gathered, TILE_GROUPS, CAPACITY,
        )  # fmt: skip
    return edge
