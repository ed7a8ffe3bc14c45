"""What jobs need before they are queued, and what is given back of it when they end."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from bus.api import Bus
from gateway.request.context import LimiterLike
from gateway.request.entries import Entries
from gateway.request.models import ServedModelLike
from gateway.streams.fleet import Fleet
from gateway.tenancy.caller import Caller
from gateway.transport.http import Headers
from registry.pricing import cost
from schemas.errors import BusUnavailableError
from schemas.frames import Usage
from schemas.jobs import Job


class Admission:
    """A queue that takes jobs, and room for them within their caller's limits.

    What is reserved is given back once: by ``settle`` when its jobs have ended, or by ``give_back``
    if they were not queued. Gateways that go on with one another's answers reserve under the same
    id, which takes nothing more: who has let an answer go leaves what is reserved to the other.
    """

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        limiter: LimiterLike,
        entries: Entries,
        request_timeout_s: float,
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._limiter = limiter
        self._entries = entries
        self._request_timeout_s = request_timeout_s

    def check_door(self, model: str) -> None:
        """Raises QueueFullError or BusUnavailableError if a job would only be refused."""
        self._fleet.check_door(model)
        if not self._bus.connected:
            raise BusUnavailableError("The message bus is away. Try again in a moment.")

    async def reserve(
        self, caller: Caller, reservation_id: str, model: ServedModelLike, jobs: Sequence[Job]
    ) -> Headers:
        """Take what the jobs may need at most out of the caller's limits; headers that tell what is
        left. Raises what ``Limiter.reserve`` does."""
        num_prompt = sum(len(job.prompt_token_ids or ()) for job in jobs)
        num_completion = sum(job.sampling.max_tokens or 0 for job in jobs)
        await self._entries.give_back(reservation_id)
        reservation = await self._limiter.reserve(
            caller,
            reservation_id,
            model=jobs[0].model,
            tier=jobs[0].tier,
            num_prompt_tokens=num_prompt,
            max_tokens=num_completion,
            cost_upper=cost(model.prices, num_prompt, 0, num_completion),
            deadline_s=self._request_timeout_s,
            longest_tokens=max(
                len(job.prompt_token_ids or ()) + (job.sampling.max_tokens or 0) for job in jobs
            ),
        )
        return reservation.headers

    def give_back(self, reservation_id: str) -> None:
        """Nothing was served. Returns at once."""
        self._limiter.settle_soon(reservation_id, None, None)

    def settle(
        self, reservation_id: str, model: ServedModelLike, usages: Sequence[Usage | None]
    ) -> None:
        """The jobs of a reservation have ended; None for one that nothing was computed for. Returns
        at once."""
        known = [usage for usage in usages if usage is not None]
        if not known:
            self.give_back(reservation_id)
            return
        total = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in known),
            cached_tokens=sum(usage.cached_tokens for usage in known),
            completion_tokens=sum(usage.completion_tokens for usage in known),
        )
        price = sum((_price(model, usage) for usage in known), Decimal(0))
        self._limiter.settle_soon(reservation_id, total, price)


def _price(model: ServedModelLike, usage: Usage) -> Decimal:
    return cost(model.prices, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
