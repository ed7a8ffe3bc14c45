"""Answers that go on with another connection, at this gateway or after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from msgspec.structs import replace

from bus.api import Bus
from gateway.request.index import RequestIndex, RequestState
from gateway.request.job_maker import job_id
from gateway.request.models import Models
from gateway.request.response_stream import Answer
from gateway.request.submitter import Asker
from gateway.streams.delivery_statistics import go_on_from, seen_of
from gateway.streams.stream import Client
from gateway.streams.streams import StreamTable
from gateway.tenancy.caller import Caller
from runtime.clock import Clock
from schemas.control import HandedOver, Seen
from schemas.errors import MillraceError, ParameterError
from schemas.jobs import Job

_HANDOVER_TIMEOUT_S = 0.5
_NS_PER_S = 1_000_000_000


class UnknownRequestError(MillraceError):
    """No request of that id is known for this caller."""

    code = "request_not_found"
    http_status = 404

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"There is no request {request_id!r:.200} to go on with: it is not yours, or too old."
        )
        self.param = "request_id"


class Resuming:
    """``resume`` takes an answer over from whoever held it, ``hand_over`` gives one away, ``share``
    reads one beside whoever holds it."""

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        index: RequestIndex,
        asker: Asker,
        streams: StreamTable,
        models: Models,
        clock: Clock,
        check_key: Callable[[Caller], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._index = index
        self._asker = asker
        self._streams = streams
        self._models = models
        self._clock = clock
        self._check_key = check_key
        self._sharing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def resume(
        self,
        caller: Caller,
        request_id: str,
        next_indices: tuple[int, ...],
        client: Client,
        *,
        owner: object = None,
    ) -> Answer:
        """The answer from ``next_indices`` on, one for each choice. Whoever had it before gets
        nothing more of it.

        Raises UnknownRequestError, ParameterError for indices that cannot be,
        RedisUnreachableError, and AuthenticationError for a key that was revoked since it was
        shown.
        """
        await self._check_key(caller)
        state = await self._state_of(request_id)
        if state is None or state.tenant != caller.tenant:
            raise UnknownRequestError(request_id)
        ask = state.ask
        num_choices = ask.sampling.n * (1 + len(ask.other_prompts))
        if len(next_indices) != num_choices:
            raise ParameterError(
                "next_index", f"This request has {num_choices} choices: give an index for each."
            )
        if min(next_indices) < 0:
            raise ParameterError("next_index", "next_index must not be negative.")
        model = await self._models.get(ask.model)
        # Of rounds that are still to be asked for.
        keeps_transcripts = await self._asker.keeps_transcripts(state.tenant)
        is_dead = False
        seen: dict[str, Seen] = {}
        if state.holder != self._gateway_id:
            handed_over = await self._take_from(state)
            is_dead = handed_over is None
            seen = {} if handed_over is None else handed_over.seen
        former = self._asker.get(request_id)
        if former is not None:
            seen |= self._seen_of(former)
            former.let_go()
        seen = {**self._asker.seen.of(request_id), **seen}
        if not seen:
            seen = self._unseen(state, next_indices, is_dead=is_dead)
        # Those of rounds that are still to be read.
        self._asker.seen.keep(request_id, seen)
        answer = Answer(
            self._asker,
            ask,
            caller,
            model,
            request_id,
            state.created_ns // _NS_PER_S,
            session=state.session,
            idempotency_key=state.idempotency_key,
            first_indices=next_indices,
            owner=owner,
        )
        for index, next_index in enumerate(next_indices):
            job = self._job(state, job_id(request_id, index, 0), keeps_transcripts)
            stream = self._streams.take_over(job, client, answer, next_index)
            if job.request_id in seen:
                go_on_from(stream, seen[job.request_id], self._clock)
            answer.choices.append(self._asker.choice(answer, index, stream, next_index))
        self._asker.keep(answer, replace(state, holder=self._gateway_id))
        try:
            await self._follow(answer, state, is_dead=is_dead)
        except BaseException:
            # It goes on, for whoever asks again.
            answer.hold(None, "failed")
            raise
        return answer

    async def share(
        self, caller: Caller, request_id: str, client: Client, *, owner: object = None
    ) -> Answer:
        """The answer from its beginning, for one more client; those who read it go on reading.
        Where nobody holds it any more, this one does from now on.

        Raises UnknownRequestError and RedisUnreachableError.
        """
        lock = self._sharing.setdefault(request_id, asyncio.Lock())
        # Of several at once, who finds nobody to hold it is the one that the others find.
        async with lock:
            state = await self._state_of(request_id)
            if state is None or state.tenant != caller.tenant:
                raise UnknownRequestError(request_id)
            await self._check_key(caller)
            num_choices = state.ask.sampling.n * (1 + len(state.ask.other_prompts))
            if self._asker.get(request_id) is None and not await self._is_held_elsewhere(state):
                indices = (0,) * num_choices
                return await self.resume(caller, request_id, indices, client, owner=owner)
        model = await self._models.get(state.ask.model)
        answer = Answer(
            self._asker,
            state.ask,
            caller,
            model,
            request_id,
            state.created_ns // _NS_PER_S,
            session=state.session,
            idempotency_key=state.idempotency_key,
            first_indices=(0,) * num_choices,
            owner=owner,
            is_copy=True,
        )
        is_foreign = None if self._asker.get(request_id) else state.origin != self._gateway_id
        for index in range(num_choices):
            job = self._job(state, job_id(request_id, index, 0), keep_transcript=False)
            stream = self._streams.copy(job, client, answer, is_foreign=is_foreign)
            answer.choices.append(self._asker.choice(answer, index, stream))
        self._asker.copies.add(answer)
        return answer

    async def _is_held_elsewhere(self, state: RequestState) -> bool:
        if state.holder == self._gateway_id:
            return False
        try:
            return await self._bus.control.is_gateway_there(
                state.holder, state.request_id, _HANDOVER_TIMEOUT_S
            )
        except (MillraceError, TimeoutError):
            return False

    async def _follow(self, answer: Answer, state: RequestState, *, is_dead: bool) -> None:
        """Have the frames come here; ``is_dead``: the holder is not there any more."""
        is_foreign = state.origin != self._gateway_id
        try:
            if is_foreign:
                # The origin may have died before the holder did.
                origin_is_dead = is_dead and state.origin == state.holder
                await self._streams.stand_in_for(state.origin, is_dead=origin_is_dead)
                is_foreign = not origin_is_dead
        finally:
            for choice in answer.choices:
                self._streams.follow(choice.stream, is_foreign=is_foreign)
        if state.holder != self._gateway_id:
            await self._index.put(replace(state, holder=self._gateway_id))

    def hand_over(self, request_id: str) -> HandedOver | None:
        """Let go of an answer that another gateway takes over."""
        answer = self._asker.get(request_id)
        seen = self._asker.seen.of(request_id)
        self._asker.seen.forget(request_id)
        if answer is None:
            return HandedOver(seen=seen)
        token_ids = tuple(answer.choices[0].stream.reader.token_ids)
        seen = {**seen, **self._seen_of(answer)}
        answer.let_go()
        self._asker.forget(answer)
        return HandedOver(token_ids=token_ids, seen=seen)

    def _seen_of(self, answer: Answer) -> dict[str, Seen]:
        """What the client saw of the rounds that run."""
        streams = [choice.stream for choice in answer.choices]
        return {stream.request_id: seen_of(stream, self._clock) for stream in streams}

    def _unseen(
        self, state: RequestState, next_indices: tuple[int, ...], *, is_dead: bool
    ) -> dict[str, Seen]:
        """What is certain of an answer that nobody knows more of than that it was begun: when. One
        that is read again from its beginning, after its end, is a delivery of its own."""
        goes_on = is_dead or any(next_indices)
        if not goes_on or self._clock.now_ns() > state.deadline_ns:
            return {}
        return {
            job_id(state.request_id, index, 0): Seen(received_ns=state.created_ns)
            for index in range(len(next_indices))
        }

    async def _state_of(self, request_id: str) -> RequestState | None:
        """What this gateway knows itself, also while Redis is away, or what others wrote."""
        own = self._asker.state_of(request_id)
        return own if own is not None else await self._index.get(request_id)

    async def _take_from(self, state: RequestState) -> HandedOver | None:
        """None: the holder is not there any more."""
        try:
            return await self._bus.control.hand_over(
                state.holder, state.request_id, _HANDOVER_TIMEOUT_S
            )
        except (MillraceError, TimeoutError):
            return None

    def _job(self, state: RequestState, request_id: str, keep_transcript: bool) -> Job:
        ask = state.ask
        return Job(
            request_id=request_id,
            model=ask.model,
            prompt_token_ids=(),
            sampling=replace(ask.sampling, n=1),
            reply=state.origin,
            batch_frames=True,
            store_result=state.keep_result,
            tenant=state.tenant,
            user=ask.user,
            session_id=ask.session_id,
            tier=state.tier,
            source=state.source,
            model_requested=ask.model_requested or ask.model,
            route_reason=ask.route_reason,
            received_ns=state.created_ns,
            deadline_ns=state.deadline_ns,
            traceparent=state.traceparent,
            keep_transcript=keep_transcript,
        )
