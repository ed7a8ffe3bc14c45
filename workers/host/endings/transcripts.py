"""Prompt and completion of a request, stored only for tenants that ask for transcripts."""

from __future__ import annotations

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.records import Status, TranscriptRecord
from millrace.workers.host.generations.generation import Generation


def wants_transcript(generation: Generation) -> bool:
    """Whether the words of an ended generation are to be kept: its job says so, and it was
    answered with words."""
    outcome, job = generation.outcome, generation.job
    is_answered = outcome is not None and outcome.status is Status.DONE and job.pooling is None
    return job.keep_transcript and is_answered


def transcript_of(generation: Generation, tokenizer: Tokenizer) -> TranscriptRecord:
    """Prompt and answer. The prompt is what the model read, with the marks of its template."""
    job = generation.job
    return TranscriptRecord(
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        prompt=tokenizer.decode(generation.prompt_token_ids, skip_special_tokens=False),
        completion=generation.output.text,
        done_ns=generation.timing.done_ns,
    )
