"""Tenants, their API keys, and their limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any, NamedTuple

import msgspec

from millrace.schemas.jobs import MAX_NAME_CHARACTERS, Tier

LOCAL_TENANT = "local"

KEY_PREFIX = "mr-"
MAX_KEY_NAME_CHARACTERS = 128

# Counts of this size, times the milliseconds of a minute, are exact in the doubles of Redis' Lua;
# so are budgets in billionths.
MAX_LIMIT = 10**9
MAX_BUDGET = Decimal(9_000_000)

DEFAULT_CURRENCY = "USD"
"""The currency of a budget or price book that names none."""

Budget = Decimal | dict[str, Decimal]
"""An amount of money in DEFAULT_CURRENCY, or amounts by currency."""

BUDGET = "monthly_budget"
"""The only limit that is money. All others are counts."""

_CURRENCY = re.compile("[A-Z]{3}")

_TENANT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
_URGENCY = (Tier.BATCH, Tier.FREE, Tier.PRO, Tier.ENTERPRISE)


def check_limits(limits: LimitSet | LimitOverrides) -> None:
    """Raise ValueError, naming the limit, for a value that cannot be stored."""
    for name in LIMITS:
        count = getattr(limits, name)
        if isinstance(count, int) and not 1 <= count <= MAX_LIMIT:
            raise ValueError(f"{name} must be between 1 and {MAX_LIMIT}, got {count}")
    budget = limits.monthly_budget
    if budget is None or budget is msgspec.UNSET:
        return
    if budget == {}:
        raise ValueError("monthly_budget must name an amount, or be none")
    for currency, amount in budgets_of(budget).items():
        check_currency(currency)
        if not (amount.is_finite() and 0 <= amount <= MAX_BUDGET):
            raise ValueError(
                f"monthly_budget must be between 0 and {MAX_BUDGET} {currency}, got {amount}"
            )


def check_currency(currency: str) -> None:
    """Raise ValueError for a text that is not a currency code."""
    if not _CURRENCY.fullmatch(currency):
        raise ValueError(
            f"a currency is a code of three capital letters, such as {DEFAULT_CURRENCY} or EUR, "
            f"got {currency[:40]!r}"
        )


def budgets_of(budget: Budget | None) -> Mapping[str, Decimal]:
    """Return the amount by currency of a budget; empty for None."""
    if budget is None:
        return {}
    return {DEFAULT_CURRENCY: budget} if isinstance(budget, Decimal) else budget


def parse_budget(text: str) -> Budget:
    """Read ``100``, ``50 EUR`` or ``100 USD, 50 EUR``.

    Raises ValueError for anything else.
    """
    parts = [part.split() for part in text.split(",")]
    if not all(len(part) in {1, 2} for part in parts):
        raise ValueError(f"{text!r} is not an amount, or amounts with currencies")
    try:
        amounts = [Decimal(part[0]) for part in parts]
    except InvalidOperation:
        raise ValueError(f"{text!r} is not an amount, or amounts with currencies") from None
    if len(parts) == 1 and len(parts[0]) == 1:
        return amounts[0]
    currencies = [part[1] if len(part) == 2 else DEFAULT_CURRENCY for part in parts]
    if len(set(currencies)) < len(currencies):
        raise ValueError(f"{text!r} names a currency twice")
    return dict(zip(currencies, amounts, strict=True))


def budget_text(budget: Mapping[str, Decimal]) -> str:
    """Return amounts by currency in the format that ``parse_budget`` reads."""
    return ", ".join(f"{amount} {currency}" for currency, amount in budget.items())


class LimitSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of an account; None: no limit. ``tokens_per_minute`` counts prompt and completion,
    ``context_tokens`` limits both of one request together. ``monthly_budget`` is money of a UTC
    month: an amount in USD, or an amount for each currency. Requests in a currency without an
    amount are not limited by it.

    Raises ValueError, naming the limit, for a value that cannot be stored.
    """

    requests_per_minute: int | None = None
    """Requests in a minute."""

    tokens_per_minute: int | None = None
    """Prompt and completion tokens in a minute."""

    concurrent_requests: int | None = None
    """Requests open at a time."""

    context_tokens: int | None = None
    """Prompt and completion tokens of one request together."""

    monthly_budget: Budget | None = None
    """Money of a UTC month: an amount in USD, or an amount for each currency
    (`{USD: 100, EUR: 50}`). Requests in a currency without an amount are not bounded by it."""

    max_waiting_jobs: int | None = None
    """Jobs of one tier that services published on the bus and that wait."""

    def __post_init__(self) -> None:
        check_limits(self)


