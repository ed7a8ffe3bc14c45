"""A histogram of gaps between tokens that costs a fraction of a microsecond to add to."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.runtime.histogram import PER_TOKEN_S, Histogram


class TokenGaps(Collector):
    """Time between tokens as clients get them. Tokens that arrive together share their gap."""

    def __init__(self) -> None:
        self._tally = Histogram(PER_TOKEN_S)

    def add(self, gap_s: float, num_tokens: int) -> None:
        """``num_tokens`` arrived ``gap_s`` after the ones before them."""
        self._tally.add(gap_s / num_tokens, num_tokens)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "millrace_inter_token_latency_seconds",
            "Time between tokens as clients get them",
        )
        self._tally.add_to(family)
        yield family
