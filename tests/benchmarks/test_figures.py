"""The arithmetic of the benchmarks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.figures import Figures, RequestTimes, figures_of, medians, percentile

VALUES = st.lists(st.floats(0, 1e6), min_size=1)


@given(VALUES, st.floats(0.01, 1.0))
def test_a_percentile_is_the_least_value_that_covers_its_share(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_percentiles_of_nothing_and_out_of_range() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0], 0.99) == 3.0
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], 0.0)


def test_figures_are_timed_from_the_first_request_to_the_last_token() -> None:
    requests = [
        RequestTimes(sent_s=10.0, parts_s=(10.1, 10.2, 10.5), num_tokens=3),
        RequestTimes(sent_s=10.5, parts_s=(10.8, 12.0), num_tokens=5),
    ]
    figures = figures_of(requests)
    assert figures.tokens_per_s == pytest.approx(8 / 2.0)
    assert figures.ttft_p50_ms == pytest.approx(100)
    assert figures.ttft_p99_ms == pytest.approx(300)
    assert figures.itl_p50_ms == pytest.approx(300)
    assert figures.itl_p99_ms == pytest.approx(1200)


def test_medians_take_each_figure_by_itself() -> None:
    runs = [
        Figures(tokens_per_s=rate, ttft_p50_ms=-rate, ttft_p99_ms=0, itl_p50_ms=1, itl_p99_ms=2)
        for rate in (1.0, 5.0, 2.0)
    ]
    assert medians(runs).tokens_per_s == 2.0
    assert medians(runs).ttft_p50_ms == -2.0
