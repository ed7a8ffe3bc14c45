"""Watch for keys that are revoked while a client uses them, noticed within seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Set
from functools import partial

from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.runtime.tasks import Tasks

_log = logging.getLogger(__name__)

# With the cache time of ``gateway.tenancy.identity`` it is well under the promised 5 s.
_INTERVAL_S = 1.5


class KeyWatch:
    """Watch that checks every 1.5 s which of the keys in use were revoked, and reports these.

    Every gateway checks its own clients' keys. While Redis is unreachable, nothing is known and no
    client is disconnected. Owns its task: ``start`` starts it, ``close`` ends it.
    """

    def __init__(
        self,
        link: RedisLink | None,
        clock: Clock,
        in_use: Callable[[], Iterable[str]],
        on_closed: Callable[[Set[str]], None],
    ) -> None:
        self._store = None if link is None else TenantStore(link)
        self._clock = clock
        self._in_use = in_use
        self._on_closed = on_closed
        self._tasks = Tasks()

    def start(self) -> None:
        if self._store is not None:
            look = partial(self._look, self._store)
            self._tasks.repeat(look, _INTERVAL_S, self._clock, "watch keys")

    async def close(self) -> None:
        await self._tasks.close()

    async def _look(self, store: TenantStore) -> None:
        key_ids = {key_id for key_id in self._in_use() if key_id}
        if not key_ids:
            return
        try:
            closed = await store.closed_keys(key_ids)
        except RedisUnreachableError:
            return  # the link logs that, once
        if closed:
            _log.info("keys in use were revoked", extra={"key_ids": sorted(closed)})
            self._on_closed(closed)
