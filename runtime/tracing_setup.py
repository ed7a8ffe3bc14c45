"""Tracing as configured: to a collector, or none."""

from __future__ import annotations

from urllib.parse import urlsplit

from millrace.runtime.tracing import Tracing
from millrace.schemas.config import TracingConfig
from millrace.schemas.errors import ConfigError


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)


def open_tracing(config: TracingConfig, part: str, instance_id: str) -> Tracing | None:
    """Open tracing for a process of a part (``gateway``); None if it is off. Raises ConfigError."""
    if not config.endpoint:
        return None
    if config.sample_ratio > 1:
        raise ConfigError(f"tracing.sample_ratio is a share, at most 1, got {config.sample_ratio}")
    if not _is_http_url(config.endpoint):
        raise ConfigError(
            "tracing.endpoint must be the URL of a collector that takes OTLP over HTTP, such as "
            "http://127.0.0.1:4318."
        )
    # Imported on demand: it takes time and memory that processes without tracing save.
    from millrace.runtime.otlp import OtlpSink

    sink = OtlpSink(config.endpoint, f"millrace-{part}", instance_id)
    return Tracing(sink, config.sample_ratio)
