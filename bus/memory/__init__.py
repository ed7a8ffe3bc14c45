"""The bus without a server: several clients on one broker in one process, on a given clock."""

from millrace.bus.memory.broker import MemoryBroker
from millrace.bus.memory.bus import MemoryBus

__all__ = ["MemoryBroker", "MemoryBus"]
