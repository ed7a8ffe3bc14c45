"""``millrace keys``: API keys and tenants' limits."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.cli.endpoints import read_endpoints, running_config
from millrace.cli.store_access import add_store_arguments, locate_store, with_store
from millrace.schemas.errors import MillraceError, ParameterError

if TYPE_CHECKING:
    from millrace.runtime.redis.link import RedisLink
    from millrace.schemas.tenants import (
        KeyRecord,
        LimitOverrides,
        TenantRecord,
        TierLimits,
    )

_T = TypeVar("_T")

TIERS = ("enterprise", "pro", "free", "batch")
_NAMES_TIERS = "MILLRACE_GATEWAY__TIERS__"
_NONE = "none"
_DEFAULT = "default"


class KeyNotFoundError(MillraceError, code="key_not_found"):
    """Error for an unknown key id."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace keys`` and its subcommands."""
    from millrace.schemas.tenants import KEY_LIMITS, LIMITS

    parser = subparsers.add_parser(
        "keys",
        help="make and revoke API keys, and set limits of tenants",
        description="Make, list and revoke API keys, and set limits of tenants, in the Redis of "
        "the system that runs on DIR or in the Redis that --redis, --config or "
        "MILLRACE_REDIS__URL names. Limits: a number, none (no limit) or default (the tier's "
        "limit).",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="keys_command", required=True)

    create = commands.add_parser("create", help="make a key, which is printed once")
    create.add_argument("--tenant", required=True, metavar="T")
    create.add_argument("--name", default="", metavar="N", help="name of the key")
    create.add_argument("--tier", choices=TIERS, help="tier of a new tenant; else of this key")
    create.add_argument("--admin", action="store_true", help="may see the usage of other tenants")
    _add_limits(create, KEY_LIMITS)
    add_store_arguments(create, _create)

    listing = commands.add_parser("list", help="list keys, without their secrets")
    listing.add_argument("--tenant", metavar="T", help="only this tenant's")
    add_store_arguments(listing, _list)

    revoke = commands.add_parser("revoke", help="revoke a key")
    revoke.add_argument("key_id", metavar="KEY_ID", help="id of the key: its first part, after mr-")
    add_store_arguments(revoke, _revoke)

    tenant = commands.add_parser("tenant", help="set or show the limits of a tenant")
    tenant.add_argument("tenant", metavar="T")
    tenant.add_argument("--tier", choices=TIERS)
    tenant.add_argument(
        "--show", action="store_true", help="show the current usage, and the spending of this month"
    )
    tenant.add_argument(
        "--keep-transcripts",
        choices=("on", "off"),
        help="keep the text of its requests and answers for analytics, for 30 days",
    )
    _add_limits(tenant, LIMITS)
    add_store_arguments(tenant, _tenant)


