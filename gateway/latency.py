"""A histogram of gaps between tokens that costs a fraction of a microsecond to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class GapCounts(Collector):
    """Time between tokens as clients get them. Tokens that arrive together share their gap."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, gap_s: float, num_tokens: int) -> None:
        """``num_tokens`` arrived ``gap_s`` after the ones before them."""
        self._counts[bisect_left(_BOUNDS_S, gap_s / num_tokens)] += num_tokens
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound_s, count in zip((*_BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound_s == float("inf") else str(bound_s), total))
        family = HistogramMetricFamily(
            "millrace_inter_token_latency_seconds",
            "Time between tokens as clients get them",
        )
        family.add_metric([], buckets, self._sum_s)
        yield family
