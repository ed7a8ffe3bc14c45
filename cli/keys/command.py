"""``millrace keys``: API keys, and what tenants may use."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.cli.endpoints import add_data_argument, locate, read_endpoints, running_config
from millrace.schemas.errors import ConfigError, MillraceError, ParameterError

if TYPE_CHECKING:
    from millrace.runtime.redis.link import RedisLink
    from millrace.schemas.config import Config
    from millrace.schemas.tenants import KeyRecord, LimitOverrides, TenantRecord, TierLimits

_T = TypeVar("_T")

TIERS = ("enterprise", "pro", "free", "batch")
_COUNTS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "context_tokens")
_BUDGET = "monthly_budget"
_NAMES_TIERS = "MILLRACE_GATEWAY__TIERS__"
_NAMES_REDIS = {"MILLRACE_REDIS__URL", "MILLRACE_REDIS__URL_FILE", "MILLRACE_CONFIG"}
_NONE = "none"
_DEFAULT = "default"


class KeyNotFoundError(MillraceError, code="key_not_found"):
    """No key of that id was ever made here."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace keys`` and its own commands."""
    parser = subparsers.add_parser(
        "keys",
        help="make and revoke API keys, and set what tenants may use",
        description="Make, list and revoke API keys, and set what tenants may use, in the Redis of "
        "the system that runs on DIR or of the one that --redis, --config or MILLRACE_REDIS__URL "
        "names. Limits: a number, none (no limit) or default (what the tier says).",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="keys_command", required=True)

    create = commands.add_parser("create", help="make a key; it is printed once")
    create.add_argument("--tenant", required=True, metavar="T")
    create.add_argument("--name", default="", metavar="N", help="what the key is for")
    create.add_argument("--tier", choices=TIERS, help="of a tenant that is new; else of this key")
    create.add_argument("--admin", action="store_true", help="may see other tenants' figures")
    _add_limits(create)
    _add_common(create, _create)

    listing = commands.add_parser("list", help="keys, without their secrets")
    listing.add_argument("--tenant", metavar="T", help="only this tenant's")
    _add_common(listing, _list)

    revoke = commands.add_parser("revoke", help="have a key open nothing from now on")
    revoke.add_argument("key_id", metavar="KEY_ID", help="the key's first part, after mr-")
    _add_common(revoke, _revoke)

    tenant = commands.add_parser("tenant", help="set or show what a tenant may use")
    tenant.add_argument("tenant", metavar="T")
    tenant.add_argument("--tier", choices=TIERS)
    tenant.add_argument("--show", action="store_true", help="what is used now, and this month")
    tenant.add_argument(
        "--keep-transcripts",
        choices=("on", "off"),
        help="whether the words of its requests and answers are kept for analytics, for 30 days",
    )
    _add_limits(tenant)
    _add_common(tenant, _tenant)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name in _COUNTS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="N", type=partial(_limit, int, "number")
        )
    parser.add_argument(
        "--monthly-budget", metavar="MONEY", type=partial(_limit, Decimal, "amount")
    )


def _add_common(
    parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], int]
) -> None:
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--redis", metavar="URL", help="the server to use instead")
    where.add_argument("--config", metavar="FILE", help="the configuration that names the server")
    add_data_argument(parser)
    parser.set_defaults(handler=action)


