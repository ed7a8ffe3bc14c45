"""Requests as their callers' limits see them before anybody knows what they ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal

from millrace.bus.tenancy.errors import RateLimitError
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tenancy.limits import Limiter
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Usage

# A longer body costs enough to be counted before it is read as a request.
LONG_BODY_BYTES = 64 * 1024

_LAPSES_AFTER_S = 120.0
_NO_TOKENS = Usage()
_NOTHING = Decimal(0)


class IntakeLimits:
    """Counts requests that come to nothing. One that is refused for what it says counts as a
    request of its caller's; a long one already before it is read, so that a caller over the limit
    costs no work. Both may raise what ``Limiter.reserve`` does instead.

    What was taken for a long request is given back when its jobs take what they need, so it counts
    once.
    """

    def __init__(self, limiter: Limiter, prompts: PromptPool) -> None:
        self._limiter = limiter
        self._prompts = prompts
        self._taken: set[str] = set()

    @asynccontextmanager
    async def refusals_count(self, caller: Caller, request_id: str) -> AsyncIterator[None]:
        """What is refused within counts as a request."""
        try:
            yield
        except MillraceError as error:
            if not _is_of_the_request(error):
                raise
            if request_id not in self._taken:
                await self._take(caller, request_id)
            self._taken.discard(request_id)
            self._limiter.settle_soon(_id_of(request_id), _NO_TOKENS, _NOTHING)
            raise
        finally:
            await self.give_back(request_id)

    @asynccontextmanager
    async def counts(self, caller: Caller, request_id: str, num_bytes: int) -> AsyncIterator[None]:
        """What is done within counts as a request, however it ends."""
        self._prompts.check_room(caller.tenant, num_bytes)
        await self._take(caller, request_id)
        self._taken.discard(request_id)
        try:
            yield
        finally:
            self._limiter.settle_soon(_id_of(request_id), _NO_TOKENS, _NOTHING)

    async def admit(self, caller: Caller, request_id: str, num_bytes: int) -> None:
        """Let a body be read as a request. Raises TooManyLongPromptsError, or what
        ``Limiter.reserve`` does, for a long one that is not to be read now."""
        if num_bytes <= LONG_BODY_BYTES:
            return
        self._prompts.check_room(caller.tenant, num_bytes)
        await self._take(caller, request_id)

    async def give_back(self, request_id: str) -> None:
        """Something else counts this request, or it is nobody's fault that it came to nothing."""
        if request_id in self._taken:
            self._taken.discard(request_id)
            await self._limiter.settle(_id_of(request_id), None, None)

    async def _take(self, caller: Caller, request_id: str) -> None:
        await self._limiter.reserve(
            caller,
            _id_of(request_id),
            model="",
            num_prompt_tokens=0,
            max_tokens=0,
            cost_upper=_NOTHING,
            deadline_s=_LAPSES_AFTER_S,
        )
        self._taken.add(request_id)


def _id_of(request_id: str) -> str:
    """Of the reservation, beside the one of the request itself."""
    return f"{request_id}.entry"


def _is_of_the_request(error: MillraceError) -> bool:
    """Whether it is refused for what it says; a limit's own refusal takes nothing more, and what
    is broken or unreachable here is not the caller's fault."""
    return error.http_status < 500 and not error.retryable and not isinstance(error, RateLimitError)
