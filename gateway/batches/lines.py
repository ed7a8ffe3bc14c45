"""Jobs of a batch's requests, and the bodies made of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from millrace.bus.stored_results import end_of, frames_of
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import Endpoint, Prepared
from millrace.gateway.errors import Refusal, refusal_of_end
from millrace.gateway.models import ServedModelLike
from millrace.gateway.rendering.embedding_vectors import VectorForm, form_of
from millrace.gateway.request.embedding_jobs import (
    embedding_pooling,
    jobs_of,
    truncated_inputs,
    user_of,
)
from millrace.gateway.request.job_maker import bare_job, prompt_token_ids
from millrace.gateway.request.response_reader import AcceptedRequest, ResponseReader
from millrace.gateway.streams.stream import NULL_CLIENT, OpenStream, total_usage
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import metadata_of, priority_of
from millrace.schemas.chat.asked import Api
from millrace.schemas.embeddings import (
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingUsage,
)
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.frames import Done
from millrace.schemas.jobs import Job, JobResult, RequestPart, Tier

_NS_PER_S = 1_000_000_000
_TIERS = (None, Tier.BATCH)


class LogprobsLostError(MillraceError, code="answer_too_large", http_status=413):
    """Answer with more log-probabilities than a message may hold."""

    def __init__(self) -> None:
        super().__init__(
            "The answer with its log-probabilities is too large to be stored. Ask for fewer "
            "alternatives or fewer tokens."
        )


class LineAttempt(NamedTuple):
    """Line of a batch, with the number of earlier attempts. A shed line is queued again, with new
    job ids. A line is one request with one id, whichever gateway runs it.
    """

    batch_id: str
    line: int
    attempt: int = 0

    @property
    def request_id(self) -> str:
        """Return the line's request id, the same for all attempts."""
        return f"{self.batch_id}.{self.line}"

    @property
    def job_id(self) -> str:
        """Return the id of the attempt's first job."""
        return self.request_id + (f"-{self.attempt}" if self.attempt else "")

    def job(self, model: str, caller: Caller, received_ns: int, deadline_ns: int, api: Api) -> Job:
        """Return the attempt's first job without its prompt."""
        job = bare_job(model, caller, self.job_id, Tier.BATCH, received_ns, deadline_ns, api)
        part = RequestPart(request_id=self.request_id, attempt=self.attempt)
        return replace(job, store_result=True, part=part, batch_id=self.batch_id)


@dataclass(frozen=True)
class BatchOrder(ABC):
    """Parsed request of a batch: its jobs, and the body made of their results."""

    gateway: Gateway
    caller: Caller
    model: ServedModelLike
    attempt: LineAttempt
    jobs: Sequence[Job]

    @property
    def form_field(self) -> str:
        """Return the field that demands a format of the answers; empty if none does."""
        return ""

    async def reserve(self) -> None:
        """Reserve the maximum that the jobs may need of the caller's limits. Repeated calls reserve
        once. Raises MillraceError if a limit is reached.
        """
        deadline_ns = self.jobs[0].deadline_ns or 0
        await self.gateway.admission.reserve(
            self.caller,
            self.attempt.job_id,
            self.model,
            self.jobs,
            deadline_s=max(deadline_ns - self.gateway.clock.now_ns(), 0) / _NS_PER_S,
        )

    def settle(self, results: Sequence[JobResult]) -> None:
        """Charge the computed tokens and release the rest of the reservation. Nothing is charged
        without results.
        """
        usages = [result.usage for result in results]
        self.gateway.admission.settle(self.attempt.job_id, self.model, usages)

    def refusal(self, results: Sequence[JobResult]) -> Refusal | None:
        """Return the reason for a missing answer; None if all results are good."""
        for result in results:
            end = end_of(result)
            if not isinstance(end, Done):
                return refusal_of_end(end, self.form_field)
        return None

    @abstractmethod
    async def render(self, results: Sequence[JobResult]) -> bytes:
        """Return the body that the endpoint would have answered, from good results. Raises
        MillraceError if a requested part is missing.
        """


class BatchEndpoint(ABC):
    """Endpoint that batches may be for."""

    @abstractmethod
    async def order(
        self,
        body: bytes,
        caller: Caller,
        attempt: LineAttempt,
        received_ns: int,
        deadline_ns: int,
    ) -> BatchOrder:
        """Parse a body into jobs. Raises MillraceError for a body that cannot be honoured."""


