"""Random numbers of ``engine.kernels.random_stream``, which depend on (key, index, lane) only."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mixed(bits):
    """Return ``bits`` after a round of SplitMix64."""
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def exponentials(key, index, lanes):
    """Return exponential variates, float64, of ``lanes`` (from 0 on, any shape) of a draw."""
    golden = tl.full((), GOLDEN, tl.uint64)
    counter = (index + 1).to(tl.uint64) * golden + key.to(tl.uint64, bitcast=True)
    bits = _mixed(_mixed(counter) + (lanes + 1).to(tl.uint64) * golden) >> 12
    # Integers of 52 bits: adding one half is exact, and no draw is 0 or 1.
    return -tl.log((bits.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16)
