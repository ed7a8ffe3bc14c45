"""``GET /v1/limits``: what a caller may use, and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.bus.tenancy.accounts import Account, AccountUsage, remaining
from millrace.gateway.core import Gateway
from millrace.gateway.tenancy.identity import Caller, require_admin
from millrace.gateway.transport.http import json_response
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LimitSet, Remaining, check_tenant, from_nano


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
    spent = {currency: from_nano(spend.spent_nano) for currency, spend in usage.money.items()}
    held = {currency: from_nano(spend.held_nano) for currency, spend in usage.money.items()}
    return AccountLimits(
        kind=account.kind,
        name=account.name,
        limits=account.limits,
        remaining=remaining(account, usage),
        spent=spent,
        held=held,
    )
