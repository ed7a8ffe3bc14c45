"""Reports of ``millrace keys`` on a key and on a tenant."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from millrace.bus.tenancy.accounts import month_of, read_account_usage, tenant_account
from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.api.system import AccountLimits, account_limits
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.text_table import text_table
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    BUDGET,
    KEY_LIMITS,
    LIMITS,
    KeyRecord,
    LimitSet,
    TenantRecord,
    TierLimits,
    budget_text,
    budgets_of,
    effective_tier,
    limits_of,
    lower_limits,
)


class KeyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Key without its secret. ``tier`` and ``limits`` were set for this key alone;
    ``effective_tier`` and ``effective_limits`` are the lower of the key's and its tenant's.
    ``last_used`` is accurate to a minute; None: no use was noted."""

    key_id: str
    tenant: str
    name: str
    tier: Tier | None
    effective_tier: Tier
    admin: bool
    keep_transcripts: bool
    created: str
    last_used: str | None
    revoked: str | None
    limits: Mapping[str, object]
    effective_limits: LimitSet


def key_report(
    key: KeyRecord, owner: TenantRecord, tiers: TierLimits, used_ns: int | None = None
) -> KeyReport:
    """Build the report of a key; ``tiers`` should be the gateways' own."""
    return KeyReport(
        key_id=key.key_id,
        tenant=key.tenant,
        name=key.name,
        tier=key.tier,
        effective_tier=effective_tier(key, owner),
        admin=key.is_admin,
        keep_transcripts=owner.keep_transcripts,
        created=_moment(key.created_ns),
        last_used=None if used_ns is None else _moment(used_ns),
        revoked=None if key.revoked_ns is None else _moment(key.revoked_ns),
        limits=key.limits.given(),
        effective_limits=lower_limits(limits_of(key, tiers), limits_of(owner, tiers)),
    )


def as_table(keys: Sequence[KeyReport]) -> str:
    """Render a line for each key."""
    names = (
        *("key_id", "tenant", "name", "tier", "admin", "transcripts"),
        *("created", "last used", "revoked", "limits"),
    )
    rows = [
        (
            *(key.key_id, key.tenant, key.name, key.effective_tier.value),
            *("yes" if key.admin else "", "kept" if key.keep_transcripts else ""),
            *(key.created, key.last_used or "", key.revoked or "", _limits(key.effective_limits)),
        )
        for key in keys
    ]
    return text_table(names, rows, (False,) * len(names))


def _limits(limits: LimitSet) -> str:
    told = []
    for name in KEY_LIMITS:
        size, unit = getattr(limits, name), LIMITS[name].unit
        if name == BUDGET:
            told += [f"{amount} {currency} {unit}" for currency, amount in budgets_of(size).items()]
        elif size is not None:
            told.append(f"{size} {unit}")
    return ", ".join(told) or "none"


def _moment(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a tenant: tier, limits, the limits set for it alone, the source of its tier's
    limits, storage of transcripts, and, if requested, its usage."""

    tenant: str
    tier: Tier | None
    limits: LimitSet
    set_here: tuple[str, ...]
    tiers_from: str
    keep_transcripts: bool = False
    usage: AccountLimits | None = None


async def read_usage(
    link: RedisLink, store: TenantStore, tenant: str, tiers: TierLimits
) -> AccountLimits:
    """Read the tenant's current usage and its spending of this month. Raises
    RedisUnreachableError."""
    account = tenant_account(tenant, await store.tenant(tenant), tiers)
    return account_limits(
        account, await read_account_usage(link, account, month_of(time.time_ns()))
    )


def tenant_report(
    tenant: str,
    record: TenantRecord,
    tiers: TierLimits,
    tiers_from: str,
    usage: AccountLimits | None,
) -> TenantReport:
    """Build the report of a tenant. ``tiers`` should be the gateways' own; ``tiers_from`` names
    their source."""
    return TenantReport(
        tenant=tenant,
        tier=record.tier,
        limits=limits_of(record, tiers),
        set_here=tuple(record.limits.given()),
        tiers_from=tiers_from,
        keep_transcripts=record.keep_transcripts,
        usage=usage,
    )


def as_text(report: TenantReport) -> str:
    """Render a line for the tenant and one for each limit."""
    tier = "none" if report.tier is None else report.tier.value
    lines = [f"Tenant {report.tenant}, tier {tier}"]
    budget = budgets_of(report.limits.monthly_budget) or None
    limits = msgspec.structs.asdict(report.limits) | {BUDGET: budget}
    for name, size in limits.items():
        origin = "set for this tenant" if name in report.set_here else "by its tier"
        line = f"  {name:<20} {_shown(size):>12}"
        if report.usage is not None and name in KEY_LIMITS:
            line += f"  {_shown(getattr(report.usage.remaining, name)):>12} left"
        lines.append(f"{line}  ({origin})" if size is not None else line)
    lines.append(f"  {'keep_transcripts':<20} {'yes' if report.keep_transcripts else 'no':>12}")
    if report.tier is not None:
        lines.append(f"  The limits of tiers are {report.tiers_from}.")
    if report.usage is not None:
        spent, held = _shown(report.usage.spent), _shown(report.usage.held)
        lines.append(f"  spent this month: {spent}; held: {held}")
    return "\n".join(lines)


def _shown(size: object) -> str:
    if isinstance(size, Mapping):
        return budget_text(size) or "nothing"
    return "none" if size is None else str(size)
