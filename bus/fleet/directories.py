"""What the processes of a system know of one another's choices, as Redis keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from millrace.bus.fleet.adapters import AdapterDirectory
from millrace.bus.fleet.reply_owners import ReplyOwners
from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink


@dataclass(frozen=True)
class Directories:
    """The adapters, the rollouts of versions, and the tenants that own listeners. ``start`` begins
    to watch adapters and rollouts; ``close`` ends that."""

    adapters: AdapterDirectory
    rollouts: RolloutDirectory
    reply_owners: ReplyOwners

    @classmethod
    def of(cls, link: RedisLink | None, clock: Clock) -> Self:
        """Without a link there is nothing in them."""
        return cls(AdapterDirectory(link, clock), RolloutDirectory(link, clock), ReplyOwners(link))

    async def start(self) -> None:
        for one in (self.adapters, self.rollouts):
            await one.look()
            one.start()

    async def close(self) -> None:
        await self.adapters.close()
        await self.rollouts.close()
