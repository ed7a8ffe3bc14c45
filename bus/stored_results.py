"""Frames of stored results, as a reader would have received them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec

from millrace.schemas.chat.messages import MessageToolCall
from millrace.schemas.control import CancelReason
from millrace.schemas.frames import (
    Beam,
    BeamEnd,
    Cancelled,
    CustomDelta,
    Delta,
    Done,
    Embedding,
    Expired,
    Failed,
    Frame,
    FunctionDelta,
    PromptLogprobs,
    Shed,
    Started,
    TerminalFrame,
    ToolCallDelta,
    Usage,
)
from millrace.schemas.jobs import BeamResult, JobResult
from millrace.schemas.records import Status

UNKNOWN_TOKEN_ID = -1
_SHED_RETRY_S = 1.0


def frames_of(result: JobResult, epoch: int = 0) -> Iterator[Frame]:
    """Yield the frames of a stored result in order, the terminal frame last."""
    usage = result.usage or Usage()
    token_ids = _token_ids(result)
    yield Started(epoch=epoch, worker_id="", num_prompt_tokens=usage.prompt_tokens)
    if result.prompt_logprobs:
        yield PromptLogprobs(epoch=epoch, logprobs=result.prompt_logprobs)
    if result.embedding:
        yield Embedding(epoch=epoch, values=result.embedding)
    for number, beam in enumerate(result.beams):
        ids = beam.token_ids or (UNKNOWN_TOKEN_ID,) * beam.num_tokens
        yield Beam(epoch=epoch, beam=number, token_ids=ids, text=beam.text)
    if token_ids:
        yield Delta(
            epoch=epoch,
            index=0,
            token_ids=token_ids,
            text=result.text,
            text_ends=result.text_ends,
            logprobs=result.logprobs,
            reasoning=result.reasoning,
            reasoning_ends=result.reasoning_ends,
            tool_calls=tuple(map(_delta_of_call, count(), result.tool_calls)),
            tool_call_ends=result.tool_call_ends,
        )
    yield msgspec.structs.replace(usage, epoch=epoch)
    yield end_of(result, epoch)


def end_of(result: JobResult, epoch: int = 0) -> TerminalFrame:
    """Return the terminal frame of a stored result."""
    num_tokens = len(_token_ids(result))
    match result.status:
        case Status.DONE if result.finish_reason is not None:
            return Done(
                epoch=epoch,
                finish_reason=result.finish_reason,
                stop_reason=result.stop_reason,
                num_tokens=num_tokens,
                beams=tuple(map(_end_of_beam, result.beams)),
                notices=result.notices,
            )
        case Status.CANCELLED:
            is_orphaned = result.error_code == CancelReason.ORPHANED.value
            reason = result.error_code if is_orphaned else ""
            return Cancelled(epoch=epoch, num_tokens=num_tokens, reason=reason)
        case Status.EXPIRED:
            return Expired(epoch=epoch, num_tokens=num_tokens)
        case Status.SHED:
            return Shed(epoch=epoch, retry_after_s=_SHED_RETRY_S, code=result.error_code)
        case _:
            return Failed(
                epoch=epoch,
                code=result.error_code,
                message=result.error_message,
                param=result.error_param,
            )


def _delta_of_call(index: int, call: MessageToolCall) -> ToolCallDelta:
    """Return a whole call as one delta."""
    delta = ToolCallDelta(index=index, id=call.id, type=call.type)
    if call.custom is not msgspec.UNSET:
        custom = CustomDelta(input=call.custom.input, name=call.custom.name)
        return msgspec.structs.replace(delta, custom=custom)
    assert call.function is not msgspec.UNSET
    function = FunctionDelta(arguments=call.function.arguments, name=call.function.name)
    return msgspec.structs.replace(delta, function=function)


def _end_of_beam(beam: BeamResult) -> BeamEnd:
    return BeamEnd(**{name: getattr(beam, name) for name in BeamEnd.__struct_fields__})


def _token_ids(result: JobResult) -> tuple[int, ...]:
    if not result.token_ids and (result.text or result.reasoning or result.tool_calls):
        # The result was too large to be stored with its ids. It can only be read as a whole.
        num_tokens = result.usage.completion_tokens if result.usage is not None else 1
        return (UNKNOWN_TOKEN_ID,) * num_tokens
    return result.token_ids
