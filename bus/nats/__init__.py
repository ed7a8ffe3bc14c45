"""The bus on a real nats-server with JetStream."""

from bus.nats.bus import NatsBus, connect

__all__ = ["NatsBus", "connect"]