class LimitOverrides(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Limits set for one account; UNSET keeps the tier's limit, None removes it."""

    requests_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    concurrent_requests: int | msgspec.UnsetType | None = msgspec.UNSET
    context_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    monthly_budget: Budget | msgspec.UnsetType | None = msgspec.UNSET
    max_waiting_jobs: int | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        check_limits(self)

    def over(self, base: LimitSet) -> LimitSet:
        """Return ``base`` with the limits that are set here."""
        return msgspec.structs.replace(base, **self.given())

    def given(self) -> dict[str, int | Budget | None]:
        """Return the limits that are set."""
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not msgspec.UNSET
        }


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """Remaining amount of each consumable limit of a ``LimitSet``; None: no limit.
    ``monthly_budget`` is the rest in each currency that has a budget."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    context_tokens: int | None
    monthly_budget: Mapping[str, Decimal] | None


class LimitTraits(NamedTuple):
    """Properties of a limit. ``unit`` follows its size in the report of a key, and ``meaning``
    explains it to analysts.

    ``of_keys``: keys also have this limit, and ``GET /v1/limits`` shows its rest.
    """

    unit: str
    meaning: str
    of_keys: bool = True


_TRAITS = {
    "requests_per_minute": LimitTraits("requests/min", "requests in a minute"),
    "tokens_per_minute": LimitTraits("tokens/min", "prompt and completion tokens in a minute"),
    "concurrent_requests": LimitTraits("at once", "requests open at a time"),
    "context_tokens": LimitTraits("context", "prompt and completion tokens of one request"),
    "monthly_budget": LimitTraits("a month", "money of a UTC month"),
    # Services publish jobs without a key.
    "max_waiting_jobs": LimitTraits(
        "waiting jobs", "waiting jobs of one tier that services published", of_keys=False
    ),
}

LIMITS = {name: _TRAITS[name] for name in LimitSet.__struct_fields__}
"""Every limit by its name. The command line, the reports and their tests are made from it."""

KEY_LIMITS = tuple(name for name, traits in LIMITS.items() if traits.of_keys)


class TierLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default limits of a tenant, by tier."""

    free: LimitSet = LimitSet(
        requests_per_minute=60,
        tokens_per_minute=200_000,
        concurrent_requests=8,
        context_tokens=32_768,
        max_waiting_jobs=1_000,
    )
    pro: LimitSet = LimitSet(
        requests_per_minute=600,
        tokens_per_minute=2_000_000,
        concurrent_requests=64,
        context_tokens=65_536,
        max_waiting_jobs=1_000,
    )
    enterprise: LimitSet = LimitSet(
        requests_per_minute=6_000,
        tokens_per_minute=20_000_000,
        concurrent_requests=512,
        context_tokens=131_072,
        max_waiting_jobs=1_000,
    )
    batch: LimitSet = LimitSet(
        requests_per_minute=6_000,
        tokens_per_minute=10_000_000,
        concurrent_requests=128,
        context_tokens=131_072,
        max_waiting_jobs=1_000_000,
    )

    def of(self, tier: Tier) -> LimitSet:
        limits: LimitSet = getattr(self, tier.value)
        return limits


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of a tenant. ``tier`` None has only the limits set here.

    ``keep_transcripts``: analytics may store the text of its requests and answers, which is stored
    nowhere else.
    """

    tier: Tier | None = None
    limits: LimitOverrides = LimitOverrides()
    keep_transcripts: bool = False


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """API key without its secret: ``digest`` is the secret's SHA-256 in hex.

    ``tier``, if set, lowers the key below its tenant. A revoked key stays revoked.
    """

    key_id: str
    digest: str
    tenant: str
    name: str = ""
    tier: Tier | None = None
    limits: LimitOverrides = LimitOverrides()
    is_admin: bool = False
    created_ns: int = 0
    revoked_ns: int | None = None


def unknown_tenant(tenant: str) -> TenantRecord:
    """Return the record of an unknown tenant: the free tier, but no limits for ``local``."""
    return TenantRecord() if tenant == LOCAL_TENANT else TenantRecord(tier=Tier.FREE)


def limits_of(record: TenantRecord | KeyRecord, tiers: TierLimits) -> LimitSet:
    """Return the limits of a tenant over all its keys, or the limits of one key within them."""
    return record.limits.over(LimitSet() if record.tier is None else tiers.of(record.tier))


def max_waiting_jobs_of(record: TenantRecord, tiers: TierLimits, tier: Tier) -> int | None:
    """Return the limit of waiting jobs that a tenant published in a tier; None: no limit.

    The limit of the tenant's record applies to every tier. Without it, the limit of ``tier``
    applies, not that of the tenant's own tier. A tenant without a tier has no limit.
    """
    given = record.limits.max_waiting_jobs
    if given is not msgspec.UNSET:
        return given
    return None if record.tier is None else tiers.of(tier).max_waiting_jobs


def effective_tier(key: KeyRecord, tenant: TenantRecord) -> Tier:
    """Return the most urgent tier of requests with this key: the lower of the key's and the
    tenant's."""
    of_tenant = tenant.tier or Tier.ENTERPRISE
    return of_tenant if key.tier is None else min(key.tier, of_tenant, key=_URGENCY.index)


