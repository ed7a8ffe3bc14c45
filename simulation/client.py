"""Clients of a trace: send its requests when due, and record the answers."""

from __future__ import annotations

import asyncio
from collections import deque

from millrace.bus.api import Bus
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.schemas.control import Cancel, CancelReason, QueueStatus, ResumePoint
from millrace.schemas.errors import QueueFullError
from millrace.schemas.frames import (
    Cancelled,
    Delta,
    Done,
    Expired,
    Failed,
    Frame,
    Shed,
    Started,
    TerminalFrame,
)
from millrace.schemas.jobs import Job
from millrace.schemas.records import Status
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tenants import own_reply
from millrace.simulation.outcomes import REPLY, Outcomes, RequestOutcome
from millrace.simulation.settings import Policy
from millrace.simulation.traces.trace import Texts, TraceRequest
from millrace.simulation.workers.context import Spawn

_NS_PER_S = 1e9
_STATUSES: dict[type[TerminalFrame], Status] = {
    Done: Status.DONE,
    Cancelled: Status.CANCELLED,
    Expired: Status.EXPIRED,
    Shed: Status.SHED,
    Failed: Status.FAILED,
}


class Clients:
    """All clients of a trace. ``all_ended`` is set when every request has been answered."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        outcomes: Outcomes,
        texts: Texts,
        policy: Policy,
        spawn: Spawn,
    ) -> None:
        self.all_ended = asyncio.Event()
        self._bus = bus
        self._clock = clock
        self._outcomes = outcomes
        self._texts = texts
        self._policy = policy
        self._num_open = len(outcomes)
        # Later turns of each session that wait for the present one.
        self._turns: dict[tuple[str, str], deque[RequestOutcome]] = {}
        self._queues: dict[str, QueueStatus] = {}
        self._subscriptions: list[Subscription] = []
        self._spawn = spawn

    async def listen(self) -> None:
        queues = await self._bus.control.subscribe_queue_status(self._on_queue)
        self._subscriptions = [queues]
        for reply in {self._reply(outcome.request) for outcome in self._outcomes} | {REPLY}:
            self._subscriptions += [
                await self._bus.frames.subscribe(reply, self._on_frame),
                await self._bus.control.serve_resume_points(reply, self._resume_point),
            ]

    def _reply(self, request: TraceRequest) -> str:
        """Return a request's listener. A service can only name one of its tenant's."""
        if not request.published:
            return REPLY
        tenant, _ = self._policy.who(request.tenant, request.tier)
        return own_reply(tenant, REPLY)

    def _on_queue(self, status: QueueStatus) -> None:
        self._queues[status.model] = status

    async def send_all(self) -> None:
        """Send all requests. Returns when the last one is due."""
        for outcome in self._outcomes:
            wait_s = outcome.request.at_s - self._outcomes.now_s()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            request = outcome.request
            if request.session:
                waiting = self._turns.get((request.tenant, request.session))
                if waiting is not None:
                    waiting.append(outcome)
                    continue
                self._turns[request.tenant, request.session] = deque()
            await self._send(outcome)

    async def _send(self, outcome: RequestOutcome) -> None:
        outcome.sent_s = self._outcomes.now_s()
        job = self._job(outcome)
        queue = self._queues.get(job.model)
        if queue is not None:
            outcome.predicted_ttft_ms = queue.ttft_ms_of(job.tier, job.tenant)
        try:
            await self._bus.jobs.publish(job, reserved=not outcome.request.published)
        except QueueFullError as error:
            self._end(outcome, Status.SHED, error.code)
            return
        deadline_s = outcome.request.deadline_s
        if deadline_s is not None and job.deadline_ns is None:
            asyncio.get_running_loop().call_later(deadline_s, self._give_up, outcome)

    def _job(self, outcome: RequestOutcome) -> Job:
        request, now_ns = outcome.request, self._clock.now_ns()
        tenant, tier = self._policy.who(request.tenant, request.tier)
        deadline_ns = None
        # A policy without deadlines must not sort by them. The client keeps its own.
        if request.deadline_s is not None and not self._policy.is_blind:
            deadline_ns = now_ns + round(request.deadline_s * _NS_PER_S)
        return Job(
            request_id=outcome.request_id,
            model=request.model,
            tier=tier,
            tenant=tenant,
            session_id=request.session,
            prompt_token_ids=self._texts.prompt(request, outcome.request_id),
            sampling=SamplingOptions(
                max_tokens=request.max_tokens or request.output_tokens, seed=0, ignore_eos=True
            ),
            reply=self._reply(request),
            batch_frames=True,
            received_ns=now_ns,
            deadline_ns=deadline_ns,
        )

    def _give_up(self, outcome: RequestOutcome) -> None:
        if outcome.status is None:
            cancel = Cancel(request_id=outcome.request_id, reason=CancelReason.DEADLINE)
            self._spawn(self._bus.control.cancel(cancel))

    def _on_frame(self, request_id: str, frame: Frame) -> None:
        outcome = self._outcomes[request_id]
        match frame:
            case Started():
                outcome.epoch = max(outcome.epoch, frame.epoch)
                if outcome.started_s < 0:
                    outcome.started_s = self._outcomes.now_s()
                    outcome.num_cached_tokens = frame.num_cached_tokens
            case Delta():
                if outcome.first_s < 0 and frame.epoch >= outcome.epoch:
                    outcome.first_s = self._outcomes.now_s()
            case Done() | Cancelled() | Expired() | Shed() | Failed():
                outcome.num_terminals += 1
                if outcome.status is None:
                    code = frame.code if isinstance(frame, Failed) else ""
                    self._end(outcome, _STATUSES[type(frame)], code)
            case _:
                pass  # positions and counts change nothing here

    def _end(self, outcome: RequestOutcome, status: Status, error_code: str) -> None:
        outcome.end_s = self._outcomes.now_s()
        outcome.status, outcome.error_code = status, error_code
        self._num_open -= 1
        if not self._num_open:
            self.all_ended.set()
        request = outcome.request
        turns = self._turns.get((request.tenant, request.session)) if request.session else None
        if turns:
            self._spawn(self._send(turns.popleft()))
        elif turns is not None:
            del self._turns[request.tenant, request.session]

    def _resume_point(self, request_id: str) -> ResumePoint:
        outcome = self._outcomes[request_id]
        return ResumePoint(token_ids=outcome.token_ids, open=outcome.status is None)
