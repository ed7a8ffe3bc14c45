"""Settings of telemetry: rows, metrics, traces."""

from __future__ import annotations

from millrace.schemas.config.section import Section
from millrace.schemas.redaction import Secret


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """Settings of writes to ClickHouse and of usage rollups."""

    batch_rows: int = 5_000
    """Rows after which a batch is written."""

    batch_interval_s: float = 0.5
    """Longest wait of a batch's first row for further rows, in seconds. With few rows, batches are
    up to six times as far apart, so that writes take 2 % of the time."""

    rollup_interval_s: float = 2.0
    """Seconds until a minute's usage is computed from its rows; up to five times as long while the
    computation takes more than 2 % of the time."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    """Address at which a process serves ``/metrics`` to Prometheus and ``/healthz`` to everyone. A
    gateway also serves both on its own port, which several gateways may share."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """Port to listen on; 0: none."""

    token: Secret = ""
    """Token that ``/metrics`` requires as ``Authorization: Bearer …``, if set. An address that
    other machines can reach needs a token or ``public``."""

    public: bool = False
    """Serve ``/metrics`` to every client without a token."""


class TracingConfig(Section, frozen=True, kw_only=True):
    """Distributed traces."""

    endpoint: str = ""
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP
    (``http://127.0.0.1:4318``); empty: no traces."""

    sample_ratio: float = 1.0
    """Share of the traces started here that are recorded, 0 to 1. A trace started by a caller is
    recorded if the caller records it."""


_MOST_DAYS = 397


class SloConfig(Section, frozen=True, kw_only=True):
    """Service level objectives of the operations page. Alerts of Prometheus have their own in
    ``deploy/prometheus/alerts.yml``: change both."""

    ttft_ms: float = 1_000.0
    """Objective for the time to first token of a request, in milliseconds."""

    tpot_ms: float = 100.0
    """Objective for the mean time per further token of a request, in milliseconds."""

    target: float = 0.95
    """Share of requests that meet both objectives, above 0 and below 1; the rest is the error
    budget."""

    window_s: int = 2_592_000
    """Window of the error budget in seconds; default 30 days. Records are kept for 400 days."""

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"slo.target must be over 0 and under 1, got {self.target}")
        if not 0 < self.window_s <= _MOST_DAYS * 86_400:
            raise ValueError(
                f"slo.window_s must be from 1 to {_MOST_DAYS * 86_400}, got {self.window_s}"
            )
