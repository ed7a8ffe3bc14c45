"""From a well-formed ask to an accepted answer: context, limits, jobs, the queue."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

from msgspec.structs import replace

from bus.api import Bus
from bus.clock import Clock
from gateway.answer import Answer, job_id
from gateway.caller import Caller
from gateway.choice import Choice
from gateway.errors import DrainingError
from gateway.fleet import Fleet
from gateway.job_maker import JobMaker, with_prompt
from gateway.latency import GapCounts
from gateway.model_choice import ModelChoice
from gateway.models import Models, ServedModelLike
from gateway.parsing import Ask
from gateway.request_index import RequestIndex, RequestState
from gateway.services import LimiterLike, SessionsLike, ToolOutcome, ToolsLike
from gateway.stream import Client, OpenStream
from gateway.streams import StreamTable
from registry.pricing import cost
from schemas.config import GatewayConfig
from schemas.errors import BusUnavailableError, ParameterError
from schemas.frames import Usage
from schemas.jobs import ChatMessage, Job, Source, Tier
from schemas.sessions import SessionInfo
from schemas.tools import ToolCall, ToolChoice, ToolMode

_log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
_URGENCY = {Tier.BATCH: 0, Tier.FREE: 1, Tier.PRO: 2, Tier.ENTERPRISE: 3}


class Asker:
    """Makes answers. ``begin`` and ``publish_round`` raise MillraceError: nothing was stored then.

    Owns the answers that are not over, and the tasks that run tools for them.
    """

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        gateway_id: str,
        models: Models,
        choice: ModelChoice,
        streams: StreamTable,
        fleet: Fleet,
        clock: Clock,
        index: RequestIndex,
        limiter: LimiterLike,
        sessions: SessionsLike,
        tools: ToolsLike,
        gaps: GapCounts,
        seed_source: random.Random,
    ) -> None:
        self.streams = streams
        self._tools = tools
        self.gaps = gaps
        self.draining = False
        self._bus = bus
        self._config = config
        self._gateway_id = gateway_id
        self._models = models
        self._choice = choice
        self._fleet = fleet
        self._clock = clock
        self._index = index
        self._limiter = limiter
        self._sessions = sessions
        self.maker = JobMaker(tools, seed_source)
        self._answers: dict[str, tuple[Answer, RequestState]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        return self._clock.monotonic()

    def get(self, request_id: str) -> Answer | None:
        """An answer whose end nobody has taken yet, on this gateway."""
        known = self._answers.get(request_id)
        return None if known is None else known[0]

    def state_of(self, request_id: str) -> RequestState | None:
        """What others have to know of such an answer."""
        known = self._answers.get(request_id)
        return None if known is None else known[1]

    def answers(self) -> list[Answer]:
        return [answer for answer, _ in self._answers.values()]

    def keep(self, answer: Answer, state: RequestState) -> None:
        self._answers[answer.request_id] = (answer, state)

    def forget(self, answer: Answer) -> None:
        if self.get(answer.request_id) is answer:
            del self._answers[answer.request_id]

    async def begin(
        self,
        ask: Ask,
        caller: Caller,
        request_id: str,
        source: Source,
        client: Client,
        *,
        idempotency_key: str = "",
        owner: object = None,
    ) -> Answer:
        """Fit the session, tokenise, reserve, knock at the queue's door and publish; the answer is
        accepted on return. A client that left in the meantime is for the caller to notice."""
        self._check_stays()
        received_ns, received_s = self._clock.now_ns(), self._clock.monotonic()
        ask = await self._choice.resolve(ask, caller.tenant, tier_of(ask, caller))
        model = await self._models.get(ask.model)
        async with self._in_session(ask, caller, model, request_id) as (session, ask):
            state = RequestState(
                request_id=request_id,
                tenant=caller.tenant,
                origin=self._gateway_id,
                holder=self._gateway_id,
                source=source,
                tier=tier_of(ask, caller),
                created_ns=received_ns,
                deadline_ns=received_ns + round(self._config.request_timeout_s * _NS_PER_S),
                keep_result=bool(idempotency_key or ask.server_tools),
                ask=ask if ask.server_tools or ask.echo else _without_prompt(ask),
                session=session,
                idempotency_key=idempotency_key,
            )
            jobs = await self.maker.jobs(self._base_job(state, ask), ask, model, caller)
            self._check_door(ask.model)
            self._check_stays()
            headers = await self._reserve(caller, request_id, model, jobs)
            answer = Answer(
                self,
                ask,
                caller,
                model,
                request_id,
                received_ns // _NS_PER_S,
                session=session,
                headers=headers,
                idempotency_key=idempotency_key,
                owner=owner,
            )
            if (former := self.get(request_id)) is not None:
                former.let_go()  # the same Idempotency-Key at the same moment
            for index, job in enumerate(jobs):
                # Once published, text is of no use here any more: ids say it all.
                stream = self.streams.open(
                    replace(job, prompt_token_ids=()), client, received_s, answer
                )
                answer.choices.append(self.choice(answer, index, stream))
            self.keep(answer, state)
            try:
                await self._publish(answer, jobs, state)
            except BaseException:
                self.forget(answer)
                raise
            return answer

    @asynccontextmanager
    async def _in_session(
        self, ask: Ask, caller: Caller, model: ServedModelLike, request_id: str
    ) -> AsyncGenerator[tuple[SessionInfo | None, Ask]]:
        """The ask behind what its session holds, which keeps nothing of an ask that is refused."""
        if not ask.session_id:
            yield None, ask
            return
        fitted = await self._sessions.begin(caller, ask, model, request_id)
        try:
            yield fitted.info, replace(ask, messages=fitted.messages)
        except BaseException:
            self.spawn(self._sessions.abandon(caller.tenant, ask.session_id, request_id))
            raise

    def choice(self, answer: Answer, index: int, stream: OpenStream, from_index: int = 0) -> Choice:
        """A choice that reads tool calls if the answer may have any."""
        has_tools = (
            bool(answer.ask.tools or answer.own_tools)
            and answer.ask.tool_choice.mode is not ToolMode.NONE
        )
        tool_format = answer.model.tool_format if has_tools else None
        return Choice(index, stream, tool_format, answer.own_tools, from_index)

    def may_call(self, number: int) -> bool:
        """Whether tools can be called in the round of this number, from 0."""
        return number < self._config.max_tool_rounds

    async def publish_round(
        self, answer: Answer, choice: Choice, turns: tuple[ChatMessage, ...]
    ) -> OpenStream:
        """The stream of a choice's next round, in which ``turns`` stand behind the conversation.
        In the last round that there may be, no tool can be called."""
        ask, caller = answer.ask, answer.caller
        number = choice.round + 1
        mode = ToolMode.AUTO if self.may_call(number) else ToolMode.NONE
        tool_choice = ToolChoice(mode=mode)
        request_id = job_id(answer.request_id, choice.index, number)
        messages = (*(ask.messages or ()), *turns)
        ask = replace(ask, messages=messages, tool_choice=tool_choice)
        former = choice.stream.job
        first = replace(former, request_id=request_id, reply=self._gateway_id)
        job = await self.maker.prepare(with_prompt(first, ask), ask, answer.model, caller)
        job = replace(job, sampling=replace(job.sampling, seed=former.sampling.seed))
        self._check_door(job.model)
        await self._reserve(caller, request_id, answer.model, [job])
        from_index = max(0, choice.next_index - choice.num_tokens)
        stream = self.streams.open(
            replace(job, prompt_token_ids=()),
            choice.stream.client,
            self._clock.monotonic(),
            answer,
            from_index=from_index,
        )
        try:
            published = await self._bus.jobs.publish(job)
        except BaseException:
            self.streams.discard(stream)
            self._limiter.settle_soon(request_id, None, None)
            raise
        if published.duplicate:
            # Whoever had the answer before was first, and may be who its frames are sent to.
            stream.job = replace(stream.job, reply=former.reply)
            self.streams.follow(stream)
        self.streams.accept(stream)
        return stream

    async def run_tool(self, answer: Answer, call: ToolCall) -> ToolOutcome:
        """What one of the gateway's own tools gives; it is remembered for whoever goes on with the
        answer, who does not run it again."""
        if answer.was_resumed:
            known = await self._index.get_step(answer.request_id, call.id)
            if known is not None:
                return known
        result = await self._tools.run(call.name, call.arguments)
        outcome = ToolOutcome(ok=result.ok, output=result.output, duration_ms=result.duration_ms)
        await self._index.put_step(answer.request_id, call.id, outcome)
        return outcome

    def settle(self, reservation_id: str, answer: Answer, usages: Sequence[Usage | None]) -> None:
        """The jobs of a reservation have ended."""
        known = [usage for usage in usages if usage is not None]
        prices = answer.model.prices
        total = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in known),
            cached_tokens=sum(usage.cached_tokens for usage in known),
            completion_tokens=sum(usage.completion_tokens for usage in known),
        )
        price = sum(
            (
                cost(prices, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
                for usage in known
            ),
            Decimal(0),
        )
        self._limiter.settle_soon(
            reservation_id, total if known else None, price if known else None
        )

    async def commit_turn(self, answer: Answer) -> None:
        """Put what was said behind its session's history."""
        assert answer.session is not None
        await self._sessions.commit(
            answer.caller.tenant,
            answer.session.session_id,
            answer.request_id,
            answer.turns_of(0),
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something for an answer in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Stop what runs in the background."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("what was done for an answer failed", exc_info=error)

    # --- from an ask to jobs ---

    def _base_job(self, state: RequestState, ask: Ask) -> Job:
        return Job(
            request_id=state.request_id,
            model=ask.model,
            prompt_token_ids=(),
            reply=self._gateway_id,
            batch_frames=True,
            store_result=state.keep_result,
            tenant=state.tenant,
            user=ask.user,
            session_id=ask.session_id,
            tier=state.tier,
            source=state.source,
            model_requested=ask.model_requested or ask.model,
            route_reason=ask.route_reason,
            received_ns=state.created_ns,
            deadline_ns=state.deadline_ns,
        )

    def _check_stays(self) -> None:
        if self.draining:
            raise DrainingError("This gateway is shutting down. Send the request again.")

    def _check_door(self, model: str) -> None:
        self._fleet.check_door(model)
        if not self._bus.connected:
            raise BusUnavailableError("The message bus is away. Try again in a moment.")

    async def _reserve(
        self, caller: Caller, reservation_id: str, model: ServedModelLike, jobs: Sequence[Job]
    ) -> list[tuple[bytes, bytes]]:
        """Take what the jobs may need at most out of the caller's limits."""
        num_prompt = sum(len(job.prompt_token_ids or ()) for job in jobs)
        num_completion = sum(job.sampling.max_tokens or 0 for job in jobs)
        reservation = await self._limiter.reserve(
            caller,
            reservation_id,
            model=jobs[0].model,
            tier=jobs[0].tier,
            num_prompt_tokens=num_prompt,
            max_tokens=num_completion,
            cost_upper=cost(model.prices, num_prompt, 0, num_completion),
            deadline_s=self._config.request_timeout_s,
            longest_tokens=max(
                len(job.prompt_token_ids or ()) + (job.sampling.max_tokens or 0) for job in jobs
            ),
        )
        return reservation.headers

    async def _publish(self, answer: Answer, jobs: Sequence[Job], state: RequestState) -> None:
        """All or nothing: if one cannot be stored, those that were are cancelled."""
        streams = [choice.stream for choice in answer.choices]
        try:
            *outcomes, _ = await asyncio.gather(
                *(self._bus.jobs.publish(job) for job in jobs),
                self._index.put(state),
                return_exceptions=True,
            )
        except BaseException:
            for stream in streams:
                self.streams.discard(stream)
            self._limiter.settle_soon(answer.request_id, None, None)
            raise
        failed = next((one for one in outcomes if isinstance(one, BaseException)), None)
        for stream, outcome in zip(streams, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self.streams.discard(stream)
                continue
            if outcome is not None and outcome.duplicate:
                self.streams.follow(stream)
            self.streams.accept(stream)
            if failed is not None:
                self.streams.leave(stream, "refused")
        if failed is not None:
            self._limiter.settle_soon(answer.request_id, None, None)
            raise failed


def tier_of(ask: Ask, caller: Caller) -> Tier:
    """The tier of a request: the caller's own, or a less urgent one that it names."""
    if ask.tier is None:
        return caller.tier
    if _URGENCY[ask.tier] > _URGENCY[caller.tier]:
        raise ParameterError(
            "service_tier",
            f"Your tier is {caller.tier}; service_tier may name that or a less urgent one.",
        )
    return ask.tier


def _without_prompt(ask: Ask) -> Ask:
    sampling = replace(ask.sampling, grammar=None)
    return replace(
        ask,
        prompt=None,
        messages=None,
        prompt_token_ids=(),
        other_prompts=("",) * len(ask.other_prompts),
        sampling=sampling,
    )