def is_above(tier: Tier, other: Tier) -> bool:
    """Return whether ``tier`` is served before ``other``."""
    return _URGENCY.index(tier) > _URGENCY.index(other)


def lower_limit(one: int | None, other: int | None) -> int | None:
    """Return the lower of two limits; None: no limit."""
    return min((limit for limit in (one, other) if limit is not None), default=None)


def lower_limits(one: LimitSet, other: LimitSet) -> LimitSet:
    """Return the lower of each limit of a key and its tenant, by currency for a budget."""
    lower: dict[str, Any] = {}
    for name in KEY_LIMITS:
        sizes = getattr(one, name), getattr(other, name)
        lower[name] = _lower_budget(*sizes) if name == BUDGET else lower_limit(*sizes)
    return LimitSet(**lower)


def _lower_budget(one: Budget | None, other: Budget | None) -> Budget | None:
    budget = dict(budgets_of(one))
    for currency, amount in budgets_of(other).items():
        budget[currency] = min(amount, budget.get(currency, amount))
    return budget or None


def check_tenant(tenant: str) -> None:
    """Raise ValueError for an invalid tenant name."""
    if not _TENANT.fullmatch(tenant):
        raise ValueError(
            f"a tenant's name is 1 to {MAX_NAME_CHARACTERS} letters, digits, '.', '_' and '-', "
            "and begins with a letter or digit"
        )


def own_reply(tenant: str, name: str) -> str:
    """Return the listener that a tenant's service calls ``name``. Tenant names have no slash, so
    another tenant cannot have the same listener."""
    return f"{tenant}/{name}"


def may_reply_to(tenant: str, reply: str) -> bool:
    """Return whether a tenant may have frames sent to ``reply``, as far as the name shows.

    ``local``, the tenant of callers without a key, may also name any listener without a slash.
    """
    if reply in ("", tenant) or reply.startswith(f"{tenant}/"):
        return True
    return tenant == LOCAL_TENANT and "/" not in reply


def to_nano(money: Decimal) -> int:
    """Convert money to billionths of its unit, rounded up."""
    return int(money.scaleb(9).to_integral_value(ROUND_CEILING))


def from_nano(nano: int) -> Decimal:
    """Convert billionths to money, without needless zeros."""
    money = Decimal(nano).scaleb(-9).normalize()
    return money.quantize(Decimal(1)) if money == money.to_integral_value() else money
