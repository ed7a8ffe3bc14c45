"""Random numbers that depend on (seed, token index) alone, not on state, order or batch.

A key is mixed from the seed once, a counter from key and token index, and each number from the
counter and its lane, every time by a round of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014). The arithmetic is int64 with wrap-around, so that a
whole batch is drawn on its device. On a CPU numpy does it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Most bits for which k + 0.5 is exact, so that a draw is never 0 or 1.
_UNIFORM_BITS = 52


def _signed(value: int) -> int:
    """Return the int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def stream_key(seed: int) -> int:
    """Return the key of a seed's stream, as a signed 64-bit integer."""
    mixed = (seed + _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
    return _signed(mixed ^ (mixed >> 31))


def uniforms(keys: torch.Tensor, indices: torch.Tensor, num_lanes: int) -> torch.Tensor:
    """Draw ``num_lanes`` numbers in (0, 1) for each pair of ``keys`` and ``indices``.

    Both are int64 [num_rows]. Returns float64 [num_rows, num_lanes].
    """
    if keys.device.type == "cpu":
        return _uniforms_by_numpy(keys, indices, num_lanes)
    return uniforms_by_torch(keys, indices, num_lanes)


def uniforms_by_torch(keys: torch.Tensor, indices: torch.Tensor, num_lanes: int) -> torch.Tensor:
    """Draw as ``uniforms``, on any device."""
    counters = _mixed_((indices + 1).mul_(_signed(_GOLDEN)).add_(keys))
    lanes = torch.arange(1, num_lanes + 1, device=keys.device).mul_(_signed(_GOLDEN))
    bits = _shifted(_mixed_(counters[:, None] + lanes), 64 - _UNIFORM_BITS)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)


def _mixed_(bits: torch.Tensor) -> torch.Tensor:
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_MIX_1))
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_MIX_2))
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right with zeros, which torch's own shift of int64 does not."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _uniforms_by_numpy(keys: torch.Tensor, indices: torch.Tensor, num_lanes: int) -> torch.Tensor:
    """Draw in unsigned integers by numpy: half of torch's time, a third for few draws."""
    golden = np.uint64(_GOLDEN)
    counters = (indices.numpy() + 1).view(np.uint64) * golden + keys.numpy().view(np.uint64)
    lanes = np.arange(1, num_lanes + 1, dtype=np.uint64) * golden
    bits = _mix_(_mix_(counters)[:, None] + lanes)
    bits >>= np.uint64(64 - _UNIFORM_BITS)
    draws = bits.astype(np.float64)
    draws += 0.5
    draws *= 2.0**-_UNIFORM_BITS
    return torch.from_numpy(draws)


def _mix_(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_MIX_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_MIX_2)
    bits ^= bits >> np.uint64(31)
    return bits
