"""``POST /v1/embeddings``: a job for each input, answered together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core import Gateway
from gateway.errors import DrainingError, refusal_of, refusal_of_end
from gateway.rendering.embedding_vectors import VectorForm
from gateway.rendering.rendering import read_long
from gateway.request.models import ServedModelLike
from gateway.request.parsing import decode
from gateway.request.tracing import TRACEPARENT, RequestTrace
from gateway.streams.stream import Client, OpenStream
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
from registry.pricing import cost
from registry.tokenizers.prompt_pool import PromptPool
from schemas.embeddings import (
    MAX_INPUTS,
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingUsage,
)
from schemas.errors import MillraceError, ParameterError
from schemas.frames import Done, TerminalFrame, Usage
from schemas.jobs import MAX_LABEL_CHARACTERS, Job, Source

# Jobs of one request that are in the queue or run at a time.
MAX_JOBS_AT_ONCE = 64

_ROUTE = "/v1/embeddings"
_NS_PER_S = 1_000_000_000
_CANCELLED = "cancelled"
_PROMPT_FIELDS = ("prompt", "prompt_token_ids")

Input = str | tuple[int, ...]


class _Made(NamedTuple):
    """What became of one input."""

    embedding: msgspec.Raw
    usage: Usage


class _EndedBadlyError(Exception):
    """A job ended in something else than an embedding."""

    def __init__(self, end: TerminalFrame) -> None:
        super().__init__(type(end).__name__)
        self.end = end


class _Waiting(Client):
    """Waits for the end of one stream."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.config.client_buffer_bytes)
        self._gateway = gateway
        self._over = asyncio.Event()
        self._dropped = ""

    def wake(self, stream: OpenStream) -> None:
        # What is taken wakes us for the next news; there is no text to keep.
        stream.take(self._gateway.clock.monotonic(), self._gateway.metrics.gaps)
        if stream.ended:
            self._over.set()

    def drop(self, reason: str) -> None:
        """Nothing of an embedding waits to be written, so nobody can be slow to read it: it is the
        gateway that goes."""
        self._dropped = reason
        self._over.set()

    async def over(self) -> None:
        """Return when the stream has ended. Raises DrainingError if this gateway goes before."""
        await self._over.wait()
        if self._dropped:
            raise DrainingError("This gateway is shutting down. Send the request again.")


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
        trace = traces.begin(traceparent, _ROUTE, request.method)
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
                trace.over(status, refusal)
        return response if trace is None else _with_headers(response, trace.headers)

    async def _embed(self, request: Request, trace: RequestTrace | None) -> Response:
        """All inputs are embedded, or the whole request is an error; a client that leaves cancels
        what is not done."""
        caller = await self._gateway.identity.caller(request.scope)
        request_id = new_request_id("embd")
        async with self._gateway.entries.refusals_count(caller, request_id):
            return await self._answer(request, caller, request_id, trace)

    async def _answer(
        self, request: Request, caller: Caller, request_id: str, trace: RequestTrace | None
    ) -> Response:
        gateway = self._gateway
        body = await read_body(request.scope, request.receive, gateway.config)
        await gateway.entries.admit(caller, request_id, len(body))
        asked, inputs = await read_long(gateway.prompts, caller, body, self._read)
        model = await gateway.models.get(asked.model)
        form = form_of(asked, model)
        base = self._base_job(asked, request_id, model, caller)
        if trace is not None:
            trace.asked_for(asked.model)
            base = msgspec.structs.replace(base, traceparent=trace.context.traceparent)
        jobs = await jobs_of(base, inputs, model, gateway.prompts)
        num_tokens = sum(len(job.prompt_token_ids or ()) for job in jobs)
        await gateway.entries.give_back(request_id)
        reservation = await gateway.limiter.reserve(
            caller,
            request_id,
            model=asked.model,
            num_prompt_tokens=num_tokens,
            max_tokens=0,
            cost_upper=cost(model.prices, num_tokens, 0, 0),
            deadline_s=gateway.config.request_timeout_s,
            longest_tokens=max(len(job.prompt_token_ids or ()) for job in jobs),
        )
        made: list[_Made | None] = [None] * len(jobs)
        try:
            await self._make(jobs, form, made, request.receive)
        except _EndedBadlyError as error:
            refusal = refusal_of_end(error.end)
            headers = [*refusal.headers, *reservation.headers]
            return _with_headers(Response(refusal.body, refusal.status), [JSON, *headers])
        finally:
            usage = _sum(made)
            if trace is not None:
                trace.used(usage)
            spent = cost(model.prices, usage.prompt_tokens, usage.cached_tokens, 0)
            served = any(one is not None for one in made)
            gateway.limiter.settle_soon(
                request_id, usage if served else None, spent if served else None
            )
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
        return _with_headers(json_response(answer), reservation.headers)

    # --- from inputs to jobs ---

    def _read(self, body: bytes) -> tuple[EmbeddingRequest, list[Input]]:
        asked = decode(self._decoder, body)
        return asked, inputs_of(asked)

    def _base_job(
        self, asked: EmbeddingRequest, request_id: str, model: ServedModelLike, caller: Caller
    ) -> Job:
        gateway = self._gateway
        received_ns = gateway.clock.now_ns()
        return Job(
            request_id=request_id,
            model=asked.model,
            prompt_token_ids=(),
            pooling=asked.pooling or model.embedding_defaults.pooling,
            reply=gateway.gateway_id,
            batch_frames=True,
            tenant=caller.tenant,
            user=user_of(asked),
            tier=caller.tier,
            source=Source.HTTP,
            model_requested=asked.model,
            received_ns=received_ns,
            deadline_ns=received_ns + round(gateway.config.request_timeout_s * _NS_PER_S),
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
        gateway = self._gateway
        client = _Waiting(gateway)
        stream = await gateway.begin_job(job, client)
        try:
            await client.over()
            gateway.streams.finish(stream)
        finally:
            # Nothing to do if the end was taken.
            gateway.streams.leave(stream, _CANCELLED)
        reader = stream.reader
        end = reader.terminal
        assert end is not None
        if not isinstance(end, Done):
            raise _EndedBadlyError(end)
        assert reader.usage is not None
        return _Made(form.encode(reader.embedding), reader.usage)


def inputs_of(asked: EmbeddingRequest) -> list[Input]:
    """The texts and token ids to embed. Raises ParameterError."""
    given = asked.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise ParameterError("input", "input must not be empty")
    texts = [one for one in given if isinstance(one, str)]
    token_ids = [one for one in given if isinstance(one, int)]
    lists = [one for one in given if isinstance(one, tuple)]
    if len(token_ids) == len(given):
        return [tuple(token_ids)]
    if len(given) > MAX_INPUTS:
        raise ParameterError("input", f"input takes at most {MAX_INPUTS} items, got {len(given)}")
    if len(texts) == len(given):
        return list(texts)
    if len(lists) == len(given):
        return list(lists)
    raise ParameterError("input", "input must be texts, token ids or lists of token ids, not mixed")


async def jobs_of(
    base: Job, inputs: Sequence[Input], model: ServedModelLike, prompts: PromptPool
) -> list[Job]:
    """A job like ``base`` for each input. Raises MillraceError, naming the input at fault."""

    def prepare_all() -> list[Job]:
        # Nothing is drawn for an embedding, so any seed will do.
        seeds = random.Random(base.request_id)
        return [
            _prepare(base, index, one, is_list=len(inputs) > 1, model=model, seeds=seeds)
            for index, one in enumerate(inputs)
        ]

    return await prompts.run(base.tenant, sum(map(len, inputs)), prepare_all)


def form_of(asked: EmbeddingRequest, model: ServedModelLike) -> VectorForm:
    """How the vectors are given out. Raises ParameterError."""
    dimensions, size = asked.dimensions, model.embedding_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise ParameterError(
            "dimensions", f"dimensions must be between 1 and {size}, got {dimensions}"
        )
    normalize = asked.normalize
    if normalize is None:
        normalize = model.embedding_defaults.normalize
    return VectorForm(dimensions, normalize, asked.encoding_format == "base64")


def user_of(asked: EmbeddingRequest) -> str:
    """Raises ParameterError for a name that is too long."""
    user = asked.user or ""
    if len(user) > MAX_LABEL_CHARACTERS:
        raise ParameterError("user", f"user must have at most {MAX_LABEL_CHARACTERS} characters")
    return user


def _prepare(
    base: Job,
    index: int,
    given: Input,
    *,
    is_list: bool,
    model: ServedModelLike,
    seeds: random.Random,
) -> Job:
    where = f"input[{index}]" if is_list else "input"
    if not given:
        raise ParameterError("input", f"{where} must not be empty")
    text, token_ids = (given, None) if isinstance(given, str) else (None, given)
    request_id = f"{base.request_id}.{index}" if index else base.request_id
    job = msgspec.structs.replace(
        base, request_id=request_id, prompt=text, prompt_token_ids=token_ids
    )
    try:
        return model.prepare(job, seeds)
    except ParameterError as error:
        if error.param not in _PROMPT_FIELDS:
            raise
        raise ParameterError("input", error.message.replace(error.param, where, 1)) from error


def _sum(made: Sequence[_Made | None]) -> Usage:
    usages = [one.usage for one in made if one is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )


def _with_headers(response: Response, headers: Sequence[tuple[bytes, bytes]]) -> Response:
    for name, value in headers:
        response.headers[name.decode()] = value.decode()
    return response