class GenerationBatchEndpoint(BatchEndpoint):
    """Batch endpoint that answers with generations."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def order(
        self,
        body: bytes,
        caller: Caller,
        attempt: LineAttempt,
        received_ns: int,
        deadline_ns: int,
    ) -> BatchOrder:
        prepared = await self._endpoint.prepare(body, caller, self._gateway.prompts)
        _refuse_what_needs_a_client(prepared)
        request = self._gateway.choice.resolve_alone(prepared.request, Tier.BATCH)
        prepared = replace(prepared, request=request)
        model = await self._gateway.models.get(request.model, caller.tenant, request.adapter)
        base = replace(
            attempt.job(request.model, caller, received_ns, deadline_ns, self._endpoint.api),
            user=request.user,
            cache_salt=request.cache_salt,
            priority=request.priority,
            metadata=request.metadata,
            model_requested=request.model_requested or request.model,
            route_reason=request.route_reason,
            keep_transcript=await self._gateway.identity.keeps_transcripts(caller.tenant),
        )
        jobs = await self._gateway.maker.jobs(base, request, model, caller)
        prepared = replace(prepared, request=replace(request, notices=jobs[0].notices))
        return _GenerationOrder(self._gateway, caller, model, attempt, jobs, prepared)


@dataclass(frozen=True)
class _GenerationOrder(BatchOrder):
    prepared: Prepared

    @property
    def form_field(self) -> str:
        return self.prepared.request.form_field

    async def render(self, results: Sequence[JobResult]) -> bytes:
        request = self.prepared.request
        if any(_lacks_logprobs(request, result) for result in results):
            raise LogprobsLostError
        created_s = self.jobs[0].received_ns // _NS_PER_S
        accepted = AcceptedRequest(
            request,
            self.caller,
            self.model,
            self.attempt.request_id,
            created_s,
            prompt_token_ids=prompt_token_ids(self.jobs, request),
        )
        response = ResponseReader(accepted, self.gateway.metrics.gaps)
        for job, result in zip(self.jobs, results, strict=True):
            response.add_choices(_replayed(job, result))
        renderer = self.prepared.render(response)
        for part in response.read_parts(0.0):
            renderer.add(part)
        await renderer.store()
        return renderer.whole()


def _refuse_what_needs_a_client(prepared: Prepared) -> None:
    request = prepared.request
    if prepared.stream:
        raise ParameterError("stream", "A request of a batch cannot be streamed; leave stream out.")
    if prepared.begin is not None:
        raise ParameterError(
            "background", "A request of a batch is in the background anyway; leave background out."
        )
    if request.session_id:
        raise ParameterError(
            "session_id", "A request of a batch has no session; send all messages."
        )
    if request.server_tools:
        raise ParameterError("server_tools", "A request of a batch cannot have server_tools.")
    if request.tier not in _TIERS:
        raise ParameterError(
            "service_tier", "A request of a batch has the tier batch; leave service_tier out."
        )


def _lacks_logprobs(request: GenerationRequest, result: JobResult) -> bool:
    """Return whether log-probabilities are missing, since the result was too large for the bus."""
    num_tokens = result.usage.completion_tokens if result.usage is not None else 0
    if request.sampling.logprobs is not None and num_tokens and not result.logprobs:
        return True
    return request.sampling.prompt_logprobs is not None and not result.prompt_logprobs


def _replayed(job: Job, result: JobResult) -> OpenStream:
    """Return an ended job's stream, as if it had just arrived."""
    stream = OpenStream(job, NULL_CLIENT, 0.0)
    for frame in frames_of(result):
        stream.feed(frame, 0.0)
    assert stream.ended, "a result is complete"
    return stream


class EmbeddingBatchEndpoint(BatchEndpoint):
    """Batch endpoint ``/v1/embeddings``: a job for each input."""

    route = "/v1/embeddings"

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def order(
        self,
        body: bytes,
        caller: Caller,
        attempt: LineAttempt,
        received_ns: int,
        deadline_ns: int,
    ) -> BatchOrder:
        asked = decode(self._decoder, body)
        inputs, num_kept = truncated_inputs(asked)
        model = await self._gateway.models.get_named(asked.model, caller.tenant)
        pooling, form = embedding_pooling(asked.pooling, model), form_of(asked, model)
        base = replace(
            attempt.job(asked.model, caller, received_ns, deadline_ns, Api.EMBEDDINGS),
            user=user_of(asked.user),
            pooling=pooling,
            truncate_prompt_tokens=num_kept,
            priority=priority_of(asked.priority),
            metadata=metadata_of(asked.metadata),
        )
        jobs = await jobs_of(base, inputs, model, self._gateway.prompts)
        return _EmbeddingOrder(self._gateway, caller, model, attempt, jobs, form)


@dataclass(frozen=True)
class _EmbeddingOrder(BatchOrder):
    form: VectorForm

    async def render(self, results: Sequence[JobResult]) -> bytes:
        num_tokens = total_usage(result.usage for result in results).prompt_tokens
        return msgspec.json.encode(
            EmbeddingList(
                data=tuple(
                    EmbeddingObject(index=index, embedding=self.form.encode(result.embedding))
                    for index, result in enumerate(results)
                ),
                model=self.jobs[0].model_requested,
                usage=EmbeddingUsage.of(num_tokens),
            )
        )
