"""Submission of a well-formed request: session, jobs, limits, streams, queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from millrace.gateway.models import ServedModelLike
from millrace.gateway.request.admission import tier_of
from millrace.gateway.request.index import RequestState
from millrace.gateway.request.job_maker import job_of, prompt_token_ids
from millrace.gateway.request.response_reader import AcceptedRequest
from millrace.gateway.request.response_stream import ResponseContext, ResponseStream
from millrace.gateway.request.resuming import Resuming, UnknownRequestError
from millrace.gateway.request.tracing import RequestTrace
from millrace.gateway.streams.stream import Client, OpenStream
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.chat.asked import Asked
from millrace.schemas.jobs import Job, Source
from millrace.schemas.records import ClientEnd
from millrace.schemas.sessions import SessionInfo

_POLL_S = 0.05
_SUBMITTED_WITHIN_S = 3.0
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Requester:
    """Origin of a request: its caller, the client that reads the response (``owner`` is its own
    object), its endpoint, and its trace.

    ``arrived_s`` (monotonic) is when the gateway began to read the request; None if no client
    waited for that. ``asked`` is for its record.
    """

    caller: Caller
    client: Client
    source: Source = Source.HTTP
    owner: object = None
    trace: RequestTrace | None = None
    arrived_s: float | None = None
    asked: Asked | None = None


class RequestSubmitter:
    """Submitter of requests. The first request with an Idempotency-Key is answered, and its result
    stored. Equal requests get a copy of that answer from its beginning, also while it is still in
    progress.
    """

    def __init__(self, context: ResponseContext, resuming: Resuming) -> None:
        self._context = context
        self._resuming = resuming
        self._submitting: set[str] = set()

    async def submit(
        self,
        request: GenerationRequest,
        requester: Requester,
        new_id: str,
        key: str = "",
        digest: str = "",
    ) -> ResponseStream:
        """Return the response, new or known. A new response has the request id ``new_id``.
        ``digest`` distinguishes requests with one ``key``. A request without a key is always new.

        Raises IdempotencyConflictError for a key of another request, RedisUnreachableError, and the
        errors of ``submit_new``; the key can be used again then.
        """
        if not key:
            return await self.submit_new(request, requester, new_id)
        context, index, tenant = self._context, self._context.index, requester.caller.tenant
        awaited_id, give_up_s = "", 0.0
        while True:
            # Claimed in each iteration: the holder of the key may be refused and release it.
            known_id = await index.claim(tenant, key, digest, new_id)
            now_s = context.clock.monotonic()
            if known_id == new_id:
                break
            if known_id != awaited_id:
                awaited_id, give_up_s = known_id, now_s + _SUBMITTED_WITHIN_S
            try:
                # Response in progress or done, if it was accepted so far.
                response = await self._resuming.share(
                    requester.caller, known_id, requester.client, owner=requester.owner
                )
            except UnknownRequestError:
                if now_s >= give_up_s and not self._is_here(known_id):
                    break  # The gateway that claimed the key died.
                await context.clock.sleep(_POLL_S)
                continue
            if requester.trace is not None:
                requester.trace.attach_response(response)
            context.metrics.count_repeated_answer(response.request.model)
            return response
        self._submitting.add(known_id)
        try:
            # If the claimant of the key died before the queue had the job, it is submitted now
            # under the same id, which the queue takes once.
            return await self.submit_new(request, requester, known_id, key)
        except BaseException:
            if context.responses.get(known_id) is None:  # otherwise another caller has submitted it
                await index.release(tenant, key, known_id)
            raise
        finally:
            self._submitting.discard(known_id)

    async def submit_new(
        self,
        request: GenerationRequest,
        requester: Requester,
        request_id: str,
        idempotency_key: str = "",
    ) -> ResponseStream:
        """Choose the model, fit the session, build the jobs, admit them, open their streams and
        publish them; return the accepted response. The caller must check for a client that left
        meanwhile.

        Raises MillraceError, and then nothing was stored.
        """
        context, caller, trace = self._context, requester.caller, requester.trace
        context.admission.check_open()
        received_ns, received_s = context.clock.now_ns(), context.clock.monotonic()
        # Choose the model.
        request = await context.choice.resolve(request, caller.tenant, tier_of(request, caller))
        model = await context.models.get(request.model, adapter=request.adapter)
        if trace is not None:
            trace.note_request(request)
        async with self._in_session(request, caller, model, request_id) as (session, request):
            # Build the jobs.
            state = self._state(
                request, requester, request_id, received_ns, session, idempotency_key
            )
            keep_transcript = await context.identity.keeps_transcripts(caller.tenant)
            base = job_of(state, 0, keep_transcript=keep_transcript)
            jobs = await context.maker.jobs(base, request, model, caller)
            if (notices := jobs[0].notices) != request.notices:
                request = replace(request, notices=notices)
                state = replace(state, request=replace(state.request, notices=notices))
            told_ids = prompt_token_ids(jobs, request)
            state = replace(state, reasoning=jobs[0].sampling.reasoning, prompt_token_ids=told_ids)
            if trace is not None:
                jobs = [trace.add_context(job) for job in jobs]
            # Admit them.
            context.admission.check_queue(jobs[0].model)
            context.admission.check_open()
            headers = await context.admission.reserve(caller, request_id, model, jobs)
            # Open their streams.
            accepted = AcceptedRequest.of(state, request, caller, model)
            response = ResponseStream(context, accepted, headers=headers, owner=requester.owner)
            if trace is not None:
                trace.attach_response(response)
            if (former := context.responses.get(request_id)) is not None:
                former.hand_off()  # the same Idempotency-Key at the same moment
            streams = [
                context.streams.open(job, requester.client, received_s, response) for job in jobs
            ]
            for stream in streams:
                if requester.arrived_s is not None:
                    stream.delivery.intake_s = received_s - requester.arrived_s
                response.add_choices(stream)
            # Publish them. Other clients can attach only after acceptance.
            context.responses.add(response, None)
            try:
                await publish_for(response, request_id, jobs, streams)
                if context.responses.get(request_id) is response:
                    context.responses.add(response, state)
                    await context.index.put(state)
            except BaseException:
                response.abort("failed")
                context.responses.remove(response)
                raise
            return response

    def _is_here(self, request_id: str) -> bool:
        """Return whether this gateway submits the request, or has its response."""
        return request_id in self._submitting or (
            self._context.responses.get(request_id) is not None
        )

    def _state(
        self,
        request: GenerationRequest,
        requester: Requester,
        request_id: str,
        received_ns: int,
        session: SessionInfo | None,
        idempotency_key: str,
    ) -> RequestState:
        gateway_id, trace = self._context.config.gateway_id, requester.trace
        needs_prompt = request.server_tools or request.echo
        return RequestState(
            request_id=request_id,
            tenant=requester.caller.tenant,
            origin=gateway_id,
            holder=gateway_id,
            source=requester.source,
            tier=tier_of(request, requester.caller),
            created_ns=received_ns,
            deadline_ns=received_ns + round(self._context.config.request_timeout_s * _NS_PER_S),
            keep_result=bool(idempotency_key or request.server_tools),
            request=request if needs_prompt else _without_prompt(request),
            session=session,
            idempotency_key=idempotency_key,
            traceparent="" if trace is None else trace.context.traceparent,
            key_id=requester.caller.key_id,
            asked=requester.asked or Asked(),
        )

    @asynccontextmanager
    async def _in_session(
        self, request: GenerationRequest, caller: Caller, model: ServedModelLike, request_id: str
    ) -> AsyncGenerator[tuple[SessionInfo | None, GenerationRequest]]:
        """Return the request with its session's messages in front. The session keeps nothing of a
        refused request.
        """
        if not request.session_id:
            yield None, request
            return
        sessions = self._context.sessions
        fitted = await sessions.open_turn(caller, request, model, request_id)
        try:
            yield fitted.info, replace(request, messages=fitted.messages)
        except BaseException:
            self._context.responses.tasks.spawn(
                sessions.abandon_turn(caller.tenant, request.session_id, request_id),
                "abandon a turn",
            )
            raise


def _without_prompt(request: GenerationRequest) -> GenerationRequest:
    sampling = request.sampling
    if sampling.grammar is not None:
        sampling = replace(sampling, grammar=None)
    return replace(
        request,
        prompt=None,
        messages=None,
        prompt_token_ids=(),
        other_prompts=("",) * len(request.other_prompts),
        sampling=sampling,
    )


async def publish_for(
    response: ResponseStream,
    reservation_id: str,
    jobs: Sequence[Job],
    streams: Sequence[OpenStream],
    first_reply: str = "",
) -> None:
    """Publish the jobs of a response. Their reservation ``reservation_id`` is released if
    ``publish_jobs`` raises.
    """
    context, error = response.context, ""
    since_ns = context.clock.now_ns()
    try:
        await publish_jobs(context, jobs, streams, first_reply)
    except BaseException as failure:
        error = type(failure).__name__
        response.release(reservation_id)
        raise
    finally:
        if response.trace is not None:
            response.trace.record_publish(jobs, since_ns, error)


async def publish_jobs(
    context: ResponseContext,
    jobs: Sequence[Job],
    streams: Sequence[OpenStream],
    first_reply: str = "",
) -> None:
    """Publish jobs whose streams are open: all of them or none. Returns when the queue has stored
    them.

    Frames of a job that was in the queue already may go to ``first_reply``. Raises the error of a
    job that cannot be stored, after cancelling the stored jobs.
    """
    try:
        stored = await asyncio.gather(
            *(context.bus.jobs.publish(job, reserved=True) for job in jobs), return_exceptions=True
        )
    except BaseException:
        for stream in streams:
            context.streams.discard(stream)
        raise
    failed = next((one for one in stored if isinstance(one, BaseException)), None)
    for stream, published in zip(streams, stored, strict=True):
        if isinstance(published, BaseException):
            context.streams.discard(stream)
            continue
        if published.duplicate:
            if first_reply:
                stream.job = replace(stream.job, reply=first_reply)
            context.streams.follow(stream)
        context.streams.accept(stream, published.stream_sequence)
        if failed is not None:
            context.streams.abort(stream, ClientEnd.REFUSED)
    if failed is not None:
        raise failed
