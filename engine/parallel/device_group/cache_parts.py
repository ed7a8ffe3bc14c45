"""The parts of the KV cache that the other ranks have on their devices."""

from __future__ import annotations

from millrace.engine.kv.cache_commands import CacheCommand, CheckBlocks, ReserveSlots
from millrace.engine.parallel.device_group.lead import Lead
from millrace.schemas.errors import ConfigError


class DeviceParts:
    """See ``OtherParts``: what is to be done with blocks goes the way of the steps, and so is done
    between those that were launched before and after it."""

    def __init__(self, lead: Lead, block_bytes: int) -> None:
        """``block_bytes``: of a block in all of these parts."""
        self.block_bytes = block_bytes
        self._lead = lead

    def tell(self, command: CacheCommand) -> None:
        """See ``OtherParts``. Raises ConfigError for slots that a rank has no memory for."""
        self._lead.post(command)
        if isinstance(command, ReserveSlots):
            with self._lead.together():
                [has_memory] = self._lead.ranks.hosts.least([1])
            if not has_memory:
                raise ConfigError(
                    f"A rank has no memory of the host for its part of {command.num_slots} blocks. "
                    "Lower engine.host_cache_bytes."
                )

    def ask(self, command: CheckBlocks) -> list[bool]:
        """See ``OtherParts``."""
        self._lead.post(command)
        with self._lead.together():
            return [flag == 1 for flag in self._lead.ranks.hosts.least([1] * len(command.blocks))]
