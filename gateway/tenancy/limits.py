"""The limits of a gateway's callers, and what they are told of them."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from millrace.bus.tenancy.accounts import Account, AccountUsage
from millrace.bus.tenancy.errors import KeyGoneError, RateLimitError
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.gateway.tenancy.caller import Caller
from millrace.gateway.tenancy.identity import AuthenticationError, revoked_key, unknown_key
from millrace.gateway.tenancy.limit_headers import rate_headers
from millrace.gateway.transport.http import Headers
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig
from millrace.schemas.jobs import Tier


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What was set aside for a request. ``headers`` tell the client what is left; ``degraded``:
    Redis was unreachable, and the limits were this process's own."""

    headers: Headers
    degraded: bool = False


class Limiter(LimitKeeper):
    """A ``LimitKeeper`` for callers, with errors and headers as HTTP has them."""

    def __init__(
        self,
        link: RedisLink | None,
        config: GatewayConfig,
        clock: Clock,
        *,
        redis_time: bool = True,
    ) -> None:
        super().__init__(link, config.tiers, clock, redis_time=redis_time)

    async def reserve(
        self,
        caller: Caller,
        request_id: str,
        *,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
        cost_upper: Decimal,
        deadline_s: float,
        tier: Tier | None = None,
        longest_tokens: int | None = None,
        num_requests: int = 1,
    ) -> Reservation:
        """As ``take``. Raises AuthenticationError for a key revoked by now."""
        try:
            taken = await self.take(
                caller,
                request_id,
                model=model,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                cost_upper=cost_upper,
                deadline_s=deadline_s,
                tier=tier,
                longest_tokens=longest_tokens,
                num_requests=num_requests,
            )
        except RateLimitError as error:
            error.headers = rate_headers(error.accounts, error.usages)
            raise
        except KeyGoneError as error:
            raise _authentication_error(error) from error
        headers = rate_headers(taken.accounts, taken.usages)
        return Reservation(headers=headers, degraded=taken.degraded)

    async def caller_usage(self, caller: Caller) -> list[tuple[Account, AccountUsage]]:
        """As ``usage``. Raises AuthenticationError for a key that is gone."""
        try:
            return await self.usage(caller)
        except KeyGoneError as error:
            raise _authentication_error(error) from error


def _authentication_error(error: KeyGoneError) -> AuthenticationError:
    return revoked_key(error.key_id) if error.is_revoked else unknown_key()
