"""From a well-formed ask to an accepted answer: context, limits, jobs, the queue."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from bus.api import Bus
from gateway.errors import DrainingError
from gateway.request.admission import Admission
from gateway.request.context import LimiterLike, SessionsLike, ToolsLike
from gateway.request.entries import Entries
from gateway.request.index import RequestIndex, RequestState
from gateway.request.job_maker import JobMaker
from gateway.request.model_choice import ModelChoice
from gateway.request.models import Models, ServedModelLike
from gateway.request.parsing import Ask
from gateway.request.response_stream import Answer
from gateway.request.tool_loop import Rounds
from gateway.request.tracing import RequestTrace
from gateway.streams.choice import Choice
from gateway.streams.delivery_statistics import SeenBefore
from gateway.streams.fleet import Fleet
from gateway.streams.latency import GapCounts
from gateway.streams.stream import Client, OpenStream
from gateway.streams.streams import StreamTable
from gateway.tenancy.caller import Caller
from registry.tokenizers.prompt_pool import PromptPool
from runtime.clock import Clock
from schemas.config import GatewayConfig
from schemas.errors import ParameterError
from schemas.jobs import Job, Source, Tier
from schemas.sampling import SamplingParams
from schemas.sessions import SessionInfo
from schemas.tools import ToolMode

_log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
_URGENCY = {Tier.BATCH: 0, Tier.FREE: 1, Tier.PRO: 2, Tier.ENTERPRISE: 3}


class Asker:
    """Makes answers. ``begin`` raises MillraceError: nothing was stored then.

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
        keeps_transcripts: Callable[[str], Awaitable[bool]],
        check_stores: Callable[[], None],
        prompts: PromptPool,
        entries: Entries,
    ) -> None:
        self.streams = streams
        self.gaps = gaps
        self.draining = False
        self._bus = bus
        self._config = config
        self._gateway_id = gateway_id
        self._models = models
        self._choice = choice
        self._clock = clock
        self._index = index
        self._sessions = sessions
        self.keeps_transcripts = keeps_transcripts
        self._check_stores = check_stores
        self.maker = JobMaker(tools, seed_source, prompts)
        self.admission = Admission(bus, fleet, limiter, entries, config.request_timeout_s)
        self.seen = SeenBefore(clock, config.request_timeout_s)
        self.rounds = Rounds(
            bus,
            config,
            gateway_id,
            clock,
            streams,
            self.maker,
            self.admission,
            index,
            tools,
            self.seen,
        )
        self._answers: dict[str, tuple[Answer, RequestState | None]] = {}
        self.copies: set[Answer] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        return self._clock.monotonic()

    def get(self, request_id: str) -> Answer | None:
        """An answer whose end nobody has taken yet, on this gateway."""
        known = self._answers.get(request_id)
        return None if known is None else known[0]

    def state_of(self, request_id: str) -> RequestState | None:
        """What others have to know of such an answer, once it is accepted."""
        known = self._answers.get(request_id)
        return None if known is None else known[1]

    def answers(self) -> list[Answer]:
        return [*(answer for answer, _ in self._answers.values()), *self.copies]

    def keep(self, answer: Answer, state: RequestState | None) -> None:
        """``state`` is None until others may go on with it."""
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
        trace: RequestTrace | None = None,
    ) -> Answer:
        """Fit the session, tokenise, reserve, knock at the queue's door and publish; the answer is
        accepted on return. A client that left in the meantime is for the caller to notice."""
        self._check_stays()
        self._check_stores()
        received_ns, received_s = self._clock.now_ns(), self._clock.monotonic()
        ask = await self._choice.resolve(ask, caller.tenant, tier_of(ask, caller))
        model = await self._models.get(ask.model)
        if trace is not None:
            trace.asked(ask)
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
                traceparent="" if trace is None else trace.context.traceparent,
            )
            base = self._base_job(
                state, ask, keep_transcript=await self.keeps_transcripts(caller.tenant)
            )
            jobs = await self.maker.jobs(base, ask, model, caller)
            if trace is not None:
                jobs = [trace.attach(job) for job in jobs]
            self.admission.check_door(ask.model)
            self._check_stays()
            headers = await self.admission.reserve(caller, request_id, model, jobs)
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
            if trace is not None:
                trace.follow(answer)
            if (former := self.get(request_id)) is not None:
                former.let_go()  # the same Idempotency-Key at the same moment
            for index, job in enumerate(jobs):
                # Once published, text is of no use here any more: ids say it all.
                stream = self.streams.open(
                    replace(job, prompt_token_ids=()), client, received_s, answer
                )
                answer.choices.append(self.choice(answer, index, stream))
            # Nobody can attach to what may yet be refused.
            self.keep(answer, None)
            try:
                await self._publish(answer, jobs)
                if self.get(request_id) is answer:
                    self.keep(answer, state)
                    await self._index.put(state)
            except BaseException:
                answer.leave("failed")
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
        ends = end_token_ids(answer.model, answer.ask.sampling)
        return Choice(index, stream, tool_format, answer.own_tools, from_index, ends)

    async def commit_turn(self, answer: Answer) -> None:
        """Put what was said behind its session's history."""
        assert answer.session is not None
        await self._sessions.commit(
            answer.caller.tenant,
            answer.session.session_id,
            answer.request_id,
            answer.choices[0].conversation,
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

    def _base_job(self, state: RequestState, ask: Ask, *, keep_transcript: bool) -> Job:
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
            keep_transcript=keep_transcript,
        )

    def _check_stays(self) -> None:
        if self.draining:
            raise DrainingError("This gateway is shutting down. Send the request again.")

    async def _publish(self, answer: Answer, jobs: Sequence[Job]) -> None:
        """All or nothing: if one cannot be stored, those that were are cancelled."""
        streams = [choice.stream for choice in answer.choices]
        since_ns = self._clock.now_ns()
        try:
            outcomes = await asyncio.gather(
                *(self._bus.jobs.publish(job, reserved=True) for job in jobs),
                return_exceptions=True,
            )
        except BaseException:
            for stream in streams:
                self.streams.discard(stream)
            self._give_back(answer)
            raise
        failed = next((one for one in outcomes if isinstance(one, BaseException)), None)
        if answer.trace is not None:
            answer.trace.published(jobs, since_ns, "" if failed is None else type(failed).__name__)
        for stream, outcome in zip(streams, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self.streams.discard(stream)
                continue
            if outcome.duplicate:
                self.streams.follow(stream)
            self.streams.accept(stream, outcome.stream_sequence)
            if failed is not None:
                self.streams.leave(stream, "refused")
        if failed is not None:
            self._give_back(answer)
            raise failed

    def _give_back(self, answer: Answer) -> None:
        if not answer.was_let_go:
            self.admission.give_back(answer.request_id)


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


def end_token_ids(model: ServedModelLike, sampling: SamplingParams) -> frozenset[int]:
    """The tokens with which a completion is over."""
    ends = () if sampling.ignore_eos else model.eos_token_ids
    return frozenset(ends).union(sampling.stop_token_ids)


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
