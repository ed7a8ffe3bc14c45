"""``POST /v1/embeddings``: a job for each input, answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core import Gateway
from gateway.errors import refusal_of, refusal_of_end
from gateway.models import ServedModelLike
from gateway.rendering.embedding_jobs import Input, form_of, inputs_of, jobs_of, user_of
from gateway.rendering.embedding_vectors import VectorForm
from gateway.rendering.rendering import read_long
from gateway.request.job_maker import bare_job
from gateway.request.parsing import decode
from gateway.request.tracing import TRACEPARENT, RequestTrace
from gateway.streams.usage import total_usage
from gateway.tenancy.caller import Caller
from gateway.transport.http import (
    JSON,
    ClientLeftError,
    Receive,
    header_of,
    json_response,
    new_request_id,
    read_body,
    wait_for_disconnect,
)
from schemas.embeddings import (
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingUsage,
)
from schemas.errors import MillraceError
from schemas.frames import Done, TerminalFrame, Usage
from schemas.jobs import Job

# Jobs of one request that are in the queue or run at a time.
MAX_JOBS_AT_ONCE = 64

_ROUTE = "/v1/embeddings"
_NS_PER_S = 1_000_000_000


class _Made(NamedTuple):
    """What became of one input."""

    embedding: msgspec.Raw
    usage: Usage


class _EndedBadlyError(Exception):
    """A job ended in something else than an embedding."""

    def __init__(self, end: TerminalFrame) -> None:
        super().__init__(type(end).__name__)
        self.end = end


class Embeddings:
    """The endpoint over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    def routes(self) -> list[Route]:
        return [Route(_ROUTE, self.embed, methods=["POST"])]

    async def embed(self, request: Request) -> Response:
        """Answer, and tell of it in its trace if there is one."""
        traces = self._gateway.traces
        if traces is None:
            return await self._embed(request, None)
        traceparent = header_of(request.scope, TRACEPARENT)
        trace = traces.start(traceparent, _ROUTE, request.method)
        status, refusal = 500, None
        try:
            response = await self._embed(request, trace)
            status = response.status_code
        except MillraceError as error:
            refusal = refusal_of(error)
            status = refusal.status
            raise
        except ClientLeftError:
            status = 499
            raise
        finally:
            if trace is not None:
                trace.finish(status, refusal)
        return response if trace is None else _with_headers(response, trace.headers)

    async def _embed(self, request: Request, trace: RequestTrace | None) -> Response:
        """All inputs are embedded, or the whole request is an error; a client that leaves cancels
        what is not done."""
        caller = await self._gateway.identity.caller(request.scope)
        request_id = new_request_id("embd")
        async with self._gateway.intake_limits.refusals_count(caller, request_id):
            return await self._answer(request, caller, request_id, trace)

    async def _answer(
        self, request: Request, caller: Caller, request_id: str, trace: RequestTrace | None
    ) -> Response:
        gateway = self._gateway
        body = await read_body(request.scope, request.receive, gateway.config)
        await gateway.intake_limits.admit(caller, request_id, len(body))
        asked, inputs = await read_long(gateway.prompts, caller, body, self._read)
        model = await gateway.models.get(asked.model)
        form = form_of(asked, model)
        base = self._base_job(asked, request_id, model, caller)
        if trace is not None:
            trace.note_model(asked.model)
            base = msgspec.structs.replace(base, traceparent=trace.context.traceparent)
        jobs = await jobs_of(base, inputs, model, gateway.prompts)
        limit_headers = await gateway.admission.reserve(caller, request_id, model, jobs)
        made: list[_Made | None] = [None] * len(jobs)
        try:
            await self._make(jobs, form, made, request.receive)
        except _EndedBadlyError as error:
            refusal = refusal_of_end(error.end)
            headers = [*refusal.headers, *limit_headers]
            return _with_headers(Response(refusal.body, refusal.status), [JSON, *headers])
        finally:
            usage = total_usage(one.usage for one in made if one is not None)
            if trace is not None:
                trace.note_usage(usage)
            served = [None if one is None else one.usage for one in made]
            gateway.admission.settle(request_id, model, served)
        answer = EmbeddingList(
            data=tuple(
                EmbeddingObject(index=index, embedding=one.embedding)
                for index, one in enumerate(made)
                if one is not None
            ),
            model=asked.model,
            usage=EmbeddingUsage(
                prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens
            ),
        )
        return _with_headers(json_response(answer), limit_headers)

    # --- from inputs to jobs ---

    def _read(self, body: bytes) -> tuple[EmbeddingRequest, list[Input]]:
        asked = decode(self._decoder, body)
        return asked, inputs_of(asked)

    def _base_job(
        self, asked: EmbeddingRequest, request_id: str, model: ServedModelLike, caller: Caller
    ) -> Job:
        gateway = self._gateway
        received_ns = gateway.clock.now_ns()
        deadline_ns = received_ns + round(gateway.config.request_timeout_s * _NS_PER_S)
        job = bare_job(asked.model, caller, request_id, caller.tier, received_ns, deadline_ns)
        return msgspec.structs.replace(
            job,
            pooling=asked.pooling or model.embedding_defaults.pooling,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            reply=gateway.gateway_id,
            batch_frames=True,
            user=user_of(asked),
        )

    # --- jobs to embeddings ---

    async def _make(
        self, jobs: Sequence[Job], form: VectorForm, made: list[_Made | None], receive: Receive
    ) -> None:
        """Fill ``made``. Raises _EndedBadlyError, ClientLeftError, or MillraceError for a job that
        could not be published; the jobs that are under way are cancelled then."""
        numbers = iter(range(len(jobs)))

        async def work() -> None:
            for number in numbers:
                made[number] = await self._make_one(jobs[number], form)

        gone = asyncio.create_task(wait_for_disconnect(receive))
        workers = {asyncio.create_task(work()) for _ in range(min(len(jobs), MAX_JOBS_AT_ONCE))}
        pending: set[asyncio.Task[None]] = workers
        try:
            while pending:
                await asyncio.wait({*pending, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientLeftError
                for worker in pending:
                    if worker.done():
                        worker.result()
                pending = {worker for worker in pending if not worker.done()}
        finally:
            tasks = (*workers, gone)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _make_one(self, job: Job, form: VectorForm) -> _Made:
        reader, _ = await self._gateway.runner.run(job)
        end = reader.terminal
        assert end is not None
        if not isinstance(end, Done):
            raise _EndedBadlyError(end)
        assert reader.usage is not None
        return _Made(form.encode(reader.embedding), reader.usage)


def _with_headers(response: Response, headers: Sequence[tuple[bytes, bytes]]) -> Response:
    for name, value in headers:
        response.headers[name.decode()] = value.decode()
    return response
