"""Limits of a gateway's callers, and their headers with the remaining amounts."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.bus.tenancy.accounts import Account, AccountUsage, Demand, room
from millrace.bus.tenancy.errors import KeyGoneError, RateLimitError
from millrace.bus.tenancy.keeper import Granted, Holder, LimitKeeper
from millrace.gateway.tenancy.identity import AuthenticationError, Caller, revoked_key, unknown_key
from millrace.gateway.transport.http import Headers
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig

_MS_PER_S = 1_000
_MS_PER_MINUTE = 60 * _MS_PER_S
_MS_PER_HOUR = 60 * _MS_PER_MINUTE


def rate_headers(accounts: Sequence[Account], usages: Sequence[AccountUsage]) -> Headers:
    """Return headers with the limit, the rest and the time until full, of the account with the
    least left. Unlimited quantities have no headers.
    """
    requests = [
        (account.limits.requests_per_minute, usage.requests)
        for account, usage in zip(accounts, usages, strict=True)
    ]
    tokens = [
        (account.limits.tokens_per_minute, usage.tokens)
        for account, usage in zip(accounts, usages, strict=True)
    ]
    return [*_headers("requests", requests), *_headers("tokens", tokens)]


def full_after_ms(per_minute: int, ticks: int) -> int:
    """Return the time in ms until a bucket is full again."""
    return -(-ticks // per_minute)


def duration(ms: int) -> str:
    """Format a duration as OpenAI does: ``20ms``, ``1.5s``, ``6m0s``, ``1h0m5s``."""
    if ms < _MS_PER_S:
        return f"{ms}ms"
    hours, rest_ms = divmod(ms, _MS_PER_HOUR)
    minutes, rest_ms = divmod(rest_ms, _MS_PER_MINUTE)
    text = f"{rest_ms / _MS_PER_S:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _headers(what: str, buckets: list[tuple[int | None, int]]) -> Headers:
    limited = [(limit, ticks) for limit, ticks in buckets if limit is not None]
    if not limited:
        return []
    limit, ticks = min(limited, key=lambda bucket: room(*bucket))
    values = (
        ("limit", str(limit)),
        ("remaining", str(room(limit, ticks))),
        ("reset", duration(full_after_ms(limit, ticks))),
    )
    return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values]


class Limiter(LimitKeeper):
    """``LimitKeeper`` for callers, with errors and headers for HTTP."""

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
        """Reserve as ``LimitKeeper.reserve`` does. A RateLimitError has headers with the remaining
        amounts.

        Raises AuthenticationError for a key that was revoked meanwhile.
        """
        try:
            return await super().reserve(holder, demand)
        except RateLimitError as error:
            error.headers = rate_headers(error.accounts, error.usages)
            raise
        except KeyGoneError as error:
            raise _authentication_error(error) from error

    async def caller_usage(self, caller: Caller) -> list[tuple[Account, AccountUsage]]:
        """Return ``usage`` of a caller. Raises AuthenticationError for a revoked key."""
        try:
            return await self.usage(caller)
        except KeyGoneError as error:
            raise _authentication_error(error) from error


def _authentication_error(error: KeyGoneError) -> AuthenticationError:
    return revoked_key(error.key_id) if error.is_revoked else unknown_key()
