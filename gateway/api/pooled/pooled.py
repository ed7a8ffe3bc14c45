"""Requests with answers made of embeddings or labels: a job for each input, answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import read_long
from millrace.gateway.errors import refusal_of, refusal_of_end
from millrace.gateway.models import ServedModelLike
from millrace.gateway.request.embedding_jobs import Input, jobs_of, user_of
from millrace.gateway.request.job_maker import bare_job
from millrace.gateway.request.tracing import TRACEPARENT, RequestTrace
from millrace.gateway.streams.stream import total_usage
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import (
    JSON,
    ClientLeftError,
    Receive,
    header_of,
    json_response,
    new_request_id,
    read_body,
    request_id_header,
    wait_for_disconnect,
)
from millrace.registry.requests.message_fields import metadata_of, priority_of
from millrace.schemas.chat.asked import Api
from millrace.schemas.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    EmbeddingUsage,
    RerankRequest,
    ScoreRequest,
)
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.frames import Done, TerminalFrame, Usage
from millrace.schemas.jobs import Job
from millrace.schemas.notices import NOTICE_HEADER, Notices, bounded, header_value
from millrace.schemas.pooling import Pooling

# Maximum number of queued or running jobs per request.
MAX_JOBS_AT_ONCE = 64

_NS_PER_S = 1_000_000_000


class AnswerHead(NamedTuple):
    """Metadata of an answer. ``usage`` and ``notices`` cover all inputs; ``created_s`` is UTC epoch
    seconds.
    """

    request_id: str
    created_s: int
    usage: EmbeddingUsage
    notices: Notices = ()


class PooledPlan(NamedTuple):
    """Plan of a pooled request: the model's computation for each input, and the conversion of its
    results.

    ``of_input`` converts the pooled values of one input, little-endian float32; ``whole`` makes the
    body from the results of ``of_input`` for all inputs.
    """

    inputs: Sequence[Input]
    pooling: Pooling
    of_input: Callable[[bytes], Any]
    whole: Callable[[Sequence[Any], AnswerHead], object]


class PooledAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed body. ``model`` is None if the body names none. ``plan`` is called once the model is
    known, and raises ParameterError for unsupported fields.
    """

    model: str | None
    plan: Callable[[ServedModelLike], PooledPlan]
    user: str = ""
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    metadata: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        asked: EmbeddingRequest | ClassifyRequest | RerankRequest | ScoreRequest,
        plan: Callable[[ServedModelLike], PooledPlan],
        num_kept: int | None,
    ) -> PooledAsk:
        """Build an ask from a parsed body. Raises ParameterError for a field that cannot be
        honoured.
        """
        return cls(
            model=asked.model,
            plan=plan,
            user=user_of(asked.user),
            truncate_prompt_tokens=num_kept,
            priority=priority_of(asked.priority),
            metadata=metadata_of(asked.metadata),
        )


class _Made(NamedTuple):
    """Result of one input."""

    made: Any
    usage: Usage


class _EndedBadlyError(Exception):
    """End of a job without numbers."""

    def __init__(self, end: TerminalFrame) -> None:
        super().__init__(type(end).__name__)
        self.end = end


