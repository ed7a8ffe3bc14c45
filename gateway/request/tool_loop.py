"""The gateway's own tools: run between two rounds of an answer, whose next job says what they gave.

A round of a choice ends when the model has called tools. The answer hands the choice to ``run``,
and gets it back with a stream of its next round, with its end, or failed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus.api import Bus
from gateway.request.admission import Admission
from gateway.request.context import ToolOutcome, ToolsLike
from gateway.request.index import RequestIndex
from gateway.request.job_maker import JobMaker, job_id, with_prompt
from gateway.streams.choice import TOOL_CALLS, Choice
from gateway.streams.delivery_statistics import SeenBefore, go_on_from
from gateway.streams.parts import StepPart
from gateway.streams.stream import OpenStream
from gateway.streams.streams import StreamTable
from runtime.clock import Clock
from schemas.config import GatewayConfig
from schemas.errors import MillraceError
from schemas.frames import Failed
from schemas.jobs import ChatMessage, Job
from schemas.tools import ToolCall, ToolChoice, ToolMode

if TYPE_CHECKING:
    from gateway.request.response_stream import Answer

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LOOK_S = 2.0
_LOOK_TIMEOUT_S = 0.5


class AnswerLostError(MillraceError):
    """Whoever made the answer is gone before it was whole."""

    code = "answer_lost"
    retryable = True
    http_status = 503

    def __init__(self) -> None:
        super().__init__("The gateway that ran this answer's tools is gone. Ask again.")


class Rounds:
    """Runs tools and queues rounds for the answers of one gateway; owns nothing of them."""

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        gateway_id: str,
        clock: Clock,
        streams: StreamTable,
        maker: JobMaker,
        admission: Admission,
        index: RequestIndex,
        tools: ToolsLike,
        seen: SeenBefore,
    ) -> None:
        self._bus = bus
        self._max_rounds = config.max_tool_rounds
        self._gateway_id = gateway_id
        self._clock = clock
        self._streams = streams
        self._maker = maker
        self._admission = admission
        self._index = index
        self._tools = tools
        self._seen = seen

    async def run(self, answer: Answer, choice: Choice) -> None:
        """Run the tools that were called, then let the model go on with what they gave. Never
        raises: the choice fails."""
        try:
            await self._run(answer, choice)
        except MillraceError as error:
            _fail(choice, Failed(code=error.code, message=error.message, retryable=error.retryable))
        except Exception:
            logger.exception("a round failed", extra={"request_id": answer.request_id})
            _fail(choice, Failed(code="internal_error", message="The gateway failed."))
        finally:
            choice.runs_tools = False
            choice.stream.wake()

    async def _run(self, answer: Answer, choice: Choice) -> None:
        said = choice.round_end
        assert said is not None
        own = [call for call in said.calls if call.name in answer.own_tools]
        results = await asyncio.gather(*(self._run_tool(answer, call) for call in own))
        # Who has tokens of the next round has these already.
        steps = choice.pending if choice.next_index <= choice.num_tokens else choice.had
        steps += [
            StepPart(
                call.id, call.name, call.arguments, result.ok, result.output, result.duration_ms
            )
            for call, result in zip(own, results, strict=True)
        ]
        if not answer.awaits_round(choice):
            return
        if len(own) < len(said.calls):
            choice.end_with(TOOL_CALLS)
            return
        choice.turns.append(ChatMessage("assistant", said.text, tool_calls=said.calls))
        choice.turns += [
            ChatMessage("tool", result.output, name=call.name, tool_call_id=call.id)
            for call, result in zip(own, results, strict=True)
        ]
        choice.stream.wake()
        stream = await self._publish(answer, choice)
        if stream is not None:
            answer.begin_round(choice, stream, may_call=self._may_call(choice.round + 1))

    async def _run_tool(self, answer: Answer, call: ToolCall) -> ToolOutcome:
        """What a tool gives; it is remembered for whoever goes on with the answer, who does not run
        it again."""
        if answer.is_copy:
            return await self._awaited_step(answer, call)
        if answer.was_resumed:
            known = await self._index.get_step(answer.request_id, call.id)
            if known is not None:
                return known
        result = await self._tools.run(call.name, call.arguments)
        outcome = ToolOutcome(ok=result.ok, output=result.output, duration_ms=result.duration_ms)
        await self._index.put_step(answer.request_id, call.id, outcome)
        return outcome

    async def _awaited_step(self, answer: Answer, call: ToolCall) -> ToolOutcome:
        """What a tool gave to whoever holds the answer. Raises AnswerLostError if that gateway is
        gone, or nobody wants to know any more."""
        look_s = self._clock.monotonic() + _LOOK_S
        while answer.is_served:
            known = await self._index.get_step(answer.request_id, call.id)
            if known is not None:
                return known
            now_s = self._clock.monotonic()
            if now_s >= look_s:
                look_s = now_s + _LOOK_S
                if not await self._is_held(answer):
                    break
            await self._clock.sleep(_POLL_S)
        raise AnswerLostError

    async def _is_held(self, answer: Answer) -> bool:
        if answer.is_held_here:
            return True
        state = await self._index.get(answer.request_id)
        if state is None or state.holder == self._gateway_id:
            return False
        return await self._bus.control.is_gateway_there(
            state.holder, answer.request_id, _LOOK_TIMEOUT_S
        )

    async def _publish(self, answer: Answer, choice: Choice) -> OpenStream | None:
        """The stream of a choice's next round; None if nobody here wants it any more. Raises
        MillraceError: nothing was stored then."""
        if answer.is_copy:
            request_id = job_id(answer.request_id, choice.index, choice.round + 1)
            job = replace(choice.stream.job, request_id=request_id)
            return self._streams.copy(job, choice.stream.client, answer)
        job = await self._job(answer, choice)
        if answer.trace is not None:
            job = answer.trace.attach(job)
        self._admission.check_door(job.model)
        await self._admission.reserve(answer.caller, job.request_id, answer.model, [job])
        if not answer.awaits_round(choice):
            self._give_back(answer, job)
            return None
        stream = self._streams.open(
            replace(job, prompt_token_ids=()),
            choice.stream.client,
            self._clock.monotonic(),
            answer,
            from_index=max(0, choice.next_index - choice.num_tokens),
        )
        seen = self._seen.of(answer.request_id).get(job.request_id)
        if seen is not None:
            go_on_from(stream, seen, self._clock)
        since_ns = self._clock.now_ns()
        try:
            published = await self._bus.jobs.publish(job, reserved=True)
        except BaseException:
            self._streams.discard(stream)
            self._give_back(answer, job)
            raise
        if answer.trace is not None:
            answer.trace.published([job], since_ns)
        if published.duplicate:
            # Whoever had the answer before was first, and may be who its frames are sent to.
            stream.job = replace(stream.job, reply=choice.stream.job.reply)
            self._streams.follow(stream)
        self._streams.accept(stream, published.stream_sequence)
        return stream

    async def _job(self, answer: Answer, choice: Choice) -> Job:
        """In the last round that there may be, no tool can be called."""
        number = choice.round + 1
        mode = ToolMode.AUTO if self._may_call(number) else ToolMode.NONE
        ask = replace(
            answer.ask,
            messages=(*(answer.ask.messages or ()), *choice.turns),
            tool_choice=ToolChoice(mode=mode),
        )
        former = choice.stream.job
        request_id = job_id(answer.request_id, choice.index, number)
        first = replace(former, request_id=request_id, reply=self._gateway_id)
        job = await self._maker.prepare(with_prompt(first, ask), ask, answer.model, answer.caller)
        return replace(job, sampling=replace(job.sampling, seed=former.sampling.seed))

    def _give_back(self, answer: Answer, job: Job) -> None:
        if not answer.was_let_go:
            self._admission.give_back(job.request_id)

    def _may_call(self, number: int) -> bool:
        """Whether tools can be called in the round of this number, from 0."""
        return number < self._max_rounds


def _fail(choice: Choice, frame: Failed) -> None:
    if choice.is_between_rounds():  # it has no other end yet
        choice.fail(frame)