def _create(arguments: argparse.Namespace) -> int:
    import msgspec

    from millrace.bus.tenancy.tenants import TenantStore
    from millrace.schemas.jobs import Tier
    from millrace.schemas.tenants import MAX_KEY_NAME_CHARACTERS, is_above

    _check_tenant(arguments.tenant)
    overrides = _overrides(arguments)
    tier = None if arguments.tier is None else Tier(arguments.tier)
    if len(arguments.name) > MAX_KEY_NAME_CHARACTERS or not arguments.name.isprintable():
        raise ParameterError(
            "name", f"a name is at most {MAX_KEY_NAME_CHARACTERS} printable characters"
        )

    async def create(link: RedisLink) -> tuple[KeyRecord, str, TenantRecord]:
        store = TenantStore(link)
        key_tier = tier
        known = await store.tenant(arguments.tenant)
        if not known.version:

            def begin(now: TenantRecord) -> TenantRecord:
                return msgspec.structs.replace(now, tier=tier or now.tier)

            await store.change_tenant(arguments.tenant, begin)
            key_tier = None
        elif key_tier == known.record.tier:
            key_tier = None
        elif key_tier and known.record.tier and is_above(key_tier, known.record.tier):
            raise ParameterError(
                "tier",
                f"tenant {arguments.tenant} is {known.record.tier.value}, and its keys cannot be "
                f"more; raise it with millrace keys tenant {arguments.tenant} --tier "
                f"{key_tier.value}",
            )
        made = await store.create_key(
            arguments.tenant,
            time.time_ns(),
            name=arguments.name,
            tier=key_tier,
            limits=overrides,
            is_admin=arguments.admin,
        )
        return *made, known.record

    record, token, owner = _with_redis(arguments, create)
    if arguments.json:
        _print_json({**_shown_key(record, owner), "key": token})
        return 0
    print(token)
    print(
        f"Key {record.key_id} of tenant {record.tenant}. It cannot be shown again: keep it now.",
        file=sys.stderr,
    )
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from millrace.bus.tenancy.tenants import TenantStore

    async def read(link: RedisLink) -> list[dict[str, object]]:
        store = TenantStore(link)
        shown = []
        for tenant in [arguments.tenant] if arguments.tenant else await store.tenants():
            owner = (await store.tenant(tenant)).record
            shown += [_shown_key(key, owner) for key in await store.keys_of(tenant)]
        return shown

    shown = _with_redis(arguments, read)
    if arguments.json:
        _print_json(shown)
        return 0
    columns = (
        *("key_id", "tenant", "name", "tier", "admin"),
        *("keep_transcripts", "created", "revoked", "limits"),
    )
    rows = [columns, *(tuple(_cell(key[column]) for column in columns) for key in shown)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    from millrace.bus.tenancy.tenants import TenantStore

    async def revoke(link: RedisLink) -> tuple[KeyRecord, TenantRecord] | None:
        store = TenantStore(link)
        revoked = await store.revoke(arguments.key_id, time.time_ns())
        return None if revoked is None else (revoked, (await store.tenant(revoked.tenant)).record)

    found = _with_redis(arguments, revoke)
    if found is None:
        raise KeyNotFoundError(
            f"there is no key {arguments.key_id}; millrace keys list shows those that there are"
        )
    record, owner = found
    if arguments.json:
        _print_json(_shown_key(record, owner))
    else:
        print(f"Key {record.key_id} of tenant {record.tenant} opens nothing any more.")
    return 0


def _tenant(arguments: argparse.Namespace) -> int:
    import msgspec

    from millrace.bus.tenancy.tenants import TenantStore
    from millrace.cli.keys.tenant_report import as_text, read_usage, tenant_report
    from millrace.schemas.jobs import Tier
    from millrace.schemas.tenants import LimitOverrides

    _check_tenant(arguments.tenant)
    given = _overrides(arguments).given()
    dropped = _back_to_default(arguments)
    tier = None if arguments.tier is None else Tier(arguments.tier)
    transcripts = arguments.keep_transcripts

    def change(known: TenantRecord) -> TenantRecord:
        limits: dict[str, Any] = {**known.limits.given(), **given}
        kept = {name: limit for name, limit in limits.items() if name not in dropped}
        return msgspec.structs.replace(
            known,
            tier=tier or known.tier,
            limits=LimitOverrides(**kept),
            keep_transcripts=known.keep_transcripts if transcripts is None else transcripts == "on",
        )

    tiers, tiers_from = _tiers(arguments)

    async def work(link: RedisLink) -> None:
        store = TenantStore(link)
        if given or dropped or tier is not None or transcripts is not None:
            record = await store.change_tenant(arguments.tenant, change)
        else:
            record = (await store.tenant(arguments.tenant)).record
        usage = None
        if arguments.show:
            usage = await read_usage(link, store, arguments.tenant, tiers)
        shown = tenant_report(arguments.tenant, record, tiers, tiers_from, usage)
        if arguments.json:
            _print_json(shown)
        else:
            print(as_text(shown))

    _with_redis(arguments, work)
    return 0


def _limit(kind: Callable[[str], _T], what: str, text: str) -> _T | str:
    if text in {_NONE, _DEFAULT}:
        return text
    try:
        return kind(text)
    except (ValueError, InvalidOperation):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}, none or default") from None


