"""``GET /v1/limits``: what a caller may use, and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.bus.tenancy.accounts import Account, AccountUsage
from millrace.gateway.core import Gateway
from millrace.gateway.tenancy.identity import Caller, require_admin
from millrace.gateway.tenancy.limits import remaining
from millrace.gateway.transport.http import json_response
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LimitSet, budgets_of, check_tenant, from_nano


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of each limit of a ``LimitSet`` that requests use up; None: no limit.
    ``monthly_budget`` is the rest in each currency that has a budget."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    context_tokens: int | None
    monthly_budget: Mapping[str, Decimal] | None


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant or key: its limits, what is left of them, and what it has spent this month, by
    currency. What runs may cost ``held`` at most, which is not left either."""

    kind: Literal["tenant", "key"]
    name: str
    limits: LimitSet
    remaining: Remaining
    spent: Mapping[str, Decimal]
    held: Mapping[str, Decimal]


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /v1/limits``. ``tier`` is null for another tenant than the caller's."""

    tenant: str
    tier: Tier | None
    accounts: tuple[AccountLimits, ...]
    object: Literal["limits"] = "limits"


class LimitsApi:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [Route("/v1/limits", self.limits, methods=["GET"])]

    async def limits(self, request: Request) -> Response:
        """The caller's own; an administrator may ask for those of ``?tenant=``."""
        caller = await self._gateway.identity.caller(request.scope)
        asked = request.query_params.get("tenant")
        tier: Tier | None = caller.tier
        if asked is not None and asked != caller.tenant:
            require_admin(caller)
            try:
                check_tenant(asked)
            except ValueError as error:
                raise ParameterError("tenant", f"{error}.") from error
            caller, tier = Caller(tenant=asked), None
        accounts = await self._gateway.limiter.caller_usage(caller)
        answer = CallerLimits(
            tenant=caller.tenant,
            tier=tier,
            accounts=tuple(account_limits(account, usage) for account, usage in accounts),
        )
        return json_response(answer)


def account_limits(account: Account, usage: AccountUsage) -> AccountLimits:
    """An account as it is shown."""
    limits, budgets = account.limits, budgets_of(account.limits.monthly_budget)
    spent = {currency: from_nano(spend.spent_nano) for currency, spend in usage.money.items()}
    held = {currency: from_nano(spend.held_nano) for currency, spend in usage.money.items()}
    left_of = {
        currency: max(Decimal(0), budget - spent[currency] - held[currency])
        for currency, budget in budgets.items()
    }
    left = Remaining(
        requests_per_minute=_left(limits.requests_per_minute, usage.requests),
        tokens_per_minute=_left(limits.tokens_per_minute, usage.tokens),
        concurrent_requests=(
            None
            if limits.concurrent_requests is None
            else max(0, limits.concurrent_requests - usage.num_running)
        ),
        context_tokens=limits.context_tokens,
        monthly_budget=left_of or None,
    )
    return AccountLimits(
        kind=account.kind,
        name=account.name,
        limits=limits,
        remaining=left,
        spent=spent,
        held=held,
    )


def _left(per_minute: int | None, ticks: int) -> int | None:
    return None if per_minute is None else remaining(per_minute, ticks)
