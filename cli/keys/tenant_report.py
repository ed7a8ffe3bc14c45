"""What ``millrace keys tenant`` shows of a tenant."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from millrace.bus.tenancy.accounts import month_of, read_account_usage, tenant_account
from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.api.system import AccountLimits, account_limits
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    BUDGET,
    KEY_LIMITS,
    LimitSet,
    TenantRecord,
    TierLimits,
    budget_text,
    budgets_of,
    limits_of,
)


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's tier and limits, which of these were set for it alone, what the limits of its tier
    were taken from, whether its transcripts are kept, and, if it was asked for, what it uses."""

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
    """What the tenant uses now, and has spent this month. Raises RedisUnreachableError."""
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
    """``tiers`` should be the gateways' own; ``tiers_from`` says where they were found."""
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
    """A line for the tenant and one for each limit."""
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
