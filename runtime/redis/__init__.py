"""A client of Redis as configured, and one connection that never makes its callers wait long."""

from millrace.runtime.imports import without

# Its client's own metrics, which nobody reads here, are a tenth of a second of a start.
with without("opentelemetry.sdk.metrics"):
    import redis.asyncio as _asyncio  # noqa: F401
