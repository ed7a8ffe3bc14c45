"""The bus on a real nats-server with JetStream."""

from millrace.runtime.imports import without

# Its client's transport over WebSocket, which is not used here, is a tenth of a second of a start.
with without("aiohttp"):
    import nats.aio.transport as _transport  # noqa: F401

from millrace.bus.nats.bus import NatsBus, connect

__all__ = ["NatsBus", "connect"]
