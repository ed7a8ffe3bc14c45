"""What the engine says about a sequence, made from where the sequence stands."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.engine.beams.group import BeamGroup
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import DeviceTime, EngineOutput, EngineRequest
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason, TokenLogprob

_US_PER_S = 1e6


def token_output(
    sequence: Sequence,
    token: int,
    logprob: TokenLogprob | None,
    finish_reason: FinishReason | None,
    *,
    num_proposed: int = 0,
    num_accepted: int = 0,
) -> EngineOutput:
    """A sampled token; the first one also says that the sequence has started."""
    logprobs = () if logprob is None else (logprob,)
    plain = sequence.prompt_logprobs is None and finish_reason is None
    if plain and sequence.started:  # as most are
        return EngineOutput(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            token_ids=(token,),
            logprobs=logprobs,
            num_proposed_tokens=num_proposed,
            num_accepted_tokens=num_accepted,
        )
    first = not sequence.started
    prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return EngineOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        token_ids=(token,),
        prompt_logprobs=() if prompt_logprobs is None else tuple(prompt_logprobs),
        logprobs=logprobs,
        finish_reason=finish_reason,
        started=first,
        queued_s=sequence.queued_s if first else 0.0,
        num_cached_tokens=sequence.num_cached_tokens if first else 0,
        num_pulled_tokens=sequence.num_pulled_tokens if first else 0,
        pulled_s=sequence.pulled_s if first else 0.0,
        num_preemptions=0 if finish_reason is None else sequence.num_preemptions,
        num_proposed_tokens=num_proposed,
        num_accepted_tokens=num_accepted,
    )


def embedding_output(sequence: Sequence, embedding: tuple[float, ...]) -> EngineOutput:
    """The embedding of the whole prompt, which ends the sequence."""
    return _last_output(sequence, embedding=embedding, finish_reason=FinishReason.STOP)


def started_output(sequence: Sequence) -> EngineOutput:
    """The sequence is in the batch, but has no token yet."""
    return EngineOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        started=True,
        queued_s=sequence.queued_s,
        num_cached_tokens=sequence.num_cached_tokens,
        num_pulled_tokens=sequence.num_pulled_tokens,
        pulled_s=sequence.pulled_s,
    )


def error_output(sequence: Sequence, error: MillraceError) -> EngineOutput:
    """The sequence ends with ``error``. One that never was in the batch has not started."""
    return _last_output(sequence, error=(error.code, error.message))


def _last_output(sequence: Sequence, **result: Any) -> EngineOutput:
    first = not sequence.started and sequence.state is SequenceState.RUNNING
    return EngineOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        started=first,
        queued_s=sequence.queued_s if first else 0.0,
        num_cached_tokens=sequence.num_cached_tokens if first else 0,
        num_pulled_tokens=sequence.num_pulled_tokens if first else 0,
        pulled_s=sequence.pulled_s if first else 0.0,
        num_preemptions=sequence.num_preemptions,
        **result,
    )


def beam_outputs(group: BeamGroup) -> list[EngineOutput]:
    """The answers of a search that is over, one for each choice."""
    assert len(group.search.answers) == group.search.width, "a choice has no answer"
    outputs = [
        EngineOutput(
            request_id=group.request.request_id,
            choice=choice,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            cumulative_logprob=answer.logprob,
        )
        for choice, answer in enumerate(group.search.answers)
    ]
    return _with_beginning(group, outputs)


def beam_failure(group: BeamGroup, error: MillraceError) -> list[EngineOutput]:
    """The search ends with ``error``, which every choice is told."""
    outputs = [
        EngineOutput(
            request_id=group.request.request_id, choice=choice, error=(error.code, error.message)
        )
        for choice in range(group.search.width)
    ]
    ran = group.first.started or group.first.state is SequenceState.RUNNING
    return _with_beginning(group, outputs) if ran else outputs


def _with_beginning(group: BeamGroup, outputs: list[EngineOutput]) -> list[EngineOutput]:
    """The last outputs of a search. They are the first ones, too, but for that of choice 0 if it
    has said that the search started."""
    first = group.first
    beginning: dict[str, Any] = {
        "started": True,
        "queued_s": first.queued_s,
        "num_cached_tokens": first.num_cached_tokens,
        "num_pulled_tokens": first.num_pulled_tokens,
        "pulled_s": first.pulled_s,
    }
    begun = [
        output
        if output.choice == 0 and first.started
        else msgspec.structs.replace(output, **beginning)
        for output in outputs
    ]
    begun[0] = msgspec.structs.replace(begun[0], num_preemptions=group.num_preemptions)
    return begun


def finished_output(request: EngineRequest, finish_reason: FinishReason) -> EngineOutput:
    """The tokens delivered before were all that a resumed request asks for."""
    return EngineOutput(request_id=request.request_id, finish_reason=finish_reason, started=True)


def refusal(request: EngineRequest, error: MillraceError) -> EngineOutput:
    """The request is not taken."""
    return EngineOutput(request_id=request.request_id, error=(error.code, error.message))


def device_time(sequence: Sequence, *, over: bool = False) -> DeviceTime:
    """What the sequence has taken of the device so far."""
    choice = sequence.choice if sequence.beams is None else 0
    return DeviceTime(sequence.request_id, choice, device_us(sequence), over)


def device_us(sequence: Sequence) -> float:
    """Of a beam what its whole search took."""
    taken = sequence if sequence.beams is None else sequence.beams
    return float(taken.device_s) * _US_PER_S


def as_millrace_error(error: Exception) -> MillraceError:
    """The error itself if a caller may see it; otherwise one that names only its type."""
    if isinstance(error, MillraceError):
        return error
    return MillraceError(
        f"The model could not be run on this sequence ({type(error).__name__}); the worker's log "
        f"has the details."
    )
