"""The limits of a gateway's callers, and what they are told of them."""

from __future__ import annotations

from millrace.bus.tenancy.accounts import Account, AccountUsage, Demand
from millrace.bus.tenancy.errors import KeyGoneError, RateLimitError
from millrace.bus.tenancy.keeper import Granted, Holder, LimitKeeper
from millrace.gateway.tenancy.caller import Caller
from millrace.gateway.tenancy.identity import AuthenticationError, revoked_key, unknown_key
from millrace.gateway.tenancy.limit_headers import rate_headers
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig


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

    async def reserve(self, holder: Holder, demand: Demand) -> Granted:
        """As ``LimitKeeper.reserve``. A RateLimitError has headers that say what is left.

        Raises AuthenticationError for a key that was revoked by now.
        """
        try:
            return await super().reserve(holder, demand)
        except RateLimitError as error:
            error.headers = rate_headers(error.accounts, error.usages)
            raise
        except KeyGoneError as error:
            raise _authentication_error(error) from error

    async def caller_usage(self, caller: Caller) -> list[tuple[Account, AccountUsage]]:
        """As ``usage``. Raises AuthenticationError for a key that is gone."""
        try:
            return await self.usage(caller)
        except KeyGoneError as error:
            raise _authentication_error(error) from error


def _authentication_error(error: KeyGoneError) -> AuthenticationError:
    return revoked_key(error.key_id) if error.is_revoked else unknown_key()
