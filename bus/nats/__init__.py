"""Bus on a real nats-server with JetStream."""

from millrace.runtime.imports import without

# The client's unused WebSocket transport takes 0.1 s to import.
with without("aiohttp"):
    import nats.aio.transport as _transport  # noqa: F401

from millrace.bus.nats.bus import NatsBus, connect

__all__ = ["NatsBus", "connect"]
