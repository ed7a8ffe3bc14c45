"""Memory bus for one process: several clients on one broker, on a given clock."""

from millrace.bus.memory.broker import MemoryBroker
from millrace.bus.memory.bus import MemoryBus

__all__ = ["MemoryBroker", "MemoryBus"]