def _check_tenant(tenant: str) -> None:
    from millrace.schemas.tenants import check_tenant

    try:
        check_tenant(tenant)
    except ValueError as error:
        raise ParameterError("tenant", str(error)) from error


def _overrides(arguments: argparse.Namespace) -> LimitOverrides:
    """The limits that the arguments set. Raises ParameterError."""
    from millrace.schemas.tenants import LimitOverrides

    given = {name: getattr(arguments, name) for name in (*_COUNTS, _BUDGET)}
    try:
        return LimitOverrides(
            **{
                name: None if limit == _NONE else limit
                for name, limit in given.items()
                if limit is not None and limit != _DEFAULT
            }
        )
    except ValueError as error:
        raise ParameterError("limits", str(error)) from error


def _back_to_default(arguments: argparse.Namespace) -> set[str]:
    return {name for name in (*_COUNTS, _BUDGET) if getattr(arguments, name) == _DEFAULT}


def _locate(arguments: argparse.Namespace) -> Config:
    """The configuration with the address to use. ConfigError if nothing says where: a guess could
    reach another system than the one that is meant."""
    import msgspec

    from millrace.runtime.settings import load_config

    if arguments.config is not None:
        return load_config(arguments.config, os.environ)
    endpoints = read_endpoints(arguments.data)
    named = arguments.redis is not None or not _NAMES_REDIS.isdisjoint(os.environ)
    if not named and endpoints is None:
        raise ConfigError(
            f"Nothing runs on {arguments.data}. Start it with millrace up --data {arguments.data}, "
            "or give --redis URL."
        )
    config = locate(arguments.data)
    if arguments.redis is None:
        return config
    redis = msgspec.structs.replace(config.redis, url=arguments.redis)
    return msgspec.structs.replace(config, redis=redis)


def _tiers(arguments: argparse.Namespace) -> tuple[TierLimits, str]:
    """What tenants of each tier may use at the instance whose Redis is used, and what says so."""
    from millrace.runtime.settings import FILE_VARIABLE

    config = _locate(arguments)
    if arguments.config is not None:
        return config.gateway.tiers, f"as in {arguments.config}"
    if any(name.startswith(_NAMES_TIERS) for name in os.environ):
        return config.gateway.tiers, "as the environment says"
    if FILE_VARIABLE in os.environ:
        return config.gateway.tiers, f"as in {os.environ[FILE_VARIABLE]}"
    endpoints = read_endpoints(arguments.data)
    running = running_config(arguments.data)
    if endpoints is not None and running is not None and config.redis.url == endpoints.redis:
        return running.gateway.tiers, f"as of what runs on {arguments.data}"
    return config.gateway.tiers, "the built-in ones: --config names the file of this instance"


def _with_redis(arguments: argparse.Namespace, action: Callable[[RedisLink], Awaitable[_T]]) -> _T:
    """What ``action`` returns. Raises MillraceError if Redis is not where it should be."""
    from millrace.runtime.redis.link import RedisLink, RedisUnreachableError

    config = _locate(arguments).redis

    async def work() -> _T:
        link = RedisLink(config)
        try:
            return await action(link)
        except RedisUnreachableError as error:
            await link.check()
            host = config.url.rpartition("@")[2]  # what is before it may be a password
            raise MillraceError(f"no Redis answers at {host}") from error
        finally:
            await link.close()

    return asyncio.run(work())


def _shown_key(key: KeyRecord, owner: TenantRecord) -> dict[str, object]:
    return {
        "key_id": key.key_id,
        "tenant": key.tenant,
        "name": key.name,
        "tier": None if key.tier is None else key.tier.value,
        "admin": key.is_admin,
        "keep_transcripts": owner.keep_transcripts,
        "created": _day(key.created_ns),
        "revoked": None if key.revoked_ns is None else _day(key.revoked_ns),
        "limits": key.limits.given(),
    }


def _day(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_NONE if it is None else it}" for name, it in value.items())
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode())
