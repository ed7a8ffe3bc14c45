"""Tenants and their API keys in Redis."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from millrace.bus import redis_keys
from millrace.runtime.redis.link import RedisLink, Script
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    KEY_PREFIX,
    KeyRecord,
    LimitOverrides,
    TenantRecord,
    check_tenant,
    unknown_tenant,
)

_R = TypeVar("_R")

_KEY_ID_BYTES = 6
_KEY_ID = re.compile(rf"[0-9a-f]{{{2 * _KEY_ID_BYTES}}}")
_SECRET_BYTES = 32
_VERSION_BYTES = 8
ABSENT = b""

# A record is a hash of its JSON and a version, which differs after each change. An API key's hash
# also has the time of its last use. KEYS: the record's key, then sets. ARGV: the expected version
# (empty: no record), JSON, the new version, then the member to add to each set.
_WRITE = Script(
    """
if (redis.call('HGET', KEYS[1], 'version') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'version', ARGV[3])
for i = 2, #KEYS do redis.call('SADD', KEYS[i], ARGV[i + 2]) end
return 1
"""
)

# KEYS: an API key's record. ARGV: prefix of tenants' records, without the tenant's name.
_LOOK_UP = Script(
    """
local key = redis.call('HMGET', KEYS[1], 'record', 'version')
if not key[1] then return {} end
local owner = ARGV[1] .. cjson.decode(key[1]).tenant
local tenant = redis.call('HMGET', owner, 'record', 'version')
return {key[1], key[2], tenant[1] or '', tenant[2] or ''}
"""
)

# KEYS: records of API keys. Returns the places, from 1, of invalid keys.
_CLOSED = Script(
    """
