"""LoRA adapters in Redis, and each process's copy of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millrace.bus import redis_keys
from millrace.bus.fleet.watched_store import WatchedStore
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, Script
from millrace.schemas.models.adapters import (
    SEPARATOR,
    Adapter,
    AdapterNotFoundError,
    AdapterTakenError,
)

# Time for which requests of a removed adapter may still run and move.
_FORMER_S = 7 * 86_400

# KEYS: the adapters, the change counter, the key of the former adapter. ARGV: name, JSON, whether
# it may replace another, that one's version, seconds to keep it.
_ADD = Script(
    """
local former = redis.call('HGET', KEYS[1], ARGV[1])
if former and ARGV[3] == '0' then return 0 end
if former and cjson.decode(former).version ~= ARGV[4] then return 0 end
if former then redis.call('SET', KEYS[3], former, 'EX', ARGV[5]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('INCR', KEYS[2])
return 1
"""
)

# KEYS as above. ARGV: name, version, seconds to keep it.
_REMOVE = Script(
    """
local former = redis.call('HGET', KEYS[1], ARGV[1])
if not former or cjson.decode(former).version ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[3], former, 'EX', ARGV[3])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('INCR', KEYS[2])
return 1
"""
)

_decoder = msgspec.json.Decoder(Adapter)


class AdapterStore:
    """Store of adapters in Redis. Calls raise RedisUnreachableError. It does not own the link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def add(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Add an adapter.

        A replaced adapter is kept for the requests that run with it. Raises AdapterTakenError if
        the name is taken and ``replace`` is False.
        """
        while True:
            former = await self._get(adapter.name)
            if former is not None and not replace:
                raise AdapterTakenError(adapter.name)
            version = "" if former is None else former.version
            stored = await self._link.evaluate(
                _ADD,
                _keys(adapter.name, version),
                [adapter.name, msgspec.json.encode(adapter), int(replace), version, _FORMER_S],
            )
            if stored:
                return

    async def remove(self, name: str) -> Adapter:
        """Remove an adapter and return it. It is kept for the requests that run with it.

        Raises AdapterNotFoundError.
        """
        while True:
            known = await self._get(name)
            if known is None:
                raise AdapterNotFoundError(name)
            keys = _keys(name, known.version)
            if await self._link.evaluate(_REMOVE, keys, [name, known.version, _FORMER_S]):
                return known

    async def all(self) -> list[Adapter]:
        """Return all adapters, sorted by name."""
        found: list[bytes] = await self._link.call("HVALS", redis_keys.ADAPTERS_KEY)
        return sorted(map(_decoder.decode, found), key=lambda one: one.name)

    async def number_of_changes(self) -> int:
        """Return a number that differs after each change."""
        found: bytes | None = await self._link.call("GET", redis_keys.ADAPTER_CHANGES_KEY)
        return int(found or 0)

    async def find(self, name: str, version: str = "") -> Adapter | None:
        """Return an adapter; with ``version``, the adapter of that version, also a former one."""
        known = await self._get(name)
        if not version or (known is not None and known.version == version):
            return known
        former: bytes | None = await self._link.call(
            "GET", redis_keys.former_adapter_key(name, version)
        )
        return None if former is None else _decoder.decode(former)

    async def _get(self, name: str) -> Adapter | None:
        found: bytes | None = await self._link.call("HGET", redis_keys.ADAPTERS_KEY, name)
        return None if found is None else _decoder.decode(found)


class AdapterDirectory(WatchedStore[Adapter]):
    """Adapters that one process knows, with lookups of newer ones."""

    def __init__(self, link: RedisLink | None, clock: Clock) -> None:
        """Create a directory; empty without a link."""
        self.store = None if link is None else AdapterStore(link)
        super().__init__(self.store, clock, "adapters", lambda one: one.name)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Known adapters by name."""
        return self._items

    def known(self, name: str, tenant: str) -> Adapter | None:
        """Return the adapter that a client names, if its tenant may use it.

        The name is the adapter's own, or ``model:adapter``.
        """
        model, separator, own_name = name.rpartition(SEPARATOR)
        for adapter in (self.adapters.get(name), self.adapters.get(own_name)):
            if adapter is None or not adapter.is_for(tenant):
                continue
            if adapter.name == name or (separator and adapter.model == model):
                return adapter
        return None

    async def find(self, name: str, tenant: str) -> Adapter | None:
        """Return an adapter like ``known``, including new adapters."""
        adapter = self.known(name, tenant)
        if adapter is None and self.store is not None:
            await self.look()
            adapter = self.known(name, tenant)
        return adapter

    async def version(self, name: str, version: str) -> Adapter | None:
        """Return an adapter of a version, by default the newest. Raises RedisUnreachableError."""
        adapter = self.adapters.get(name)
        if adapter is not None and version == adapter.version:
            return adapter
        return None if self.store is None else await self.store.find(name, version)


def _keys(name: str, former_version: str) -> list[str]:
    return [
        redis_keys.ADAPTERS_KEY,
        redis_keys.ADAPTER_CHANGES_KEY,
        redis_keys.former_adapter_key(name, former_version),
    ]
