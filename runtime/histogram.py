"""Fast histograms, and their usual bounds.

Adding a value costs a fraction of a microsecond. The bounds of first tokens, of time per token and
of whole requests are those of OpenTelemetry's conventions for generative AI, with finer ones below
and longer ones above, so figures of several systems can be compared.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.samples import Exemplar

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
    """Histogram: counts between bounds, their sum, and the last exemplar of each bucket.

    One thread adds and reads.
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self._sum = 0.0

    def add(self, value: float, count: int = 1, trace_id: str = "") -> None:
        """Add ``count`` equal values.

        ``trace_id`` is their recorded trace, and makes an exemplar.
        """
        place = bisect_left(self._bounds, value)
        self._counts[place] += count
        self._sum += value * count
        if trace_id:
            self._exemplars[place] = Exemplar({"trace_id": trace_id}, value, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Add the histogram to ``family`` as one series."""
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        total = 0
        for place, bound in enumerate((*map(str, self._bounds), "+Inf")):
            total += self._counts[place]
            exemplar = self._exemplars.get(place)
            buckets.append((bound, total) if exemplar is None else (bound, total, exemplar))
        family.add_metric(labels, buckets, self._sum)
