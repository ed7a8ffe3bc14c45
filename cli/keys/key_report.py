"""What ``millrace keys list`` shows of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

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
    budgets_of,
    effective_tier,
    limits_of,
    lower_limits,
)


class KeyReport(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. ``tier`` and ``limits`` were set for this key alone;
    ``effective_tier`` and ``effective_limits`` are what holds, the lower of the key's and its
    tenant's. ``last_used`` is right to within a minute; None: not since this is noted."""

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
    """``tiers`` should be the gateways' own."""
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
    """A line for each key."""
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
