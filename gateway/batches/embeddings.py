"""Requests for embeddings in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from millrace.gateway.batches.lines import BatchEndpoint, BatchOrder, LineAttempt
from millrace.gateway.core import Gateway
from millrace.gateway.rendering.embedding_vectors import VectorForm, form_of
from millrace.gateway.request.embedding_jobs import (
    embedding_pooling,
    jobs_of,
    truncated_inputs,
    user_of,
)
from millrace.gateway.streams.stream import total_usage
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.message_fields import metadata_of, priority_of
from millrace.schemas.chat.asked import Api
from millrace.schemas.embeddings import (
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingUsage,
)
from millrace.schemas.jobs import JobResult


class EmbeddingBatchEndpoint(BatchEndpoint):
    """``/v1/embeddings``: a job for each input."""

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
                usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            )
        )
