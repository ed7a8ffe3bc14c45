"""Gateway-run tools between two rounds of a response; the next round's job has their results.

A round of a choice ends when the model has called tools. The response hands the choice to
``run_tools``, and gets it back with a stream of its next round, with its end, or failed.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from millrace.gateway.request.job_maker import next_round
from millrace.gateway.request.response_stream import ResponseContext, ResponseStream
from millrace.gateway.request.submitter import publish_for
from millrace.gateway.streams.choice import TOOL_CALLS, Choice
from millrace.gateway.streams.deliveries import continue_statistics
from millrace.gateway.streams.parts import StepPart
from millrace.gateway.streams.stream import OpenStream
from millrace.gateway.tools.runner import ToolResult
from millrace.registry.requests.ready_jobs import with_prompt
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.tools import ToolCall, ToolChoice, ToolMode

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LOOK_S = 2.0
_LOOK_TIMEOUT_S = 0.5
# A gateway counts as dead after this many unanswered calls in a row; fewer may be a link failure.
_MAX_UNANSWERED_LOOKS = 3


class AnswerLostError(MillraceError, code="answer_lost", retryable=True, http_status=503):
    """Loss of the gateway that made the response, before it was whole."""

    def __init__(self) -> None:
        super().__init__("The gateway that ran this response's tools is gone. Ask again.")


async def run_tools(response: ResponseStream, choice: Choice) -> None:
    """Run the called tools, then start the next round with their results. Never raises: on an error
    the choice fails.
    """
    try:
        await _run(response, choice)
    except MillraceError as error:
        _fail(choice, Failed(code=error.code, message=error.message, retryable=error.retryable))
    except Exception:
        logger.exception("a round of tools failed", extra={"request_id": response.request_id})
        _fail(choice, Failed(code="internal_error", message="The gateway failed."))
    finally:
        choice.runs_tools = False
        choice.stream.wake()


async def _run(response: ResponseStream, choice: Choice) -> None:
    said = choice.round_end
    assert said is not None
    own = [call for call in said.calls if call.name in response.own_tools]
    results = await asyncio.gather(*(_run_tool(response, call) for call in own))
    # A client with tokens of the next round has these steps already.
    steps = choice.pending if choice.next_index <= choice.num_tokens else choice.had
    steps += [
        StepPart(
            call.id,
            call.name,
            call.arguments,
            result.ok,
            result.output,
            result.duration_ms,
            choice.index,
        )
        for call, result in zip(own, results, strict=True)
    ]
    if not response.awaits_round(choice):
        return
    if len(own) < len(said.calls):
        choice.end_with(TOOL_CALLS)
        return
    choice.turns.append(
        ChatMessage("assistant", said.text, tool_calls=said.calls, reasoning=said.reasoning)
    )
    choice.turns += [
        ChatMessage("tool", result.output, name=call.name, tool_call_id=call.id)
        for call, result in zip(own, results, strict=True)
    ]
    choice.stream.wake()
    stream = await _publish(response, choice)
    if stream is not None:
        response.start_round(choice, stream, may_call=_may_call(response.context, choice.round + 1))


async def _run_tool(response: ResponseStream, call: ToolCall) -> ToolResult:
    """Run a tool and store its result, so that a gateway that continues the response does not run
    it again.
    """
    context = response.context
    if response.is_copy:
        return await _awaited_step(response, call)
    if response.was_resumed:
        known = await context.index.get_step(response.request_id, call.id)
        if known is not None:
            return known
    result = await context.tools.run(call.name, call.arguments)
    await context.index.put_step(response.request_id, call.id, result)
    return result


async def _awaited_step(response: ResponseStream, call: ToolCall) -> ToolResult:
    """Wait for a tool's result from the holder of the response. Raises AnswerLostError if that
    gateway is gone, or if no client waits any more.
    """
    clock, index = response.context.clock, response.context.index
    look_s = clock.monotonic() + _LOOK_S
    num_unanswered = 0
    while response.is_attached:
        known = await index.get_step(response.request_id, call.id)
        if known is not None:
            return known
        now_s = clock.monotonic()
        if now_s >= look_s:
            look_s = now_s + _LOOK_S
            num_unanswered = 0 if await _is_held(response) else num_unanswered + 1
            if num_unanswered == _MAX_UNANSWERED_LOOKS:
                break
        await clock.sleep(_POLL_S)
    raise AnswerLostError


async def _is_held(response: ResponseStream) -> bool:
    context = response.context
    if context.responses.get(response.request_id) is not None:
        return True
    try:
        state = await context.index.get(response.request_id)
    except RedisUnreachableError:
        return True  # as far as is known
    if state is None or state.holder == context.config.gateway_id:
        return False
    return await context.bus.control.is_gateway_there(
        state.holder, response.request_id, _LOOK_TIMEOUT_S
    )


async def _publish(response: ResponseStream, choice: Choice) -> OpenStream | None:
    """Publish a choice's next round; return its stream, or None if no client here wants it any
    more.

    Raises MillraceError, and then nothing was stored.
    """
    context, former = response.context, choice.stream
    if response.is_copy:
        job = next_round(former.job, choice.round + 1)
        return context.streams.copy(job, former.client, response)
    job = await _job(response, choice)
    if response.trace is not None:
        job = response.trace.add_context(job)
    context.admission.check_queue(job.model)
    await context.admission.reserve(response.caller, job.request_id, response.model, [job])
    if not response.awaits_round(choice):
        response.release(job.request_id)
        return None
    stream = context.streams.open(
        job,
        former.client,
        context.clock.monotonic(),
        response,
        from_index=max(0, choice.next_index - choice.num_tokens),
    )
    stream.was_counted = response.was_counted
    before = context.history.of(response.request_id).get(job.request_id)
    if before is not None:
        continue_statistics(stream, before, context.clock)
    # A former holder of the response may have published this round first.
    await publish_for(response, job.request_id, [job], [stream], first_reply=former.job.reply)
    return stream


async def _job(response: ResponseStream, choice: Choice) -> Job:
    """Return the job of the next round. In the last allowed round, no tool can be called."""
    number = choice.round + 1
    mode = ToolMode.AUTO if _may_call(response.context, number) else ToolMode.NONE
    request = replace(
        response.request,
        messages=(*(response.request.messages or ()), *choice.turns),
        tool_choice=ToolChoice(mode=mode),
    )
    former = choice.stream.job
    first = replace(next_round(former, number), reply=response.context.config.gateway_id)
    job = await response.context.maker.prepare(
        with_prompt(first, request), request, response.model, response.caller
    )
    # The notices of the request hold for all rounds: counting them again would add to them.
    sampling = replace(job.sampling, seed=former.sampling.seed)
    return replace(job, sampling=sampling, notices=request.notices)


def _may_call(context: ResponseContext, number: int) -> bool:
    """Return whether tools can be called in the round of this number, from 0."""
    return number < context.config.max_tool_rounds


def _fail(choice: Choice, frame: Failed) -> None:
    if choice.is_between_rounds():  # it has not ended otherwise
        choice.fail(frame)
