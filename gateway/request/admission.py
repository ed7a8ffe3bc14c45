"""Admission of jobs: checks and reservations before they are queued, released when they have
ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal

from millrace.bus.api import Bus
from millrace.bus.store.watch import StoreWatch
from millrace.bus.tenancy.accounts import Demand
from millrace.bus.tenancy.errors import RateLimitError
from millrace.gateway.errors import DrainingError
from millrace.gateway.models import ServedModelLike
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.stream import total_usage
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tenancy.limits import Limiter, rate_headers
from millrace.gateway.transport.http import Headers
from millrace.registry.pricing import cost
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.errors import BusUnavailableError, MillraceError, ParameterError
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import Job, Tier

# A longer body costs enough to be counted before it is parsed.
LONG_BODY_BYTES = 64 * 1024

_LAPSES_AFTER_S = 120.0
_NO_TOKENS = Usage()
_NOTHING = Decimal(0)


_URGENCY = {Tier.BATCH: 0, Tier.FREE: 1, Tier.PRO: 2, Tier.ENTERPRISE: 3}


class Admission:
    """Admission of requests by the queue and by their caller's limits.

    Each reservation is released once: by ``settle`` when its jobs have ended, or by ``release`` if
    they were not queued. Gateways that continue each other's responses reserve under the same id,
    which reserves nothing more. While ``draining`` no new request is accepted.

    A refused request still counts as a request of its caller (``entry``). A long body takes its
    entry before it is read, so that a caller over the limit costs no work. The entry is released
    when the jobs reserve, so the request counts once.
    """

    def __init__(
        self,
        bus: Bus,
        fleet: FleetView,
        stores: StoreWatch,
        limiter: Limiter,
        prompts: PromptPool,
        request_timeout_s: float,
    ) -> None:
        self.draining = False
        self._bus = bus
        self._fleet = fleet
        self._stores = stores
        self._limiter = limiter
        self._prompts = prompts
        self._entries: set[str] = set()
        self._request_timeout_s = request_timeout_s

    def check_open(self) -> None:
        """Raise DrainingError, or the error of ``StoreWatch.check`` while a store has no room."""
        if self.draining:
            raise DrainingError
        self._stores.check()

    def check_queue(self, model: str) -> None:
        """Raise QueueFullError or BusUnavailableError if the queue would refuse a job."""
        self._fleet.check_queue(model)
        if not self._bus.connected:
            raise BusUnavailableError("The message bus is unreachable. Try again in a moment.")

    async def reserve(
        self,
        caller: Caller,
        reservation_id: str,
        model: ServedModelLike,
        jobs: Sequence[Job],
        deadline_s: float | None = None,
    ) -> Headers:
        """Reserve the maximum that the jobs may need of the caller's limits; return headers with
        the remaining amounts. Repeated calls reserve once. A later round of tools is not a request
        of its own.

        Raises the errors of ``Limiter.reserve``.
        """
        num_prompt = sum(job.num_paid_prompt_tokens for job in jobs)
        num_completion = sum(job.max_completion_tokens for job in jobs)
        await self._give_back(reservation_id)
        demand = Demand(
            request_id=reservation_id,
            tier=jobs[0].tier,
            num_prompt_tokens=num_prompt,
            max_tokens=num_completion,
            longest_tokens=max(map(_longest_tokens, jobs)),
            cost=cost(model.prices, num_prompt, 0, num_completion),
            currency=model.prices.currency,
            deadline_s=self._request_timeout_s if deadline_s is None else deadline_s,
            num_requests=0 if jobs[0].part is not None and jobs[0].part.round else 1,
        )
        granted = await self._limiter.reserve(caller, demand)
        return rate_headers(granted.accounts, granted.usages)

    def release(self, reservation_id: str) -> None:
        """Release a reservation of which nothing was served. Returns at once."""
        self._limiter.settle_soon(reservation_id, None, None)

    def settle(
        self, reservation_id: str, model: ServedModelLike, usages: Sequence[Usage | None]
    ) -> None:
        """Settle a reservation whose jobs have ended, by their usages; None for a job without any
        computation. Returns at once.
        """
        known = [usage for usage in usages if usage is not None]
        if not known:
            self.release(reservation_id)
            return
        costs = (
            cost(model.prices, one.prompt_tokens, one.cached_tokens, one.completion_tokens)
            for one in known
        )
        price = sum(costs, _NOTHING)
        self._limiter.settle_soon(reservation_id, total_usage(known), price, model.prices.currency)

    # --- refused requests ---

    @asynccontextmanager
    async def refusals_count(self, caller: Caller, request_id: str) -> AsyncIterator[None]:
        """Count requests that are refused within this context."""
        try:
            yield
        except MillraceError as error:
            if not _is_of_the_request(error):
                raise
            if request_id not in self._entries:
                await self._take_entry(caller, request_id)
            self._entries.discard(request_id)
            self._limiter.settle_soon(_entry_id(request_id), _NO_TOKENS, _NOTHING)
            raise
        finally:
            await self._give_back(request_id)

    @asynccontextmanager
    async def counts(self, caller: Caller, request_id: str, num_bytes: int) -> AsyncIterator[None]:
        """Count the work within this context as a request, however it ends."""
        self._prompts.check_room(caller.tenant, num_bytes)
        await self._take_entry(caller, request_id)
        self._entries.discard(request_id)
        try:
            yield
        finally:
            self._limiter.settle_soon(_entry_id(request_id), _NO_TOKENS, _NOTHING)

    async def admit_body(self, caller: Caller, request_id: str, num_bytes: int) -> None:
        """Admit a body for parsing. Raises TooManyLongPromptsError, or the errors of
        ``Limiter.reserve``, for a long body.
        """
        if num_bytes <= LONG_BODY_BYTES:
            return
        self._prompts.check_room(caller.tenant, num_bytes)
        await self._take_entry(caller, request_id)

    async def _give_back(self, request_id: str) -> None:
        """Release the entry of a request that is counted otherwise, or that failed through no fault
        of its caller.
        """
        if request_id in self._entries:
            self._entries.discard(request_id)
            await self._limiter.settle(_entry_id(request_id), None, None)

    async def _take_entry(self, caller: Caller, request_id: str) -> None:
        demand = Demand(
            request_id=_entry_id(request_id), tier=caller.tier, deadline_s=_LAPSES_AFTER_S
        )
        await self._limiter.reserve(caller, demand)
        self._entries.add(request_id)


def tier_of(request: GenerationRequest, caller: Caller) -> Tier:
    """Return the tier of a request: the caller's own, or a less urgent tier that the request
    names.
    """
    if request.tier is None:
        return caller.tier
    if _URGENCY[request.tier] > _URGENCY[caller.tier]:
        raise ParameterError(
            "service_tier",
            f"Your tier is {caller.tier}; service_tier may name that or a less urgent one.",
        )
    return request.tier


def _longest_tokens(job: Job) -> int:
    """Return the maximum number of tokens of the prompt and one completion; an embedding has no
    completion.
    """
    num_completion = 0 if job.pooling is not None else job.sampling.max_tokens or 0
    return len(job.prompt_token_ids or ()) + num_completion


def _entry_id(request_id: str) -> str:
    """Return the id of the entry, which is a reservation beside the request's own."""
    return f"{request_id}.entry"


def _is_of_the_request(error: MillraceError) -> bool:
    """Return whether the error is the request's fault. A limit's refusal is already counted, and
    errors of this server are not the caller's fault.
    """
    return error.http_status < 500 and not error.retryable and not isinstance(error, RateLimitError)
