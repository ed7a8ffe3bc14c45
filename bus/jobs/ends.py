"""What the end of a job leaves behind, whoever ends it: its record and its stored result."""

from __future__ import annotations

from millrace.bus.jobs.decoding import Owner
from millrace.runtime.tracing import recorded_trace_id
from millrace.schemas.control import CancelReason
from millrace.schemas.jobs import Job, JobResult, RequestPart
from millrace.schemas.records import RequestRecord, Status

_NS_PER_MS = 1e6


def record_of(job: Job, status: Status, error_code: str, epoch: int, done_ns: int) -> RequestRecord:
    """The record of a job that no worker answered: no tokens of a completion, no cost. A worker
    adds what it knows. Only failures and orphaned requests keep their code."""
    part = job.part or RequestPart(request_id="")
    keeps_code = status is Status.FAILED or error_code == CancelReason.ORPHANED.value
    return RequestRecord(
        request_id=job.request_id,
        tenant=job.tenant,
        user=job.user,
        session_id=job.session_id,
        source=job.source,
        tier=job.tier,
        model_requested=job.model_requested or job.model,
        model_served=job.model,
        route_reason=job.route_reason,
        prompt_tokens=job.num_paid_prompt_tokens,
        total_ms=max(done_ns - job.received_ns, 0) / _NS_PER_MS,
        status=status,
        error_code=error_code if keeps_code else "",
        received_ns=job.received_ns,
        done_ns=done_ns,
        epoch=epoch,
        trace_id=recorded_trace_id(job.traceparent),
        key_id=job.key_id,
        metadata=job.metadata,
        adapter=job.adapter,
        parent_id=part.request_id,
        choice=part.choice,
        round=part.round,
        attempt=part.attempt,
        batch_id=job.batch_id,
    )


def result_of(
    owner: Owner,
    status: Status,
    error_code: str,
    error_message: str,
    done_ns: int,
    error_param: str = "",
) -> JobResult:
    """What ``owner`` fetches of a job that no worker answered. A worker adds the answer."""
    return JobResult(
        request_id=owner.request_id,
        tenant=owner.tenant,
        model=owner.model,
        status=status.value,
        error_code=error_code,
        error_message=error_message,
        error_param=error_param,
        done_ns=done_ns,
    )
