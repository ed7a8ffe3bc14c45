"""Random numbers that depend on (seed, token index) alone: no state, no order, no company.

A key is mixed from the seed once, a counter from key and token index, and each number from the
counter and its lane, every time by a round of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), in int64 arithmetic that wraps, so that a whole
batch is drawn on its device.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# The most for which k + 0.5 is exact, so that a draw is never 0 nor 1.
_UNIFORM_BITS = 52


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def stream_key(seed: int) -> int:
    """The key of a seed's stream, as a signed 64-bit integer."""
    mixed = (seed + _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
    return _signed(mixed ^ (mixed >> 31))


def uniforms(keys: torch.Tensor, indices: torch.Tensor, num_lanes: int) -> torch.Tensor:
    """``num_lanes`` draws in (0, 1) for each pair of int64 ``keys`` and ``indices`` [num_rows]:
    float64 [num_rows, num_lanes]."""
    counters = _mixed(keys + (indices + 1) * _signed(_GOLDEN))
    lanes = torch.arange(1, num_lanes + 1, device=keys.device) * _signed(_GOLDEN)
    bits = _shifted(_mixed(counters[:, None] + lanes), 64 - _UNIFORM_BITS)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """A shift to the right that brings in zeros, which torch's own does not on int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