class PooledEndpoint:
    """Endpoint for pooled requests at each of ``paths``. ``read`` raises MillraceError for a body
    that cannot be honoured.
    """

    def __init__(
        self,
        gateway: Gateway,
        paths: Sequence[str],
        id_prefix: str,
        api: Api,
        read: Callable[[bytes], PooledAsk],
    ) -> None:
        self._gateway = gateway
        self._paths = paths
        self._id_prefix = id_prefix
        self._api = api
        self._read = read

    def routes(self) -> list[Route]:
        return [Route(path, self.answer, methods=["POST"]) for path in self._paths]

    async def answer(self, request: Request) -> Response:
        """Answer a request and record its trace, if it has one."""
        traces = self._gateway.traces
        if traces is None:
            return await self._answer(request, None)
        traceparent = header_of(request.scope, TRACEPARENT)
        trace = traces.start(traceparent, self._paths[0], request.method)
        status, refusal = 500, None
        try:
            response = await self._answer(request, trace)
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

    async def _answer(self, request: Request, trace: RequestTrace | None) -> Response:
        """Answer once the results of all inputs are read; an error of one input fails the whole
        request. Cancel unfinished jobs if the client leaves.
        """
        caller = await self._gateway.identity.caller(request.scope)
        request_id = new_request_id(self._id_prefix)
        async with self._gateway.admission.refusals_count(caller, request_id):
            return await self._answer_to(request, caller, request_id, trace)

    async def _answer_to(
        self, request: Request, caller: Caller, request_id: str, trace: RequestTrace | None
    ) -> Response:
        gateway = self._gateway
        body = await read_body(request.scope, request.receive, gateway.config)
        await gateway.admission.admit_body(caller, request_id, len(body))
        asked = await read_long(gateway.prompts, caller, body, self._read)
        name = asked.model
        if name is None:
            name = await self._only_scorer(caller.tenant)
        model = await gateway.models.get_named(name, caller.tenant)
        plan = asked.plan(model)
        base = self._base_job(asked, name, request_id, plan.pooling, caller)
        if trace is not None:
            trace.note_model(name)
            base = msgspec.structs.replace(base, traceparent=trace.context.traceparent)
        jobs = await jobs_of(base, plan.inputs, model, gateway.prompts)
        notices = bounded([one for job in jobs for one in job.notices])
        left = await gateway.admission.reserve(caller, request_id, model, jobs)
        headers = [request_id_header(request_id), *left]
        if notices:
            headers.append((NOTICE_HEADER, header_value(notices)))
        made: list[_Made | None] = [None] * len(jobs)
        try:
            await self._make(jobs, plan, made, request.receive)
        except _EndedBadlyError as error:
            refusal = refusal_of_end(error.end)
            path = request.scope["route"].path
            gateway.failure_log.failed(path, refusal, caller.tenant, request_id)
            headers = [*refusal.headers, *headers]
            return _with_headers(Response(refusal.body, refusal.status), [JSON, *headers])
        finally:
            usage = total_usage(one.usage for one in made if one is not None)
            if trace is not None:
                trace.note_usage(usage)
            served = [None if one is None else one.usage for one in made]
            gateway.admission.settle(request_id, model, served)
        head = AnswerHead(
            request_id,
            jobs[0].received_ns // _NS_PER_S,
            EmbeddingUsage.of(usage.prompt_tokens),
            notices,
        )
        answer = plan.whole([one.made for one in made if one is not None], head)
        return _with_headers(json_response(answer), headers)

    async def _only_scorer(self, tenant: str) -> str:
        """Return the model for a body that names none: the only cross-encoder, or the only model.

        Raises ParameterError if there are several.
        """
        names = self._gateway.models.names()
        scorers = [one for one in names if await self._is_scorer(one, tenant)]
        if len(scorers) != 1 and len(names) != 1:
            raise ParameterError(
                "model", f"Several models are served; name one in model: {', '.join(names):.500}."
            )
        return (scorers or names)[0]

    async def _is_scorer(self, name: str, tenant: str) -> bool:
        try:
            model = await self._gateway.models.get(name, tenant)
        except MillraceError:
            return False  # its files are unusable
        return model.task == "score"

    def _base_job(
        self, asked: PooledAsk, model: str, request_id: str, pooling: Pooling, caller: Caller
    ) -> Job:
        gateway = self._gateway
        received_ns = gateway.clock.now_ns()
        deadline_ns = received_ns + round(gateway.config.request_timeout_s * _NS_PER_S)
        job = bare_job(model, caller, request_id, caller.tier, received_ns, deadline_ns, self._api)
        return msgspec.structs.replace(
            job,
            pooling=pooling,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            priority=asked.priority,
            reply=gateway.gateway_id,
            batch_frames=True,
            user=asked.user,
            metadata=asked.metadata,
        )

    # --- jobs to numbers ---

    async def _make(
        self,
        jobs: Sequence[Job],
        plan: PooledPlan,
        made: list[_Made | None],
        receive: Receive,
    ) -> None:
        """Fill ``made``. On an error, cancel the running jobs.

        Raises _EndedBadlyError, ClientLeftError, or MillraceError for a job that could not be
        published.
        """
        numbers = iter(range(len(jobs)))

        async def work() -> None:
            for number in numbers:
                made[number] = await self._make_one(jobs[number], plan)

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

    async def _make_one(self, job: Job, plan: PooledPlan) -> _Made:
        reader, _ = await self._gateway.runner.run(job)
        end = reader.terminal
        assert end is not None
        if not isinstance(end, Done):
            raise _EndedBadlyError(end)
        assert reader.usage is not None
        return _Made(plan.of_input(reader.embedding), reader.usage)


def _with_headers(response: Response, headers: Sequence[tuple[bytes, bytes]]) -> Response:
    for name, value in headers:
        response.headers[name.decode()] = value.decode()
    return response
