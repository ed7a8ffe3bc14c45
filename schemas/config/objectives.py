"""What is promised to those who send requests."""

from __future__ import annotations

from millrace.schemas.config.section import Section

_MOST_DAYS = 397


class SloConfig(Section, frozen=True, kw_only=True):
    """Service level objectives, which the operations page measures requests by. Alerts of
    Prometheus have theirs in ``deploy/prometheus/alerts.yml``: change both."""

    ttft_ms: float = 1_000.0
    """The most that the first token of a request may take."""

    tpot_ms: float = 100.0
    """The most that a request's further tokens may take on average."""

    target: float = 0.95
    """Share of the requests that are to be answered within both, over 0 and under 1; the rest is
    the error budget."""

    window_s: int = 2_592_000
    """How long an error budget lasts: 30 days. Records are kept for 400."""

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"slo.target must be over 0 and under 1, got {self.target}")
        if not 0 < self.window_s <= _MOST_DAYS * 86_400:
            raise ValueError(
                f"slo.window_s must be from 1 to {_MOST_DAYS * 86_400}, got {self.window_s}"
            )
