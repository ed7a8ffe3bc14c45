"""What a worker asks its engine for."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.types import EngineRequest
from millrace.schemas.control import Warm
from millrace.schemas.jobs import Job
from millrace.schemas.prefix import salt_of
from millrace.schemas.sampling import SamplingParams
from millrace.workers.host.generations.generation import Generation


def cache_salt_of(job: Job, prefix_scope: str) -> str:
    """What keeps the prefix of a job from others' where workers share them in such a scope."""
    tenant = job.tenant if prefix_scope == "tenant" else ""
    return salt_of(tenant, job.cache_salt, job.adapter_version)


def warming_request(engine_id: str, warm: Warm, cache_salt: str) -> EngineRequest:
    """To pull what a job has so far, and no more."""
    return EngineRequest(
        request_id=engine_id,
        prompt_token_ids=(*(warm.job.prompt_token_ids or ()), *warm.token_ids),
        sampling=SamplingParams(max_tokens=1, seed=0),
        cache_salt=cache_salt,
        kv_source=warm.kv_source,
        warms=True,
    )


def engine_request(
    generation: Generation, eos_token_ids: Sequence[int], cache_salt: str
) -> EngineRequest:
    """The rest of a generation, behind the tokens that it has."""
    job = generation.job
    sampling, token_ids = SamplingParams.of(job.sampling), tuple(generation.output.token_ids)
    if generation.known_outcome is not None:
        # Scoring a prompt makes one token behind it, which is dropped.
        token_ids = ()
        sampling = SamplingParams(
            max_tokens=1, seed=sampling.seed, prompt_logprobs=sampling.prompt_logprobs
        )
    return EngineRequest(
        request_id=generation.engine_id,
        prompt_token_ids=generation.prompt_token_ids,
        sampling=sampling,
        eos_token_ids=tuple(eos_token_ids),
        output_token_ids=token_ids,
        priority=generation.priority,
        cache_salt=cache_salt,
        pooling=job.pooling,
        watched=job.sampling.may_end_in_text,
        adapter=generation.adapter,
        # One that is text still has been prepared by nobody who knows the tokenizer.
        prediction_token_ids=() if isinstance(job.prediction, str) else job.prediction,
        kv_source=generation.kv_source,
        tenant=job.tenant,
    )
