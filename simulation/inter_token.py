"""The gaps between tokens, of all streams of a simulation together."""

from __future__ import annotations

import math
from collections import Counter

# Each bin is half a percent wide: percentiles are right to within that.
_BINS_PER_E = 200
_LEAST_S = 1e-9


class InterTokenLatencies:
    """How often gaps of which length were between one token of an answer and the next, wherever
    the two were made. Seconds of virtual time; a percentile is right to half a percent."""

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._sum_s = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, gap_s: float, count: int = 1) -> None:
        """``count`` times the same gap."""
        self._bins[_bin_of(gap_s)] += count
        self.count += count
        self._sum_s += gap_s * count
        self.max_s = max(self.max_s, gap_s)

    def add_growing(self, first_s: float, growth_s: float, num_gaps: int, count: int) -> None:
        """``num_gaps`` gaps one behind the other, each longer than the one before by ``growth_s``,
        of ``count`` streams alike."""
        done = 0
        while done < num_gaps:
            gap_s = first_s + done * growth_s
            num_alike = num_gaps - done
            if growth_s > 0:
                within_s = _end_of(_bin_of(gap_s)) - gap_s
                num_alike = min(num_alike, max(1, math.ceil(within_s / growth_s)))
            self.add(gap_s + (num_alike - 1) * growth_s / 2, num_alike * count)
            done += num_alike

    @property
    def mean_s(self) -> float:
        """0 without any."""
        return self._sum_s / self.count if self.count else 0.0

    def at(self, share: float) -> float:
        """The gap than which so large a share of all is shorter, in seconds; 0 without any."""
        left = share * self.count
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left < 0:
                return min(math.exp((number + 0.5) / _BINS_PER_E), self.max_s)
        return self.max_s


def _bin_of(gap_s: float) -> int:
    return math.floor(math.log(max(gap_s, _LEAST_S)) * _BINS_PER_E)


def _end_of(number: int) -> float:
    return math.exp((number + 1) / _BINS_PER_E)
