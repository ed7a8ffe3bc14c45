"""Outputs of the engine, made from the state of a sequence."""

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
    """Return the output of a sampled token.

    The first one also reports that the sequence has started.
    """
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
    """Return the last output of a sequence with pooling: the embedding of the whole prompt."""
    return _last_output(sequence, embedding=embedding, finish_reason=FinishReason.STOP)


def started_output(sequence: Sequence) -> EngineOutput:
    """Return the output of a sequence that entered the batch and has no token yet."""
    return EngineOutput(
        request_id=sequence.request_id, choice=sequence.choice, **beginning(sequence)
    )


def beginning(sequence: Sequence) -> dict[str, Any]:
    """Return the fields that only the first output of a sequence has."""
    return {
        "started": True,
        "queued_s": sequence.queued_s,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_pulled_tokens": sequence.num_pulled_tokens,
        "pulled_s": sequence.pulled_s,
    }


def error_output(sequence: Sequence, error: MillraceError) -> EngineOutput:
    """Return the last output of a sequence that ends with ``error``.

    A sequence that never was in the batch has not started.
    """
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
    """Return an error output for every choice of a fork group."""
    return [
        EngineOutput(
            request_id=group.request.request_id, choice=choice, error=(error.code, error.message)
        )
        for choice in range(group.width)
    ]


def with_beginning(group: ForkGroup, outputs: list[EngineOutput]) -> list[EngineOutput]:
    """Add the fields of a first output to the last outputs of a fork group.

    These outputs are its first ones, too, except that of choice 0 if it has reported the start. A
    group that never was in the batch has not started.
    """
    first = group.first
    if first.started or first.state is SequenceState.RUNNING:
        num_sent = 1 if first.started else 0
        first_outputs = [
            msgspec.structs.replace(output, **beginning(first)) for output in outputs[num_sent:]
        ]
        outputs = outputs[:num_sent] + first_outputs
        outputs[0] = msgspec.structs.replace(outputs[0], num_preemptions=group.num_preemptions)
    return outputs


def finished_output(request: EngineRequest, finish_reason: FinishReason) -> EngineOutput:
    """Return the output of a resumed request whose delivered tokens already complete it."""
    return EngineOutput(request_id=request.request_id, finish_reason=finish_reason, started=True)


def refusal(request: EngineRequest, error: MillraceError) -> EngineOutput:
    """Return the output of a refused request."""
    return EngineOutput(request_id=request.request_id, error=(error.code, error.message))


def device_time(sequence: Sequence, *, over: bool = False) -> DeviceTime:
    """Return the device time of a sequence so far."""
    choice = sequence.choice if sequence.fork_group is None else 0
    return DeviceTime(sequence.request_id, choice, device_us(sequence), over)


def device_us(sequence: Sequence) -> float:
    """Return the device time in microseconds; for a fork, that of its whole group."""
    taken = sequence if sequence.fork_group is None else sequence.fork_group
    return float(taken.device_s) * _US_PER_S


def as_millrace_error(error: Exception) -> MillraceError:
    """Return the error itself if clients may see it; else a general error that names only its
    type."""
    if isinstance(error, MillraceError):
        return error
    return MillraceError(
        f"The model failed on this sequence ({type(error).__name__}); the worker's log has the "
        f"details."
    )
