"""Histograms that cost a fraction of a microsecond to add to, and the bounds that the field uses.

The bounds of first tokens, of time per token and of whole requests are those that OpenTelemetry's
conventions for generative AI ask for, with finer ones below and longer ones above, so that figures
of several systems can be laid side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.metrics_core import HistogramMetricFamily

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
PER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0),
)
DURATION_S = tuple(0.01 * 2**power for power in range(17))
STEP_S = tuple(0.0005 * 2**power for power in range(13))
ROWS = (1.0, 10.0, 100.0, 500.0, 1_000.0, 2_500.0, 5_000.0, 10_000.0, 25_000.0, 50_000.0)


class Histogram:
    """How many values fell between which bounds, and their sum. One thread adds and reads."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """``count`` times the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """One series of ``family``."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            buckets.append((str(bound), total))
        buckets.append(("+Inf", total + self._counts[-1]))
        family.add_metric(labels, buckets, self._sum)