local closed = {}
for i = 1, #KEYS do
  local record = redis.call('HGET', KEYS[i], 'record')
  local revoked = record and cjson.decode(record).revoked_ns
  if not record or (revoked and revoked ~= cjson.null) then closed[#closed + 1] = i end
end
return closed
"""
)
_CLOSED_AT_ONCE = 256

# KEYS: the records of tenants, then the sets of their API keys, in the same order. ARGV: prefix of
# API keys' records, without the id. Returns a list for each tenant: its record, then those of its
# keys.
_ACCOUNTS = Script(
    """
local found = {}
local num_tenants = #KEYS / 2
for i = 1, num_tenants do
  local records = {redis.call('HGET', KEYS[i], 'record') or ''}
  for _, key_id in ipairs(redis.call('SMEMBERS', KEYS[num_tenants + i])) do
    records[#records + 1] = redis.call('HGET', ARGV[1] .. key_id, 'record') or nil
  end
  found[i] = records
end
return found
"""
)
_ACCOUNTS_AT_ONCE = 100


class Stored(msgspec.Struct, Generic[_R], frozen=True):
    """Record with its version; ABSENT for a default record that is not stored."""

    record: _R
    version: bytes


class TenantStore:
    """Store of tenants and API keys.

    Calls raise RedisUnreachableError. It does not own the link.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def key(self, key_id: str) -> tuple[Stored[KeyRecord], Stored[TenantRecord]] | None:
        """Return the key, revoked or not, and its tenant, in one round trip."""
        found: list[bytes] = await self._link.evaluate(
            _LOOK_UP, [redis_keys.api_key_key(key_id)], [redis_keys.tenant_key("")]
        )
        if not found:
            return None
        key = decode_key(found[0])
        return Stored(key, found[1]), Stored(decode_tenant(key.tenant, found[2]), found[3])

    async def tenant(self, tenant: str) -> Stored[TenantRecord]:
        """Return the tenant's record, or the default record."""
        found: list[bytes | None] = await self._link.call(
            "HMGET", redis_keys.tenant_key(tenant), "record", "version"
        )
        return Stored(decode_tenant(tenant, found[0] or b""), found[1] or ABSENT)

    async def change_tenant(
        self, tenant: str, change: Callable[[TenantRecord], TenantRecord]
    ) -> TenantRecord:
        """Store the record returned by ``change``, which is called again after a concurrent change.

        Raises ValueError for an invalid tenant name.
        """
        check_tenant(tenant)
        key = redis_keys.tenant_key(tenant)
        while True:
            known = await self.tenant(tenant)
            changed = change(known.record)
            record = msgspec.json.encode(changed)
            if await self._link.evaluate(
                _WRITE,
                [key, redis_keys.TENANTS_KEY],
                [known.version, record, _new_version(), tenant],
            ):
                return changed

    async def create_key(
        self,
        tenant: str,
        now_ns: int,
        *,
        name: str = "",
        tier: Tier | None = None,
        limits: LimitOverrides | None = None,
        is_admin: bool = False,
    ) -> tuple[KeyRecord, str]:
        """Create a key; return it with its token, which cannot be read again.

        The tenant needs a record of its own to be listed.
        """
        key_id = secrets.token_hex(_KEY_ID_BYTES)
        secret = secrets.token_hex(_SECRET_BYTES)
        record = KeyRecord(
            key_id=key_id,
            digest=digest_of(secret),
            tenant=tenant,
            name=name,
            tier=tier,
            limits=limits or LimitOverrides(),
            is_admin=is_admin,
            created_ns=now_ns,
        )
        if not await self._write_key(record, ABSENT):
            return await self.create_key(
                tenant, now_ns, name=name, tier=tier, limits=limits, is_admin=is_admin
            )
        return record, f"{KEY_PREFIX}{key_id}-{secret}"

    async def revoke(self, key_id: str, now_ns: int) -> KeyRecord | None:
        """Revoke a key and return it; None if there is no such key."""
        while True:
            found = await self.key(key_id)
            if found is None:
                return None
            key, _ = found
            if key.record.revoked_ns is not None:
                return key.record
            revoked = msgspec.structs.replace(key.record, revoked_ns=now_ns)
            if await self._write_key(revoked, key.version):
                return revoked

    async def closed_keys(self, key_ids: Iterable[str]) -> set[str]:
        """Return the invalid keys among these: revoked or not found."""
        found: set[str] = set()
        asked = list(key_ids)
        for start in range(0, len(asked), _CLOSED_AT_ONCE):
            batch = asked[start : start + _CLOSED_AT_ONCE]
            keys = [redis_keys.api_key_key(key_id) for key_id in batch]
            places: list[int] = await self._link.evaluate(_CLOSED, keys)
            found.update(batch[place - 1] for place in places)
        return found

    async def tenants(self) -> list[str]:
        """Return the names of all tenants with a record, sorted."""
        found: list[bytes] = await self._link.call("SMEMBERS", redis_keys.TENANTS_KEY)
        return sorted(name.decode() for name in found)

    async def accounts(self) -> AsyncIterator[tuple[str, TenantRecord, list[KeyRecord]]]:
        """Yield each tenant with a record and its API keys; 100 tenants in a round trip."""
        names = await self.tenants()
        for start in range(0, len(names), _ACCOUNTS_AT_ONCE):
            batch = names[start : start + _ACCOUNTS_AT_ONCE]
            records = [redis_keys.tenant_key(name) for name in batch]
            key_ids = [redis_keys.tenant_api_keys_key(name) for name in batch]
            found: list[list[bytes]] = await self._link.evaluate(
                _ACCOUNTS, [*records, *key_ids], [redis_keys.api_key_key("")]
            )
            for name, (record, *keys) in zip(batch, found, strict=True):
                yield name, decode_tenant(name, record), [decode_key(key) for key in keys]

    async def keys_of(self, tenant: str) -> list[KeyRecord]:
        """Return the tenant's keys, the oldest first."""
        key_ids: list[bytes] = await self._link.call(
            "SMEMBERS", redis_keys.tenant_api_keys_key(tenant)
        )
        records: list[bytes | None] = await asyncio.gather(
            *(
                self._link.call("HGET", redis_keys.api_key_key(key_id.decode()), "record")
                for key_id in key_ids
            )
        )
        keys = [decode_key(record) for record in records if record is not None]
        return sorted(keys, key=lambda key: (key.created_ns, key.key_id))

    async def note_use(self, key_id: str, now_ns: int) -> None:
        """Record a use of the key."""
        await self._link.call("HSET", redis_keys.api_key_key(key_id), "used_ns", str(now_ns))

    async def uses_of(self, key_ids: Iterable[str]) -> dict[str, int]:
        """Return the last use of each key (ns since 1970); unused keys are left out."""
        asked = list(key_ids)
        found: list[bytes | None] = await asyncio.gather(
            *(
                self._link.call("HGET", redis_keys.api_key_key(key_id), "used_ns")
                for key_id in asked
            )
        )
        return {key_id: int(used) for key_id, used in zip(asked, found, strict=True) if used}

    async def _write_key(self, record: KeyRecord, version: bytes) -> bool:
        keys = [
            redis_keys.api_key_key(record.key_id),
            redis_keys.tenant_api_keys_key(record.tenant),
        ]
        raw = msgspec.json.encode(record)
        return bool(
            await self._link.evaluate(_WRITE, keys, [version, raw, _new_version(), record.key_id])
        )


def digest_of(secret: str) -> str:
    """Return the stored digest of a secret.

    It has 256 random bits, so one round of SHA-256 is enough.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def parse_token(token: str) -> tuple[str, str] | None:
    """Return key id and secret; None for a string that is not a Millrace token."""
    if not token.startswith(KEY_PREFIX):
        return None
    key_id, _, secret = token.removeprefix(KEY_PREFIX).partition("-")
    return (key_id, secret) if _KEY_ID.fullmatch(key_id) and secret else None


def decode_key(raw: bytes) -> KeyRecord:
    return msgspec.json.decode(raw, type=KeyRecord)


def decode_tenant(tenant: str, raw: bytes) -> TenantRecord:
    """Decode a tenant's record; ``raw`` is empty for a tenant without one."""
    return msgspec.json.decode(raw, type=TenantRecord) if raw else unknown_tenant(tenant)


def _new_version() -> str:
    return secrets.token_hex(_VERSION_BYTES)