def _add_limits(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    from millrace.schemas.tenants import BUDGET, parse_budget

    group = parser.add_argument_group("limits", "a number, none, or default: the tier's limit")
    for name in names:
        option = f"--{name.replace('_', '-')}"
        if name == BUDGET:
            group.add_argument(
                option,
                metavar="MONEY",
                type=partial(
                    _limit, parse_budget, "amount such as 100, '50 EUR' or '100 USD, 50 EUR'"
                ),
                help="budget of a month in USD or a given currency; several amounts are separated "
                "by commas",
            )
        else:
            group.add_argument(option, metavar="N", type=partial(_limit, int, "number"))


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
            await store.change_tenant(
                arguments.tenant,
                lambda now: msgspec.structs.replace(now, tier=tier or now.tier),
            )
            key_tier = None
        elif key_tier == known.record.tier:
            key_tier = None
        elif key_tier and known.record.tier and is_above(key_tier, known.record.tier):
            raise ParameterError(
                "tier",
                f"tenant {arguments.tenant} is {known.record.tier.value}, and its keys cannot have "
                f"a higher tier; raise the tenant's with millrace keys tenant {arguments.tenant} "
                f"--tier {key_tier.value}",
            )
        made = await store.create_key(
            arguments.tenant,
            time.time_ns(),
            name=arguments.name,
            tier=key_tier,
            limits=overrides,
            is_admin=arguments.admin,
        )
        return *made, (await store.tenant(arguments.tenant)).record

    record, token, owner = with_store(arguments, create)
    if arguments.json:
        _print_json({**_shown_key(arguments, record, owner), "key": token})
        return 0
    print(token)
    print(
        f"Key {record.key_id} of tenant {record.tenant}. It cannot be shown again: keep it now.",
        file=sys.stderr,
    )
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from millrace.bus.tenancy.tenants import TenantStore
    from millrace.cli.keys.reports import KeyReport, as_table, key_report

    tiers, _ = _tiers(arguments)

    async def read(link: RedisLink) -> list[KeyReport]:
        store = TenantStore(link)
        shown = []
        for tenant in [arguments.tenant] if arguments.tenant else await store.tenants():
            owner = (await store.tenant(tenant)).record
            keys = await store.keys_of(tenant)
            used_ns = await store.uses_of(key.key_id for key in keys)
            shown += [key_report(key, owner, tiers, used_ns.get(key.key_id)) for key in keys]
        return shown

    shown = with_store(arguments, read)
    if arguments.json:
        _print_json(shown)
    else:
        print(as_table(shown), end="")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    from millrace.bus.tenancy.tenants import TenantStore

    async def revoke(link: RedisLink) -> tuple[KeyRecord, TenantRecord, int | None] | None:
        store = TenantStore(link)
        revoked = await store.revoke(arguments.key_id, time.time_ns())
        if revoked is None:
            return None
        used_ns = await store.uses_of([revoked.key_id])
        owner = (await store.tenant(revoked.tenant)).record
        return revoked, owner, used_ns.get(revoked.key_id)

    found = with_store(arguments, revoke)
    if found is None:
        raise KeyNotFoundError(f"there is no key {arguments.key_id}; see millrace keys list")
    record, owner, used_ns = found
    if arguments.json:
        _print_json(_shown_key(arguments, record, owner, used_ns))
    else:
        print(f"Key {record.key_id} of tenant {record.tenant} is revoked.")
    return 0


def _tenant(arguments: argparse.Namespace) -> int:
    import msgspec

    from millrace.bus.tenancy.tenants import TenantStore
    from millrace.cli.keys.reports import as_text, read_usage, tenant_report
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

    with_store(arguments, work)
    return 0


def _limit(kind: Callable[[str], _T], what: str, text: str) -> _T | str:
    if text in {_NONE, _DEFAULT}:
        return text
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}, none or default") from None


def _check_tenant(tenant: str) -> None:
    from millrace.schemas.tenants import check_tenant

    try:
        check_tenant(tenant)
    except ValueError as error:
        raise ParameterError("tenant", str(error)) from error


def _overrides(arguments: argparse.Namespace) -> LimitOverrides:
    """Return the limits that the arguments set. Raises ParameterError."""
    from millrace.schemas.tenants import LIMITS, LimitOverrides

    given = {name: getattr(arguments, name, None) for name in LIMITS}
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
    from millrace.schemas.tenants import LIMITS

    return {name for name in LIMITS if getattr(arguments, name, None) == _DEFAULT}


def _tiers(arguments: argparse.Namespace) -> tuple[TierLimits, str]:
    """Return the tiers' limits of the system whose Redis is used, and their source."""
    from millrace.runtime.settings import FILE_VARIABLE

    config = locate_store(arguments)
    if arguments.config is not None:
        return config.gateway.tiers, f"as in {arguments.config}"
    if any(name.startswith(_NAMES_TIERS) for name in os.environ):
        return config.gateway.tiers, "from environment variables"
    if FILE_VARIABLE in os.environ:
        return config.gateway.tiers, f"as in {os.environ[FILE_VARIABLE]}"
    endpoints = read_endpoints(arguments.data)
    running = running_config(arguments.data)
    if endpoints is not None and running is not None and config.redis.url == endpoints.redis:
        return running.gateway.tiers, f"as in the system that runs on {arguments.data}"
    return config.gateway.tiers, "the built-in defaults; --config sets the file of this instance"


def _shown_key(
    arguments: argparse.Namespace,
    key: KeyRecord,
    owner: TenantRecord,
    used_ns: int | None = None,
) -> dict[str, Any]:
    import msgspec

    from millrace.cli.keys.reports import key_report

    tiers, _ = _tiers(arguments)
    shown: dict[str, Any] = msgspec.to_builtins(key_report(key, owner, tiers, used_ns))
    return shown


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode())
