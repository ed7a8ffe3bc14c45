"""Responses that continue on another connection, at this gateway or another."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from msgspec.structs import replace

from millrace.gateway.request.index import RequestState
from millrace.gateway.request.job_maker import job_id, job_of
from millrace.gateway.request.response_reader import AcceptedRequest
from millrace.gateway.request.response_stream import ResponseContext, ResponseStream
from millrace.gateway.streams.deliveries import continue_statistics, statistics_of
from millrace.gateway.streams.stream import Client
from millrace.gateway.tenancy.identity import Caller
from millrace.schemas.control import DeliveryStatistics, HandedOver
from millrace.schemas.errors import MillraceError, ParameterError

_HANDOVER_TIMEOUT_S = 0.5


class UnknownRequestError(MillraceError, code="request_not_found", http_status=404):
    """Request id that is unknown for this caller."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"There is no request {request_id!r:.200} to resume: it is not yours, or too old."
        )
        self.param = "request_id"


class Resuming:
    """Resumption of responses. ``resume`` takes a response over from its holder, ``hand_over``
    gives one away, ``share`` reads one beside its holder, ``adopt`` takes one without a holder.
    """

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._gateway_id = context.config.gateway_id
        self._clock = context.clock
        self._started_ns = context.clock.now_ns()
        self._streams = context.streams
        self._sharing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def resume(
        self,
        caller: Caller,
        request_id: str,
        next_indices: tuple[int, ...],
        client: Client,
        *,
        owner: object = None,
    ) -> ResponseStream:
        """Return the response from ``next_indices`` on, one for each choice. The previous holder
        gets nothing more of it.

        Raises UnknownRequestError, ParameterError for invalid indices, RedisUnreachableError, and
        AuthenticationError for a key that was revoked since it was shown.
        """
        await self._context.identity.check_key(caller)
        state = await self._state_of(caller, request_id)
        num_choices = _num_choices(state)
        if len(next_indices) != num_choices:
            raise ParameterError(
                "next_index", f"This request has {num_choices} choices: give an index for each."
            )
        if min(next_indices) < 0:
            raise ParameterError("next_index", "next_index must not be negative.")
        model = await self._context.models.get(state.request.model, adapter=state.request.adapter)
        accepted = AcceptedRequest.of(state, state.request, caller, model)
        # Of rounds that have not been requested yet.
        keep_transcript = await self._context.identity.keeps_transcripts(state.tenant)
        handed_over: HandedOver | None = HandedOver(started_ns=self._started_ns)
        if state.holder != self._gateway_id:
            handed_over = await self._ask_holder(state)
        is_dead = handed_over is None
        statistics = {} if handed_over is None else handed_over.seen
        responses, history = self._context.responses, self._context.history
        former = responses.get(request_id)
        if former is None and self._has_ended(state, handed_over):
            state = replace(state, was_counted=True)
        if former is not None:
            statistics |= self._statistics_of(former)
            former.hand_off()
        statistics = {**history.of(request_id), **statistics}
        if not statistics:
            statistics = self._first_statistics(state, next_indices, is_dead=is_dead)
        # Of rounds that have not been read yet.
        history.keep(request_id, statistics)
        response = ResponseStream(
            self._context,
            accepted,
            first_indices=next_indices,
            owner=owner,
            was_counted=state.was_counted,
        )
        for index, own in enumerate(_by_job(state, next_indices)):
            job = job_of(state, index, keep_transcript=keep_transcript)
            # The result of a beam search comes as a whole or not at all.
            from_index = 0 if job.sampling.use_beam_search else own[0]
            stream = self._streams.take_over(job, client, response, from_index)
            stream.was_counted = state.was_counted
            if job.request_id in statistics:
                continue_statistics(stream, statistics[job.request_id], self._clock)
            response.add_choices(stream, own)
        responses.add(response, replace(state, holder=self._gateway_id))
        try:
            await self._follow(response, state, is_dead=is_dead)
        except BaseException:
            # The response continues, for a later request.
            response.detach(None, "failed")
            raise
        return response

    async def adopt(
        self, caller: Caller, request_id: str, client: Client, *, owner: object = None
    ) -> ResponseStream | None:
        """Return the response from its beginning if it has no holder, else None. Raises
        UnknownRequestError and RedisUnreachableError.
        """
        lock = self._sharing.setdefault(request_id, asyncio.Lock())
        # Of concurrent calls, the first becomes the holder that the others find.
        async with lock:
            state = await self._state_of(caller, request_id)
            await self._context.identity.check_key(caller)
            is_here = self._context.responses.get(request_id) is not None
            if is_here or await self._is_held_elsewhere(state):
                return None
            indices = (0,) * _num_choices(state)
            return await self.resume(caller, request_id, indices, client, owner=owner)

    async def share(
        self, caller: Caller, request_id: str, client: Client, *, owner: object = None
    ) -> ResponseStream:
        """Return the response from its beginning, for one more client; other clients continue to
        read it. Without a holder, this gateway becomes the holder.

        Raises UnknownRequestError and RedisUnreachableError.
        """
        adopted = await self.adopt(caller, request_id, client, owner=owner)
        if adopted is not None:
            return adopted
        state = await self._state_of(caller, request_id)
        indices = (0,) * _num_choices(state)
        held = self._context.responses.get(request_id)
        if held is None:
            model = await self._context.models.get(
                state.request.model, adapter=state.request.adapter
            )
        else:
            model = held.model  # it may be out of the catalogue by now
        accepted = AcceptedRequest.of(state, state.request, caller, model)
        response = ResponseStream(
            self._context, accepted, first_indices=indices, owner=owner, is_copy=True
        )
        is_foreign = None if held is not None else state.origin != self._gateway_id
        for index in range(_num_jobs(state)):
            job = job_of(state, index, keep_transcript=False)
            response.add_choices(self._streams.copy(job, client, response, is_foreign=is_foreign))
        self._context.responses.copies.add(response)
        return response

    async def _is_held_elsewhere(self, state: RequestState) -> bool:
        if state.holder == self._gateway_id:
            return False
        try:
            return await self._context.bus.control.is_gateway_there(
                state.holder, state.request_id, _HANDOVER_TIMEOUT_S
            )
        except (MillraceError, TimeoutError):
            return False

    async def _follow(
        self, response: ResponseStream, state: RequestState, *, is_dead: bool
    ) -> None:
        """Redirect the frames to this gateway. ``is_dead``: the holder is gone."""
        is_foreign = state.origin != self._gateway_id
        try:
            if is_foreign:
                # The origin may have died before the holder did.
                origin_is_dead = is_dead and state.origin == state.holder
                await self._streams.subscribe_as_proxy_for(state.origin, is_dead=origin_is_dead)
                is_foreign = not origin_is_dead
        finally:
            for choice in response.choices:
                self._streams.follow(choice.stream, is_foreign=is_foreign)
        if state.holder != self._gateway_id:
            await self._context.index.put(replace(state, holder=self._gateway_id))

    def hand_over(self, request_id: str) -> HandedOver | None:
        """Hand off a response that another gateway takes over."""
        history = self._context.history
        response = self._context.responses.get(request_id)
        statistics = history.of(request_id)
        history.forget(request_id)
        if response is None:
            return HandedOver(seen=statistics, started_ns=self._started_ns)
        token_ids = tuple(response.choices[0].stream.reader.token_ids)
        statistics = {**statistics, **self._statistics_of(response)}
        response.hand_off()
        return HandedOver(token_ids=token_ids, seen=statistics)

    def _has_ended(self, state: RequestState, handed_over: HandedOver | None) -> bool:
        """Return whether a gateway has recorded the end of a request that is not here, according to
        its holder's answer. Records of a dead holder are unknown before the deadline.
        """
        if handed_over is not None and handed_over.started_ns is None:
            return False  # the holder still had it
        ended_there = handed_over is not None and state.created_ns >= (handed_over.started_ns or 0)
        return ended_there or self._clock.now_ns() > state.deadline_ns

    def _statistics_of(self, response: ResponseStream) -> dict[str, DeliveryStatistics]:
        """Return the client's statistics of the running rounds."""
        streams = [choice.stream for choice in response.choices]
        return {stream.request_id: statistics_of(stream, self._clock) for stream in streams}

    def _first_statistics(
        self, state: RequestState, next_indices: tuple[int, ...], *, is_dead: bool
    ) -> dict[str, DeliveryStatistics]:
        """Return the initial statistics of a response with no known deliveries. A response that is
        read again from its beginning, after its end, is a delivery of its own.
        """
        goes_on = is_dead or any(next_indices)
        if not goes_on or self._clock.now_ns() > state.deadline_ns:
            return {}
        return {
            job_id(state.request_id, index, 0): DeliveryStatistics(received_ns=state.created_ns)
            for index in range(_num_jobs(state))
        }

    async def _state_of(self, caller: Caller, request_id: str) -> RequestState:
        """Return the state of a request from this gateway, also while Redis is unreachable, or from
        Redis. Raises UnknownRequestError, also for another tenant's request.
        """
        state = self._context.responses.state_of(request_id) or await self._context.index.get(
            request_id
        )
        if state is None or state.tenant != caller.tenant:
            raise UnknownRequestError(request_id)
        return state

    async def _ask_holder(self, state: RequestState) -> HandedOver | None:
        """Ask the holder to hand over; return None if the holder is gone."""
        try:
            return await self._context.bus.control.hand_over(
                state.holder, state.request_id, _HANDOVER_TIMEOUT_S
            )
        except (MillraceError, TimeoutError):
            return None


def _by_job(state: RequestState, of_choices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group values of choices by their jobs."""
    size = state.request.sampling.num_answers
    return [of_choices[start : start + size] for start in range(0, len(of_choices), size)]


def _num_jobs(state: RequestState) -> int:
    return _num_choices(state) // state.request.sampling.num_answers


def _num_choices(state: RequestState) -> int:
    return state.request.sampling.n * (1 + len(state.request.other_prompts))
