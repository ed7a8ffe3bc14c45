"""Callers of requests, identified by their API keys, and their permissions."""

from __future__ import annotations

import contextlib
import hmac
from collections import OrderedDict
from typing import TypeVar

import msgspec
from redis.exceptions import ResponseError

from millrace.bus.tenancy.tenants import TenantStore, digest_of, parse_token
from millrace.gateway.transport.http import CALLER, Scope
from millrace.gateway.transport.origins import is_forwarded
from millrace.runtime.addresses import is_loopback
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    KEY_PREFIX,
    LOCAL_TENANT,
    KeyRecord,
    TenantRecord,
    effective_tier,
    limits_of,
    lower_limit,
)

# The script that reserves checks the key again, so this is only for requests that cost nothing.
_KEY_FRESH_S = 2.0
_CONSENT_FRESH_S = 5.0
_KNOWN_WHILE_AWAY_S = 3600.0
_MAX_KNOWN = 10_000
_NOTE_USE_S = 60.0
_LAST_NOTES_S = 0.5
_V = TypeVar("_V")
_RETRY_AFTER_S = 2.0


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Tenant and the key that it came with (empty: none, for loopback only).

    ``tier`` is the most urgent tier of its requests; ``context_tokens`` bounds prompt and
    completion of a request together (None: the model's window does). An admin may see other
    tenants' figures.
    """

    tenant: str = LOCAL_TENANT
    tier: Tier = Tier.ENTERPRISE
    key_id: str = ""
    context_tokens: int | None = None
    is_admin: bool = False


LOCAL = Caller(is_admin=True)


class AuthenticationError(MillraceError, code="invalid_api_key", http_status=401):
    """Request without a required API key, or with an invalid one."""

    def __init__(self, message: str, whose: Caller | None = None) -> None:
        """Create the error; ``whose`` is the caller of the key, if the key exists."""
        super().__init__(message)
        self.whose = whose
        self.headers = [(b"www-authenticate", b'Bearer realm="millrace"')]


class InsufficientPermissionsError(MillraceError, code="insufficient_permissions", http_status=403):
    """Valid key without permission for this."""


class KeysUnreachableError(RedisUnreachableError):
    """Key without a recent look-up that cannot be looked up now."""

    retry_after_s = _RETRY_AFTER_S


class _Known(msgspec.Struct, frozen=True):
    key: KeyRecord
    tenant: TenantRecord
    looked_up_s: float


class Identity:
    """Identification of callers by their API keys, which are cached for a few seconds.

    While Redis is unreachable, keys that were valid within the last hour are accepted. Consent to
    transcripts is unknown then, so none are kept.
    """

    def __init__(self, link: RedisLink | None, config: GatewayConfig, clock: Clock) -> None:
        self._store = None if link is None else TenantStore(link)
        self._tiers = config.tiers
        self._clock = clock
        self.demands_keys = demands_keys(config)
        # Remote callers are not the gateway's operator.
        self._is_local = is_loopback(config.host)
        self._demands_keys_from_afar = config.auth != "none"
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._noted_s: OrderedDict[str, float] = OrderedDict()  # when uses of keys were noted
        self._notes = Tasks()
        self._consents: OrderedDict[str, tuple[bool, float]] = OrderedDict()

    async def keeps_transcripts(self, tenant: str) -> bool:
        """Return whether the tenant wants its transcripts kept, as of a few seconds ago at most.
        Checked for each request: a socket may stay open for days.
        """
        if self._store is None:
            return False
        known = self._consents.get(tenant)
        if known is not None and self._clock.monotonic() - known[1] <= _CONSENT_FRESH_S:
            return known[0]
        try:
            stored = await self._store.tenant(tenant)
        except RedisUnreachableError:
            return False
        return self._note_consent(tenant, stored.record)

    def _note_consent(self, tenant: str, record: TenantRecord) -> bool:
        _remember(self._consents, tenant, (record.keep_transcripts, self._clock.monotonic()))
        return record.keep_transcripts

    def demands_key_of(self, scope: Scope) -> bool:
        """Return whether the sender of this request has to show a key. A proxied request may come
        from anywhere, even to a gateway that only this machine can reach.
        """
        return self._demands_key(forwarded=is_forwarded(scope))

    def _demands_key(self, *, forwarded: bool) -> bool:
        return self.demands_keys or (forwarded and self._demands_keys_from_afar)

    async def caller(self, scope: Scope) -> Caller:
        """Return the caller of the key in the request's headers, and note it in the scope. Raises
        as ``caller_of_token`` does.
        """
        try:
            caller = await self.caller_of_token(token_of(scope), forwarded=is_forwarded(scope))
        except AuthenticationError as error:
            scope[CALLER] = error.whose
            raise
        scope[CALLER] = caller
        return caller

    async def caller_of_token(self, token: str | None, *, forwarded: bool = False) -> Caller:
        """Return the caller of this key, or the local caller without one. Raises
        AuthenticationError, or KeysUnreachableError for a key that cannot be looked up now.
        """
        is_keyless = token is None or not token.startswith(KEY_PREFIX)
        if is_keyless and not self._demands_key(forwarded=forwarded):
            is_near = self._is_local and not forwarded
            return LOCAL if is_near else msgspec.structs.replace(LOCAL, is_admin=False)
        if not token:
            raise AuthenticationError(
                "This gateway demands an API key. Send it as Authorization: Bearer mr-…"
            )
        parts = parse_token(token)
        known = None if parts is None else await self._look_up(parts[0])
        if (
            parts is None
            or known is None
            or not hmac.compare_digest(known.key.digest, digest_of(parts[1]))
        ):
            raise unknown_key()
        key_id = known.key.key_id
        if known.key.revoked_ns is not None:
            raise revoked_key(key_id, self._caller(known))
        self._note_use(key_id)
        return self._caller(known)

    async def close(self) -> None:
        """Wait for notes in progress, and release the rest."""
        await self._notes.close(_LAST_NOTES_S)

    def _note_use(self, key_id: str) -> None:
        """Note the use of a key at most once a minute, in the background."""
        now_s = self._clock.monotonic()
        if self._store is None or now_s - self._noted_s.get(key_id, -_NOTE_USE_S) < _NOTE_USE_S:
            return
        _remember(self._noted_s, key_id, now_s)
        self._notes.spawn(self._write_use(self._store, key_id), f"note a use of {key_id}")

    async def _write_use(self, store: TenantStore, key_id: str) -> None:
        # A failed note refuses no request: Redis may be full, or unreachable.
        with contextlib.suppress(RedisUnreachableError, ResponseError):
            await store.note_use(key_id, self._clock.now_ns())

    async def check_key(self, caller: Caller) -> None:
        """Look up the caller's key now. Raises AuthenticationError for a revoked key. While Redis
        is unreachable the key is accepted.
        """
        if self._store is None or not caller.key_id:
            return
        with contextlib.suppress(RedisUnreachableError):
            if await self._store.closed_keys([caller.key_id]):
                self.forget(caller.key_id)
                raise revoked_key(caller.key_id, caller)

    def forget(self, key_id: str) -> None:
        """Drop a key from the cache."""
        self._known.pop(key_id, None)

    async def _look_up(self, key_id: str) -> _Known | None:
        known = self._known.get(key_id)
        now_s = self._clock.monotonic()
        if known is not None and now_s - known.looked_up_s <= _KEY_FRESH_S:
            return known
        if self._store is None:
            raise KeysUnreachableError
        try:
            found = await self._store.key(key_id)
        except RedisUnreachableError as error:
            if known is not None and now_s - known.looked_up_s <= _KNOWN_WHILE_AWAY_S:
                return known
            raise KeysUnreachableError from error
        if found is None:
            self._known.pop(key_id, None)
            return None
        key_found, tenant_found = found
        known = _Known(key_found.record, tenant_found.record, now_s)
        self._note_consent(key_found.record.tenant, tenant_found.record)
        _remember(self._known, key_id, known)
        return known

    def _caller(self, known: _Known) -> Caller:
        of_key = limits_of(known.key, self._tiers)
        of_tenant = limits_of(known.tenant, self._tiers)
        return Caller(
            tenant=known.key.tenant,
            tier=effective_tier(known.key, known.tenant),
            key_id=known.key.key_id,
            context_tokens=lower_limit(of_key.context_tokens, of_tenant.context_tokens),
            is_admin=known.key.is_admin,
        )


def _remember(known: OrderedDict[str, _V], key: str, value: _V) -> None:
    """Keep the newest ``_MAX_KNOWN`` values."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)


def token_of(scope: Scope) -> str | None:
    """Return the token of ``Authorization: Bearer``, else of ``x-api-key``; None if there is
    neither.
    """
    other: str | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                return str(token.strip(), "latin-1")
        elif name == b"x-api-key" and value.strip():
            other = str(value.strip(), "latin-1")
    return other


def require_admin(caller: Caller) -> None:
    """Raise InsufficientPermissionsError unless the caller is an admin."""
    if not caller.is_admin:
        raise InsufficientPermissionsError("This needs an API key of an administrator.")


def unknown_key() -> AuthenticationError:
    """Return the error for a key that was never created here."""
    return AuthenticationError("The API key is not known here. Check it for typing errors.")


def revoked_key(key_id: str, whose: Caller | None = None) -> AuthenticationError:
    """Return the error for a revoked key."""
    return AuthenticationError(f"The API key {key_id} was revoked. Use another one.", whose)


def demands_keys(config: GatewayConfig) -> bool:
    """Return whether a gateway with this configuration serves only callers with an API key."""
    return config.auth == "required" or (config.auth == "auto" and not is_loopback(config.host))
