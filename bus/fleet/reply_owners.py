"""Finds out whether the listener that a job of the keyless tenant names is another tenant's."""

from __future__ import annotations

from millrace.bus import redis_keys
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.tenants import LOCAL_TENANT, may_reply_to


class ReplyOwners:
    """The keyless tenant may name any listener except those of tenants with a record in Redis."""

    def __init__(self, link: RedisLink | None) -> None:
        """Without a link no tenant has a record."""
        self._link = link

    async def is_foreign(self, tenant: str, reply: str) -> bool:
        """See ``bus.job_queue.IsForeignReply``. While Redis is unreachable, every tenant counts as
        one without a record."""
        if not may_reply_to(tenant, reply):
            return True
        is_bare = reply not in ("", tenant) and "/" not in reply
        if tenant != LOCAL_TENANT or not is_bare or self._link is None:
            return False
        try:
            return bool(await self._link.call("EXISTS", redis_keys.tenant_key(reply)))
        except RedisUnreachableError:
            return False
