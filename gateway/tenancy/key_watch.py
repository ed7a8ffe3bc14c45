"""Keys that were revoked while a client uses them, noticed within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Set

from bus.tenancy.tenants import TenantStore
from runtime.clock import Clock
from runtime.redis.link import RedisLink, RedisUnreachableError

_log = logging.getLogger(__name__)

# With what a look-up is remembered for (``gateway.tenancy.identity``) it is well under the
# promised 5 s.
_INTERVAL_S = 1.5


class KeyWatch:
    """Asks every 1.5 s which of the keys in use open nothing any more, and tells of these.

    Every gateway asks for its own clients. While Redis is unreachable nothing is known and nobody
    is parted with. Owns its task: ``start`` makes it, ``close`` ends it.
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
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._store is not None:
            self._task = asyncio.create_task(self._watch(self._store), name="watch keys")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self, store: TenantStore) -> None:
        while True:
            await self._clock.sleep(_INTERVAL_S)
            try:
                await self._look(store)
            except RedisUnreachableError:
                continue  # the link logs that, once
            except Exception:  # noqa: BLE001 (it is told, and the next look counts)
                _log.exception("the keys in use could not be looked at")

    async def _look(self, store: TenantStore) -> None:
        key_ids = {key_id for key_id in self._in_use() if key_id}
        if not key_ids:
            return
        closed = await store.closed_keys(key_ids)
        if closed:
            _log.info("keys in use were revoked", extra={"key_ids": sorted(closed)})
            self._on_closed(closed)
