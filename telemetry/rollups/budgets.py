"""Monthly budgets of tenants and API keys in ClickHouse, so that SQL can compare them with the
spending."""

from __future__ import annotations

from decimal import Decimal

from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.clock import Clock
from millrace.schemas.tenants import (
    KeyRecord,
    TenantRecord,
    TierLimits,
    budgets_of,
    limits_of,
)
from millrace.telemetry.store.store import PlainTable, Store

EVERY_S = 60.0

Owner = tuple[str, str, str]
"""Tenant, key id (empty: the tenant itself) and currency."""

# In a tuple, since argMax skips rows whose amount is NULL.
_KNOWN = """
SELECT tenant, key_id, currency,
    tupleElement(argMax(tuple(monthly_budget), valid_from), 1) AS budget
FROM budgets
GROUP BY tenant, key_id, currency
HAVING isNotNull(budget)
"""
_STEP = Decimal("0.000000000001")
TABLE = PlainTable(
    "budgets",
    ("tenant", "key_id", "currency", "monthly_budget", "valid_from"),
    (
        "LowCardinality(String)",
        "String",
        "LowCardinality(String)",
        "Nullable(Decimal(38, 12))",
        "DateTime64(3, 'UTC')",
    ),
)


async def record_budgets(
    store: Store, tenants: TenantStore, tiers: TierLimits, clock: Clock
) -> int:
    """Add a row for each budget that differs from its last row; return their number.

    The store is read before Redis, so a row that another telemetry process adds meanwhile may be
    repeated, but is never undone by an older amount. Raises RedisUnreachableError before any write,
    and StoreUnavailableError.
    """
    known: dict[Owner, Decimal] = {
        (str(tenant), str(key_id), str(currency)): amount
        for tenant, key_id, currency, amount in await store.rows(_KNOWN)
    }
    now_ms = clock.now_ns() // 1_000_000
    now = await _budgets(tenants, tiers)
    changed = sorted(
        owner for owner in now.keys() | known.keys() if now.get(owner) != known.get(owner)
    )
    if changed:
        rows = [(*owner, now.get(owner), now_ms) for owner in changed]
        await store.insert(TABLE, list(zip(*rows, strict=True)), token="")
    return len(changed)


async def _budgets(tenants: TenantStore, tiers: TierLimits) -> dict[Owner, Decimal]:
    """Return the current budgets of tenants and of API keys that are not revoked."""
    found: dict[Owner, Decimal] = {}
    async for tenant, record, keys in tenants.accounts():
        accounts: dict[str, TenantRecord | KeyRecord] = {"": record}
        accounts.update((key.key_id, key) for key in keys if key.revoked_ns is None)
        for key_id, account in accounts.items():
            for currency, amount in budgets_of(limits_of(account, tiers).monthly_budget).items():
                found[tenant, key_id, currency] = amount.quantize(_STEP)
    return found
