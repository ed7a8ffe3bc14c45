"""Directories that the processes of a system share through Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from millrace.bus import redis_keys
from millrace.bus.fleet.adapters import AdapterDirectory
from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.tenants import LOCAL_TENANT, may_reply_to


@dataclass(frozen=True)
class Directories:
    """Adapters, rollouts, and owners of listeners.

    ``start`` begins to watch adapters and rollouts. ``close`` ends that.
    """

    adapters: AdapterDirectory
    rollouts: RolloutDirectory
    reply_owners: ReplyOwners

    @classmethod
    def of(cls, link: RedisLink | None, clock: Clock) -> Self:
        """Create the directories; empty without a link."""
        return cls(AdapterDirectory(link, clock), RolloutDirectory(link, clock), ReplyOwners(link))

    async def start(self) -> None:
        for one in (self.adapters, self.rollouts):
            await one.look()
            one.start()

    async def close(self) -> None:
        await self.adapters.close()
        await self.rollouts.close()


class ReplyOwners:
    """Owners of listeners.

    The keyless tenant may name any listener except those of tenants with a record in Redis.
    """

    def __init__(self, link: RedisLink | None) -> None:
        """Create the owners. Without a link no tenant has a record."""
        self._link = link

    async def is_foreign(self, tenant: str, reply: str) -> bool:
        """Return whether a listener is another tenant's. See ``bus.job_queue.IsForeignReply``.

        While Redis is unreachable, every tenant counts as one without a record.
        """
        if not may_reply_to(tenant, reply):
            return True
        is_bare = reply not in ("", tenant) and "/" not in reply
        if tenant != LOCAL_TENANT or not is_bare or self._link is None:
            return False
        try:
            return bool(await self._link.call("EXISTS", redis_keys.tenant_key(reply)))
        except RedisUnreachableError:
            return False
