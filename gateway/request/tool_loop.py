"""The gateway's own tools: run between two rounds of a response, whose next job has their results.

A round of a choice ends when the model has called tools. The response hands the choice to ``run``,
and gets it back with a stream of its next round, with its end, or failed.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from millrace.bus.api import Bus
from millrace.gateway.request.index import RequestIndex
from millrace.gateway.request.job_maker import JobMaker, next_round
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.request.submitter import publish_for
from millrace.gateway.streams.choice import TOOL_CALLS, Choice
from millrace.gateway.streams.deliveries import continue_statistics
from millrace.gateway.streams.parts import StepPart
from millrace.gateway.streams.stream import OpenStream
from millrace.gateway.tools.runner import ToolResult, ToolRunner
from millrace.registry.requests.ready_jobs import with_prompt
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.tools import ToolCall, ToolChoice, ToolMode

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LOOK_S = 2.0
_LOOK_TIMEOUT_S = 0.5
# A gateway is gone after this many unanswered looks in a row; fewer may be a link that was down.
_MAX_UNANSWERED_LOOKS = 3


class AnswerLostError(MillraceError, code="answer_lost", retryable=True, http_status=503):
    """The gateway that made the response is gone before it was whole."""

    def __init__(self) -> None:
        super().__init__("The gateway that ran this response's tools is gone. Ask again.")


class ToolCallLoop:
    """Runs tools and queues rounds for the responses of one gateway; owns nothing of them."""

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        clock: Clock,
        index: RequestIndex,
        maker: JobMaker,
        tools: ToolRunner,
    ) -> None:
        self._bus = bus
        self._config = config
        self._clock = clock
        self._index = index
        self._maker = maker
        self._tools = tools

    async def run(self, response: ResponseStream, choice: Choice) -> None:
        """Run the tools that were called, then let the model go on with what they gave. Never
        raises: the choice fails."""
        try:
            await self._run(response, choice)
        except MillraceError as error:
            _fail(choice, Failed(code=error.code, message=error.message, retryable=error.retryable))
        except Exception:
            logger.exception("a round of tools failed", extra={"request_id": response.request_id})
            _fail(choice, Failed(code="internal_error", message="The gateway failed."))
        finally:
            choice.runs_tools = False
            choice.stream.wake()

    async def _run(self, response: ResponseStream, choice: Choice) -> None:
        said = choice.round_end
        assert said is not None
        own = [call for call in said.calls if call.name in response.own_tools]
        results = await asyncio.gather(*(self._run_tool(response, call) for call in own))
        # Who has tokens of the next round has these already.
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
        stream = await self._publish(response, choice)
        if stream is not None:
            response.start_round(choice, stream, may_call=self._may_call(choice.round + 1))

    async def _run_tool(self, response: ResponseStream, call: ToolCall) -> ToolResult:
        """A tool's result, which is stored: whoever goes on with the response does not run it
        again."""
        if response.is_copy:
            return await self._awaited_step(response, call)
        if response.was_resumed:
            known = await self._index.get_step(response.request_id, call.id)
            if known is not None:
                return known
        result = await self._tools.run(call.name, call.arguments)
        await self._index.put_step(response.request_id, call.id, result)
        return result

    async def _awaited_step(self, response: ResponseStream, call: ToolCall) -> ToolResult:
        """What a tool gave to whoever holds the response. Raises AnswerLostError if that gateway is
        gone, or nobody wants to know any more."""
        look_s = self._clock.monotonic() + _LOOK_S
        num_unanswered = 0
        while response.is_attached:
            known = await self._index.get_step(response.request_id, call.id)
            if known is not None:
                return known
            now_s = self._clock.monotonic()
            if now_s >= look_s:
                look_s = now_s + _LOOK_S
                num_unanswered = 0 if await self._is_held(response) else num_unanswered + 1
                if num_unanswered == _MAX_UNANSWERED_LOOKS:
                    break
            await self._clock.sleep(_POLL_S)
        raise AnswerLostError

    async def _is_held(self, response: ResponseStream) -> bool:
        if response.context.responses.get(response.request_id) is not None:
            return True
        try:
            state = await self._index.get(response.request_id)
        except RedisUnreachableError:
            return True  # as far as is known
        if state is None or state.holder == self._config.gateway_id:
            return False
        return await self._bus.control.is_gateway_there(
            state.holder, response.request_id, _LOOK_TIMEOUT_S
        )

    async def _publish(self, response: ResponseStream, choice: Choice) -> OpenStream | None:
        """The stream of a choice's next round; None if nobody here wants it any more. Raises
        MillraceError: nothing was stored then."""
        context, former = response.context, choice.stream
        if response.is_copy:
            job = next_round(former.job, choice.round + 1)
            return context.streams.copy(job, former.client, response)
        job = await self._job(response, choice)
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
            self._clock.monotonic(),
            response,
            from_index=max(0, choice.next_index - choice.num_tokens),
        )
        stream.was_counted = response.was_counted
        before = context.history.of(response.request_id).get(job.request_id)
        if before is not None:
            continue_statistics(stream, before, self._clock)
        # Whoever had the response before may have been first with this round.
        await publish_for(
            self._bus, response, job.request_id, [job], [stream], first_reply=former.job.reply
        )
        return stream

    async def _job(self, response: ResponseStream, choice: Choice) -> Job:
        """In the last round that there may be, no tool can be called."""
        number = choice.round + 1
        mode = ToolMode.AUTO if self._may_call(number) else ToolMode.NONE
        request = replace(
            response.request,
            messages=(*(response.request.messages or ()), *choice.turns),
            tool_choice=ToolChoice(mode=mode),
        )
        former = choice.stream.job
        first = replace(next_round(former, number), reply=self._config.gateway_id)
        job = await self._maker.prepare(
            with_prompt(first, request), request, response.model, response.caller
        )
        # The notices of the request hold for all rounds: counting them again would add to them.
        sampling = replace(job.sampling, seed=former.sampling.seed)
        return replace(job, sampling=sampling, notices=request.notices)

    def _may_call(self, number: int) -> bool:
        """Whether tools can be called in the round of this number, from 0."""
        return number < self._config.max_tool_rounds


def _fail(choice: Choice, frame: Failed) -> None:
    if choice.is_between_rounds():  # it has no other end yet
        choice.fail(frame)
