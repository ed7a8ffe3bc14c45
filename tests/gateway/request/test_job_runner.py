"""Generations of the gateway's own."""

from __future__ import annotations

import pytest

from millrace.gateway.request.job_runner import InternalGenerationError
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import ChatMessage, Source, Tier
from millrace.schemas.sampling import SamplingParams
from tests.support.running_gateway import MODEL, RunningGateway

_REQUEST = GenerationRequest(
    model=MODEL,
    messages=(ChatMessage("user", "Sum it up."),),
    sampling=SamplingParams(max_tokens=40, temperature=0.0),
    session_id="s-1",
)


async def test_a_generation_of_its_own_is_batch_work_of_the_tenant(front: RunningGateway) -> None:
    text = await front.gateway.runner.generate("acme", "sum-1", _REQUEST)
    (job,) = front.worker.jobs
    assert text == front.worker.script(job)
    assert (job.request_id, job.tenant, job.tier, job.source) == (
        "sum-1",
        "acme",
        Tier.BATCH,
        Source.HTTP,
    )
    assert (job.model, job.model_requested, job.session_id) == (MODEL, MODEL, "s-1")
    assert job.store_result
    assert (job.reply, job.batch_frames) == ("gw-test", True)
    assert job.sampling.max_tokens == 40
    assert job.deadline_ns is not None
    timeout_s = front.gateway.config.request_timeout_s
    assert job.deadline_ns - job.received_ns == round(timeout_s * 1e9)


async def test_a_failed_generation_raises_an_error(front: RunningGateway) -> None:
    front.worker.end_with = Failed(code="out_of_memory", message="No memory.")
    with pytest.raises(InternalGenerationError, match="No memory"):
        await front.gateway.runner.generate("acme", "sum-2", _REQUEST)
