"""What is written and shown of the system: rows, metrics, traces."""

from __future__ import annotations

from millrace.schemas.config.section import Section
from millrace.schemas.redaction import Secret


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """When rows are written to ClickHouse, and usage is summed."""

    batch_rows: int = 5_000
    """Rows at which a batch is written."""

    batch_interval_s: float = 0.5
    """How long the first row of a batch waits at most for the others. While few rows come, batches
    are up to six times as far apart, so that writing them takes 2 % of the time."""

    rollup_interval_s: float = 2.0
    """How soon the usage of a minute follows its rows, up to five times later while computing it
    takes more than 2 % of the time."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    """Where a process serves ``/metrics`` to Prometheus, and ``/healthz``, which is open to all. A
    gateway serves them on its own port, too, which several gateways may share."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """Port to listen on; 0: none."""

    token: Secret = ""
    """What ``/metrics`` demands as ``Authorization: Bearer …``, if set. An address that other
    machines can reach needs one, or ``public``."""

    public: bool = False
    """Whoever reaches ``/metrics`` may read it without a token."""


class TracingConfig(Section, frozen=True, kw_only=True):
    """Distributed traces."""

    endpoint: str = ""
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP
    (``http://127.0.0.1:4318``); empty: no traces."""

    sample_ratio: float = 1.0
    """Share of the traces begun here that are recorded, 0 to 1. One that a caller began is recorded
    if the caller records it."""


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
