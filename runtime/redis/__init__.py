"""Redis client as configured, and a link with bounded waits."""

from millrace.runtime.imports import without

# The client's own metrics are unused and take 0.1 s to import.
with without("opentelemetry.sdk.metrics"):
    import redis.asyncio as _asyncio  # noqa: F401
