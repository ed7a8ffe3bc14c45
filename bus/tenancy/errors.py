"""Errors of requests over a limit."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.bus.tenancy.accounts import (
    NEVER,
    NEXT_MONTH,
    Account,
    AccountUsage,
    Demand,
    LimitDecision,
    next_month_s,
)
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.schemas.errors import ContextLengthError, MillraceError
from millrace.schemas.tenants import budgets_of, from_nano

_RETRY_AFTER_S = 2.0


class RateLimitError(MillraceError, code="rate_limit_exceeded", retryable=True, http_status=429):
    """Request over a limit; ``limit`` is its name, as in ``schemas.tenants.LimitSet``.

    ``comes_back``: there is room again this month. ``usages`` are those of ``accounts``.
    ``headers`` are for HTTP servers to add.
    """

    def __init__(
        self,
        message: str,
        limit: str,
        retry_after_s: float | None,
        accounts: Sequence[Account],
        usages: Sequence[AccountUsage],
        *,
        comes_back: bool,
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.accounts = accounts
        self.usages = usages
        self.comes_back = comes_back
        self.headers: list[tuple[bytes, bytes]] = []


class RequestsPerMinuteError(RateLimitError, code="requests_per_minute"):
    """Too many requests in the last minute."""


class TokensPerMinuteError(RateLimitError, code="tokens_per_minute"):
    """Too many tokens in the last minute."""


class TooManyTokensError(TokensPerMinuteError, retryable=False):
    """Request with more tokens than the limit ever admits."""


class ConcurrentRequestsError(RateLimitError, code="concurrent_requests"):
    """Too many requests at the same time."""


class InsufficientQuotaError(RateLimitError, code="insufficient_quota"):
    """The month's budget does not cover what the request may cost."""


class TierContextError(ContextLengthError):
    """Prompt and completion exceed what the caller's tier may hold at once."""

    limit = "context_tokens"


class KeyGoneError(MillraceError, code="invalid_api_key", http_status=401):
    """API key that was revoked since it was looked up, or no longer exists."""

    def __init__(self, key_id: str, *, is_revoked: bool) -> None:
        super().__init__(f"The API key {key_id} is no longer valid.")
        self.key_id = key_id
        self.is_revoked = is_revoked


class LimitsUnreachableError(RedisUnreachableError):
    """Batch job that is not admitted while Redis is unreachable and its tenant's usage is
    unknown."""

    retry_after_s = _RETRY_AFTER_S


# Error classes by the name of the limit.
RATE_LIMIT_ERRORS: dict[str, type[RateLimitError]] = {
    "requests_per_minute": RequestsPerMinuteError,
    "tokens_per_minute": TokensPerMinuteError,
    "concurrent_requests": ConcurrentRequestsError,
    "monthly_budget": InsufficientQuotaError,
}


def rate_limit_error(
    accounts: Sequence[Account], decision: LimitDecision, demand: Demand, now_ns: int
) -> RateLimitError:
    """Make the error with the limit's account and size, and when there is room again."""
    account = decision.refused_by
    assert account is not None, "it was granted"
    kind = RATE_LIMIT_ERRORS[decision.limit]
    size = getattr(account.limits, decision.limit)
    if decision.limit == "monthly_budget":
        size = f"{budgets_of(size)[demand.currency]} {demand.currency}"
    retry_after_s: float | None = decision.wait_ms / 1_000
    if decision.wait_ms == NEVER:
        kind, retry_after_s = TooManyTokensError, None
        advice = f"The request alone may take {demand.num_tokens}. Lower max_tokens."
    elif decision.wait_ms == NEXT_MONTH:
        retry_after_s = next_month_s(now_ns)
        spent, _ = decision.usages[accounts.index(account)].spend(demand.currency)
        advice = (
            f"{from_nano(spent)} {demand.currency} is spent and the request may cost "
            f"{from_nano(demand.cost_nano)} {demand.currency}. "
            "A new month begins at 00:00 UTC on the first."
        )
    elif decision.limit == "monthly_budget":
        advice = "The rest is reserved for running requests. Try again when some have ended."
    elif decision.limit == "concurrent_requests":
        advice = "Try again when one of them has ended."
    else:
        advice = f"Try again in {decision.wait_ms / 1_000:.1f} s."
    whose = f"{account.kind} {account.name}"
    message = f"Limit {decision.limit} of {whose} reached: {size}. {advice}"
    return kind(
        message,
        decision.limit,
        retry_after_s,
        accounts,
        decision.usages,
        comes_back=decision.wait_ms not in (NEVER, NEXT_MONTH),
    )


def check_request_alone(account: Account, demand: Demand) -> None:
    """Raise TierContextError for a request that alone exceeds the context limit."""
    size = account.limits.context_tokens
    if size is not None and demand.num_context_tokens > size:
        whose = f"{account.kind} {account.name} (tier {demand.tier.value})"
        raise TierContextError(
            demand.num_prompt_tokens,
            demand.max_tokens or None,
            size,
            limit=f"Requests of {whose} may hold {size} tokens.",
        )
