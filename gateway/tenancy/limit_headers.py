"""What is left of the limits per minute, in the headers of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.bus.tenancy.accounts import Account, AccountUsage, room
from millrace.gateway.transport.http import Headers

_MS_PER_S = 1_000
_MS_PER_MINUTE = 60 * _MS_PER_S
_MS_PER_HOUR = 60 * _MS_PER_MINUTE


def rate_headers(accounts: Sequence[Account], usages: Sequence[AccountUsage]) -> Headers:
    """Size, rest and time until all is back, of whichever account has the least left; nothing is
    said about what has no limit."""
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
    """When a bucket has all of its limit to give again."""
    return -(-ticks // per_minute)


def duration(ms: int) -> str:
    """As OpenAI writes it: ``20ms``, ``1.5s``, ``6m0s``, ``1h0m5s``."""
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
