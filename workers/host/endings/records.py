"""Record, result and transcript of an ended generation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec

from millrace.bus.jobs.decoding import owner_of
from millrace.bus.jobs.ends import record_of, result_of
from millrace.registry.pricing import PriceBook, cost, device_cost
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.engines import CostMethod
from millrace.schemas.frames import Usage
from millrace.schemas.jobs import JobResult, asked_of
from millrace.schemas.records import (
    MAX_CALLED_TOOLS,
    MAX_TOOL_NAME_CHARACTERS,
    Attempt,
    RequestRecord,
    Status,
    TranscriptRecord,
    sum_energy,
    sum_pulled,
)
from millrace.schemas.tools import ToolFormat
from millrace.workers.host.generations.chat_answer import ChatAnswer
from millrace.workers.host.generations.generation import Generation
from millrace.workers.host.generations.state import since_ms

_US_PER_MS = 1e3


def request_record(
    generation: Generation,
    worker_id: str,
    prices: PriceBook,
    cost_method: CostMethod,
    tool_format: ToolFormat | None,
) -> RequestRecord:
    """Return the record of an ended generation.

    - The times of the first token and per token are those of this attempt.
    - Token counts, pulled tokens and device time cover the whole answer, as far as they are known.
      Energy is set only if it is known for all attempts.
    - ``finish_reason`` is the reason that the client gets. It is ``tool_calls`` if the answer calls
      tools in the model's ``tool_format``.
    - A part of a request that never ran counts no prompt tokens. A request that never ran costs
      nothing and has no price version. If only device time is known of earlier attempts, the row
      has a price version for it and no prompt tokens, so that cost and tokens agree.
    """
    job, outcome, usage = generation.job, generation.outcome, generation.usage() or Usage()
    timing, ran = generation.timing, generation.ran
    assert outcome is not None
    received_ns = job.received_ns or timing.accepted_ns
    num_own_tokens = len(generation.output.token_ids) - generation.output.num_resumed
    earlier = tuple(attempt for _, attempt in sorted(generation.attempts.items()))
    device_us = generation.accounting.device_use.total_us + sum(
        attempt.device_us for attempt in earlier
    )
    energy_j = sum_energy(
        [
            generation.accounting.device_use.settle_energy(),
            *(attempt.energy_j for attempt in earlier),
        ]
    )
    earlier_pulled_tokens, earlier_source = sum_pulled(earlier)
    own_source = generation.accounting.pulled_from(generation.kv_source)
    read = _read_answer(generation, tool_format)
    called = () if read is None else read.called_names
    reason = outcome.finish_reason
    if reason is not None and read is not None:
        reason = read.finish_reason(reason)
    has_prompt = ran or not (device_us or job.part)
    answer = timing.answer(outcome.status, received_ns, num_own_tokens)
    return msgspec.structs.replace(
        record_of(job, outcome.status, outcome.error_code, generation.epoch, timing.done_ns),
        worker_id=worker_id,
        prompt_tokens=generation.num_paid_prompt_tokens if has_prompt else 0,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_ms=since_ms(received_ns, timing.started_ns),
        ttft_ms=answer.ttft_ms,
        tpot_us=answer.tpot_ms * _US_PER_MS,
        total_ms=answer.total_ms,
        finish_reason="" if reason is None else reason.value,
        num_tool_calls=len(called),
        called_tools=tuple(name[:MAX_TOOL_NAME_CHARACTERS] for name in called[:MAX_CALLED_TOOLS]),
        cost=cost(prices, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        currency=prices.currency,
        price_version=prices.version if ran or device_us else "",
        received_ns=received_ns,
        started_ns=timing.started_ns,
        first_token_ns=timing.first_token_ns,
        num_preemptions=generation.accounting.num_preemptions,
        dispatched_ns=timing.dispatched_ns,
        device_us=device_us,
        device_cost=device_cost(prices, device_us),
        energy_j=energy_j if timing.started_ns else None,
        attempts=earlier,
        cost_method=cost_method,
        resampled=generation.accounting.resampled,
        proposed_tokens=usage.proposed_tokens,
        accepted_tokens=usage.accepted_tokens,
        pulled_tokens=earlier_pulled_tokens + generation.accounting.num_pulled_tokens,
        kv_source=own_source or earlier_source,
        num_devices=generation.accounting.device_use.num_devices,
    )


def _read_answer(generation: Generation, tool_format: ToolFormat | None) -> ChatAnswer | None:
    """Return the answer split into its parts; None if nothing is read from its text."""
    job, outcome = generation.job, generation.outcome
    if generation.output.answer is not None or outcome is None or not asked_of(job).reads_calls:
        return generation.output.answer
    answer = ChatAnswer.read_by_gateway(job, tool_format)
    answer.read([generation.output.text])
    answer.finish(outcome.finish_reason, generation.stop_reason)
    return answer


def attempt_of(generation: Generation, worker_id: str, ended_ns: int) -> Attempt:
    """Return the attempt on ``worker_id``, as the attempt that continues it records it."""
    return Attempt(
        epoch=generation.epoch,
        worker_id=worker_id,
        started_ns=generation.timing.started_ns,
        ended_ns=ended_ns,
        device_us=generation.accounting.device_use.total_us,
        energy_j=generation.accounting.device_use.settle_energy(),
        pulled_tokens=generation.accounting.num_pulled_tokens,
        kv_source=generation.accounting.pulled_from(generation.kv_source),
    )


def job_result(generation: Generation) -> JobResult:
    """Return the result that an asynchronous caller fetches.

    Log-probabilities of an earlier attempt's tokens are unknown here, so a resumed answer has none.
    """
    job, outcome = generation.job, generation.outcome
    assert outcome is not None
    result = result_of(
        owner_of(job),
        outcome.status,
        outcome.error_code,
        outcome.error_message,
        generation.timing.done_ns,
    )
    if generation.output.answer is not None:
        texts = generation.output.answer.result_fields()
    else:
        ends = tuple(accumulate(map(len, generation.output.pieces)))
        texts = {"text": "".join(generation.output.pieces), "text_ends": ends}
    return msgspec.structs.replace(
        result,
        **texts,
        token_ids=tuple(generation.output.token_ids),
        logprobs=() if generation.output.num_resumed else tuple(generation.output.logprobs),
        prompt_logprobs=generation.output.prompt_logprobs,
        embedding=generation.output.embedding,
        beams=() if generation.output.beams is None else generation.output.beams.results(),
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
        usage=generation.usage(),
        notices=generation.notices,
    )


def smaller_results(result: JobResult, message: str) -> Iterator[JobResult]:
    """Yield smaller and smaller forms of a result that the bus rejected as too large.

    First without log-probabilities, then without token ids, and at last a failure with ``message``.
    """
    result = msgspec.structs.replace(result, logprobs=(), prompt_logprobs=())
    yield result
    beams = tuple(msgspec.structs.replace(beam, token_ids=()) for beam in result.beams)
    without_ends: dict[str, Any] = dict.fromkeys(
        ("token_ids", "text_ends", "reasoning_ends", "tool_call_ends"), ()
    )
    result = msgspec.structs.replace(result, beams=beams, **without_ends)
    yield result
    yield msgspec.structs.replace(
        result,
        text="",
        reasoning="",
        tool_calls=(),
        embedding=b"",
        beams=(),
        status=Status.FAILED.value,
        finish_reason=None,
        error_code="payload_too_large",
        error_message=message,
    )


def wants_transcript(generation: Generation) -> bool:
    """Return whether an ended generation's transcript is stored: its job asks for it, and it has a
    text answer.
    """
    outcome, job = generation.outcome, generation.job
    is_answered = outcome is not None and outcome.status is Status.DONE and job.pooling is None
    return job.keep_transcript and is_answered


def transcript_of(generation: Generation, tokenizer: Tokenizer) -> TranscriptRecord:
    """Return prompt and answer. The prompt is the text that the model read, template markers
    included.
    """
    job = generation.job
    return TranscriptRecord(
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        prompt=tokenizer.decode(generation.prompt_token_ids, skip_special_tokens=False),
        completion=generation.output.text,
        done_ns=generation.timing.done_ns,
    )
