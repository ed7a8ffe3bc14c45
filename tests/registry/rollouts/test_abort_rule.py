"""Conditions under which a rollout turns back."""

from __future__ import annotations

import pytest

from millrace.registry.rollouts.abort_rule import AbortRule, Seen, VersionOutcome
from millrace.schemas.errors import ParameterError


def _seen(num_errors: int = 0, ttfts_ms: tuple[float, ...] = (), num_requests: int = 0) -> Seen:
    outcomes = [VersionOutcome(0, is_error=True)] * num_errors
    outcomes += [VersionOutcome(0, is_error=False, ttft_ms=ttft) for ttft in ttfts_ms]
    outcomes += [VersionOutcome(0, is_error=False)] * (num_requests - len(outcomes))
    return Seen.of(outcomes)


def test_figures_are_shares_and_nearest_ranks() -> None:
    seen = _seen(1, tuple(float(number) for number in range(1, 101)), 200)
    assert seen.num_requests == 200
    assert seen.figures["error_rate"] == 0.005
    ranks = {name: seen.figures[name] for name in ("ttft_p50", "ttft_p95", "ttft_p99")}
    assert ranks == {"ttft_p50": 50.0, "ttft_p95": 95.0, "ttft_p99": 99.0}
    assert "tpot_p50" not in seen.figures
    assert Seen.of([]) == (0, {})


@pytest.mark.parametrize(
    ("text", "candidate", "stable", "breach"),
    [
        ("error_rate>0.01", _seen(1, num_requests=100), _seen(), None),
        ("error_rate>=0.01", _seen(1, num_requests=100), _seen(), "error_rate is 1.00%"),
        ("error_rate > 1%", _seen(2, num_requests=100), _seen(), "is 2.00%, over 1.00%"),
        ("ttft_p95>800ms", _seen(0, (900.0,)), _seen(), "ttft_p95 is 900 ms, over 800 ms"),
        ("ttft_p95>0.8s", _seen(0, (700.0,)), _seen(), None),
        (
            "ttft_p95>1.5x",
            _seen(0, (301.0,)),
            _seen(0, (200.0,)),
            "ttft_p95 is 301 ms, over 300 ms, 1.5 times that of the stable version",
        ),
        ("ttft_p95>1.5x", _seen(0, (300.0,)), _seen(0, (200.0,)), None),
        # Nothing to compare, nothing measured.
        ("ttft_p95>1.5x", _seen(0, (300.0,)), _seen(), None),
        ("tpot_p50>1us", _seen(0, (300.0,)), _seen(), None),
        ("error_rate>0.5 or ttft_p50>1ms", _seen(0, (2.0,)), _seen(), "ttft_p50 is 2 ms"),
        ("", _seen(9, num_requests=9), _seen(), None),
    ],
)
def test_a_breach_is_told_in_words(
    text: str, candidate: Seen, stable: Seen, breach: str | None
) -> None:
    told = AbortRule.parse(text).breach(candidate, stable)
    if breach is None:
        assert told is None
    else:
        assert told is not None
        assert breach in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("error_rate", "must be conditions such as"),
        ("error_rate<1", "must be conditions such as"),
        ("error_rate>0.1 and ttft_p95>1s", "must be conditions such as"),
        ("or", "must be conditions such as"),
        ("speed>1x", "no metric 'speed'; use one of error_rate, ttft_p50"),
        ("ttft_p95>3", "ttft_p95 is compared with a time"),
        ("error_rate>3ms", "error_rate is compared with a share"),
        ("error_rate>1.5", "an error_rate is at most 1"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        AbortRule.parse(text)
    assert caught.value.param == "abort_if"
