"""Arrival times of an open loop's requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millrace.schemas.errors import ConfigError

_MOST_ARRIVALS = 100_000_000
_SEED_STREAM = 0xA221


def check_number_of_arrivals(rate_per_s: float, duration_s: float) -> None:
    """Raise ConfigError for more arrivals than fit into memory: their times are drawn at once."""
    if rate_per_s * duration_s > _MOST_ARRIVALS:
        raise ConfigError(
            f"--rate and --duration make more than {_MOST_ARRIVALS:,} requests; lower one of them"
        )


def arrival_times(
    rate_per_s: float,
    burstiness: float,
    duration_s: float | None,
    num_requests: int | None,
    seed: int,
) -> npt.NDArray[np.float64]:
    """Return ascending arrival times in seconds from the start: up to ``duration_s``, or
    ``num_requests`` of them.

    Gaps are gamma distributed with mean ``1 / rate_per_s`` and shape ``burstiness``: 1 is a Poisson
    process. Every process of a run draws the same times and takes its own share of them.
    """
    source = np.random.default_rng((_SEED_STREAM, seed))

    def gaps(count: int) -> npt.NDArray[np.float64]:
        return source.gamma(burstiness, 1.0 / (rate_per_s * burstiness), count)

    if num_requests is not None:
        return np.cumsum(gaps(num_requests))
    assert duration_s is not None
    block = max(16, int(rate_per_s * duration_s * 1.2))
    times = np.cumsum(gaps(block))
    while times[-1] < duration_s:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps(block))])
    return times[times < duration_s]
