"""What the engine says about a sequence, made from where the sequence stands."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.engine.step.fork_group import ForkGroup
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
    num_proposed: int = 0,
    num_accepted: int = 0,
) -> EngineOutput:
    """A sampled token; the first one also says that the sequence has started."""
    more: dict[str, Any] = {} if sequence.started else beginning(sequence)
    if sequence.prompt_logprobs is not None:
        more["prompt_logprobs"] = tuple(sequence.prompt_logprobs)
        sequence.prompt_logprobs = None
    if finish_reason is not None:
        more["finish_reason"] = finish_reason
        more["num_preemptions"] = sequence.num_preemptions
    return EngineOutput(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        token_ids=(token,),
        logprobs=() if logprob is None else (logprob,),
        num_proposed_tokens=num_proposed,
        num_accepted_tokens=num_accepted,
        **more,
    )


def embedding_output(sequence: Sequence, embedding: tuple[float, ...]) -> EngineOutput:
    """The embedding of the whole prompt, which ends the sequence."""
    return _last_output(sequence, embedding=embedding, finish_reason=FinishReason.STOP)


def started_output(sequence: Sequence) -> EngineOutput:
    """The sequence is in the batch, but has no token yet."""
    return EngineOutput(
        request_id=sequence.request_id, choice=sequence.choice, **beginning(sequence)
    )


def beginning(sequence: Sequence) -> dict[str, Any]:
    """What the first output of a sequence says besides."""
    return {
        "started": True,
        "queued_s": sequence.queued_s,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_pulled_tokens": sequence.num_pulled_tokens,
        "pulled_s": sequence.pulled_s,
    }


def error_output(sequence: Sequence, error: MillraceError) -> EngineOutput:
    """The sequence ends with ``error``. One that never was in the batch has not started."""
    return _last_output(sequence, error=(error.code, error.message))


def _last_output(sequence: Sequence, **result: Any) -> EngineOutput:
    first = not sequence.started and sequence.state is SequenceState.RUNNING
    return EngineOutput(
        request_id=sequence.request_id,
        choice=sequence.choice,
        num_preemptions=sequence.num_preemptions,
        **(beginning(sequence) if first else {}),
        **result,
    )


def group_failure(group: ForkGroup, error: MillraceError) -> list[EngineOutput]:
    """The fork group ends with ``error``, which every choice is told."""
    return [
        EngineOutput(
            request_id=group.request.request_id, choice=choice, error=(error.code, error.message)
        )
        for choice in range(group.width)
    ]


def with_beginning(group: ForkGroup, outputs: list[EngineOutput]) -> list[EngineOutput]:
    """Complete the last outputs of a fork group. They are its first ones, too, but for that of
    choice 0 if it has said that the group started; one that never was in the batch has not."""
    first = group.first
    if first.started or first.state is SequenceState.RUNNING:
        told = 1 if first.started else 0
        begun = [msgspec.structs.replace(output, **beginning(first)) for output in outputs[told:]]
        outputs = outputs[:told] + begun
        outputs[0] = msgspec.structs.replace(outputs[0], num_preemptions=group.num_preemptions)
    return outputs


def finished_output(request: EngineRequest, finish_reason: FinishReason) -> EngineOutput:
    """The tokens delivered before were all that a resumed request asks for."""
    return EngineOutput(request_id=request.request_id, finish_reason=finish_reason, started=True)


def refusal(request: EngineRequest, error: MillraceError) -> EngineOutput:
    """The request is not taken."""
    return EngineOutput(request_id=request.request_id, error=(error.code, error.message))


def device_time(sequence: Sequence, *, over: bool = False) -> DeviceTime:
    """What the sequence has taken of the device so far."""
    choice = sequence.choice if sequence.fork_group is None else 0
    return DeviceTime(sequence.request_id, choice, device_us(sequence), over)


def device_us(sequence: Sequence) -> float:
    """Of a fork what its whole group took."""
    taken = sequence if sequence.fork_group is None else sequence.fork_group
    return float(taken.device_s) * _US_PER_S


def as_millrace_error(error: Exception) -> MillraceError:
    """The error itself if a caller may see it; otherwise one that names only its type."""
    if isinstance(error, MillraceError):
        return error
    return MillraceError(
        f"The model could not be run on this sequence ({type(error).__name__}); the worker's log "
        f"has the details."
    )
