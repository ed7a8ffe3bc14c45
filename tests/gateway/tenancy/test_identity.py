"""Identity of a caller, with a real redis-server and without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from millrace.bus.tenancy.tenants import TenantStore, digest_of, parse_token
from millrace.gateway.tenancy.identity import (
    LOCAL,
    AuthenticationError,
    Caller,
    Identity,
    InsufficientPermissionsError,
    KeysUnreachableError,
    require_admin,
    token_of,
)
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer, free_port

AFAR = GatewayConfig(host="0.0.0.0")
NEAR = GatewayConfig(host="127.0.0.1")


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def link(redis_server: RedisServer, clock: ManualClock) -> AsyncIterator[RedisLink]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    made = RedisLink(RedisConfig(url=redis_server.url), clock)
    yield made
    await made.close()


@pytest.fixture
async def store(link: RedisLink) -> TenantStore:
    store = TenantStore(link)
    await store.change_tenant("acme", lambda _known: TenantRecord(tier=Tier.PRO))
    return store


# --- headers and policy ----------------------------------------------------------------------


def test_where_a_token_is_looked_for() -> None:
    assert token_of(scope()) is None
    assert token_of(scope((b"authorization", b"Bearer mr-a"))) == "mr-a"
    assert token_of(scope((b"authorization", b"bearer   mr-a "))) == "mr-a"
    assert token_of(scope((b"x-api-key", b" mr-b "))) == "mr-b"
    both = scope((b"x-api-key", b"mr-b"), (b"authorization", b"Bearer mr-a"))
    assert token_of(both) == "mr-a"
    basic = scope((b"authorization", b"Basic dTpw"), (b"x-api-key", b"mr-b"))
    assert token_of(basic) == "mr-b"
    assert token_of(scope((b"authorization", b"Bearer "))) is None
    assert token_of(scope((b"authorization", b"Bearer \xff\xfe"))) == "\xff\xfe"


@pytest.mark.parametrize(
    ("host", "auth", "demands_keys"),
    [
        ("127.0.0.1", "auto", False),
        ("127.9.9.9", "auto", False),
        ("::1", "auto", False),
        ("localhost", "auto", False),
        ("0.0.0.0", "auto", True),
        ("::", "auto", True),
        ("10.0.0.1", "auto", True),
        ("gateway.example", "auto", True),
        ("127.0.0.1", "required", True),
        ("0.0.0.0", "none", False),
    ],
)
async def test_when_keys_are_demanded(
    host: str, auth: Any, demands_keys: bool, clock: ManualClock
) -> None:
    identity = Identity(None, GatewayConfig(host=host, auth=auth), clock)
    assert identity.demands_keys is demands_keys
    if demands_keys:
        with pytest.raises(AuthenticationError) as refused:
            await identity.caller(scope())
        assert (refused.value.http_status, refused.value.code) == (401, "invalid_api_key")
        assert refused.value.headers[0][0] == b"www-authenticate"
        with pytest.raises(AuthenticationError):
            await identity.caller_of_token("sk-anything")
    else:
        caller = await identity.caller(scope())
        assert (caller.tenant, caller.key_id) == ("local", "")
        assert await identity.caller_of_token("sk-anything") == caller


async def test_only_who_is_near_is_the_operator(clock: ManualClock) -> None:
    near = await Identity(None, NEAR, clock).caller_of_token(None)
    assert near == LOCAL
    require_admin(near)
    open_to_all = GatewayConfig(host="0.0.0.0", auth="none")
    afar = await Identity(None, open_to_all, clock).caller_of_token(None)
    with pytest.raises(InsufficientPermissionsError) as refused:
        require_admin(afar)
    assert (refused.value.http_status, refused.value.code) == (403, "insufficient_permissions")


# --- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [AFAR, NEAR])
async def test_a_key_says_who_calls(
    config: GatewayConfig, store: TenantStore, link: RedisLink, clock: ManualClock
) -> None:
    _, plain = await store.create_key("acme", 0)
    _, special = await store.create_key(
        "acme", 0, tier=Tier.BATCH, limits=LimitOverrides(context_tokens=1_000), is_admin=True
    )
    identity = Identity(link, config, clock)
    caller = await identity.caller(scope((b"authorization", b"Bearer " + plain.encode())))
    assert caller == Caller(
        tenant="acme",
        tier=Tier.PRO,
        key_id=plain[3:15],
        context_tokens=65_536,
    )
    caller = await identity.caller_of_token(special)
    assert (caller.tier, caller.context_tokens, caller.is_admin) == (Tier.BATCH, 1_000, True)


async def test_a_key_never_rises_above_its_tenant(
    store: TenantStore, link: RedisLink, clock: ManualClock
) -> None:
    _, token = await store.create_key("acme", 0, tier=Tier.ENTERPRISE)
    caller = await Identity(link, AFAR, clock).caller_of_token(token)
    assert (caller.tier, caller.context_tokens) == (Tier.PRO, 65_536)


async def test_what_opens_nothing(store: TenantStore, link: RedisLink, clock: ManualClock) -> None:
    record, token = await store.create_key("acme", 0)
    identity = Identity(link, NEAR, clock)
    wrong = f"{token[:-1]}{'0' if token[-1] != '0' else '1'}"
    for bad in (
        wrong,
        f"{token}0",
        token[:-1],
        "mr-",
        "mr-x",
        f"mr-{record.key_id}",
        f"mr-{record.key_id}-",
        f"mr-{record.key_id}-{record.digest}",
        f"mr-{'0' * 12}-{token[16:]}",
        f"mr-{record.key_id}-\udcff",
        "mr-é-é",
    ):
        with pytest.raises(AuthenticationError) as refused:
            await identity.caller_of_token(bad)
        assert token[16:] not in refused.value.message
    assert (await identity.caller_of_token(token)).tenant == "acme"


async def test_secrets_are_not_kept(store: TenantStore, link: RedisLink) -> None:
    record, token = await store.create_key("acme", 0)
    secret = token.partition(record.key_id)[2].removeprefix("-")
    assert len(bytes.fromhex(secret)) == 32
    assert record.digest == digest_of(secret)
    values: list[bytes] = []
    for key in await link.call("KEYS", "*"):
        kind = await link.call("TYPE", key)
        values.append(
            str(
                await link.call(*(("HGETALL",) if kind == b"hash" else ("SMEMBERS",)), key)
            ).encode()
        )
    assert record.key_id.encode() in b"".join(values)
    assert secret.encode() not in b"".join(values)


async def test_a_revoked_key_is_refused_within_seconds(
    store: TenantStore, link: RedisLink, clock: ManualClock
) -> None:
    record, token = await store.create_key("acme", 0)
    identity = Identity(link, AFAR, clock)
    await identity.caller_of_token(token)
    await store.revoke(record.key_id, 5)
    with pytest.raises(AuthenticationError, match="was revoked"):
        await identity.check_key(Caller(tenant="acme", key_id=record.key_id))
    assert await store.closed_keys([record.key_id, "0" * 12]) == {record.key_id, "0" * 12}
    with pytest.raises(AuthenticationError, match="was revoked"):
        await identity.caller_of_token(token)
    assert (await store.revoke(record.key_id, 6)) == (await store.keys_of("acme"))[0]
    assert (await store.keys_of("acme"))[0].revoked_ns == 5
    assert await store.revoke("000000000000", 7) is None


async def test_a_known_key_costs_no_round_trip(
    store: TenantStore, link: RedisLink, clock: ManualClock
) -> None:
    _, token = await store.create_key("acme", 0)
    identity = Identity(link, AFAR, clock)
    await identity.caller_of_token(token)
    await identity.close()  # that it was used is noted, once a minute
    before = (await link.call("INFO", "stats"))["total_commands_processed"]
    for _ in range(100):
        await identity.caller_of_token(token)
    after = (await link.call("INFO", "stats"))["total_commands_processed"]
    assert after == before + 1


# --- Redis away ------------------------------------------------------------------------------


async def test_known_keys_go_on_for_an_hour_without_redis(redis_server: RedisServer) -> None:
    clock = ManualClock()
    link = RedisLink(RedisConfig(url=redis_server.url), clock)
    store = TenantStore(link)
    await store.change_tenant("acme", lambda _known: TenantRecord(tier=Tier.PRO))
    _, known = await store.create_key("acme", 0)
    _, unknown = await store.create_key("acme", 0)
    identity = Identity(link, AFAR, clock)
    await identity.caller_of_token(known)
    redis_server.kill()
    try:
        await clock.advance(3_500.0)
        assert (await identity.caller_of_token(known)).tenant == "acme"
        with pytest.raises(AuthenticationError):
            await identity.caller_of_token(f"{known}0")
        with pytest.raises(KeysUnreachableError) as away:
            await identity.caller_of_token(unknown)
        assert (away.value.http_status, away.value.retry_after_s) == (503, 2.0)
        await clock.advance(101.0)
        with pytest.raises(KeysUnreachableError):
            await identity.caller_of_token(known)
    finally:
        redis_server.start()
        await link.close()


async def test_without_redis_keyless_callers_go_on(clock: ManualClock) -> None:
    link = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"), clock)
    identity = Identity(link, NEAR, clock)
    assert await identity.caller_of_token(None) == LOCAL
    with pytest.raises(KeysUnreachableError):
        await identity.caller_of_token(f"mr-{'0' * 12}-{'0' * 64}")
    await link.close()


@given(st.text())
def test_any_text_parses_or_does_not(token: str) -> None:
    for text in (token, f"mr-{token}"):
        parts = parse_token(text)
        assert parts is None or text == f"mr-{parts[0]}-{parts[1]}"
