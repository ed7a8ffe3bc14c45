"""Response with its client: its reader, its phase, and its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from millrace.bus.api import Bus
from millrace.gateway.metrics import Metrics
from millrace.gateway.models import LoadedModels
from millrace.gateway.request.admission import Admission
from millrace.gateway.request.failure_log import FailureLog
from millrace.gateway.request.index import RequestIndex, RequestState
from millrace.gateway.request.job_maker import JobMaker, job_id
from millrace.gateway.request.model_choice import ModelChoice, route_headers
from millrace.gateway.request.response_reader import AcceptedRequest, ResponseReader
from millrace.gateway.request.tracing import RequestTrace
from millrace.gateway.sessions.sessions import Sessions
from millrace.gateway.streams.choice import Choice
from millrace.gateway.streams.deliveries import DeliveryHistory
from millrace.gateway.streams.parts import Part
from millrace.gateway.streams.stream import (
    NULL_CLIENT,
    Client,
    DetachedClient,
    OpenStream,
    usage_so_far,
)
from millrace.gateway.streams.streams import TAKEN_OVER, StreamTable
from millrace.gateway.tenancy.identity import Identity
from millrace.gateway.tools.runner import ToolRunner
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import GatewayConfig
from millrace.schemas.control import CancelReason
from millrace.schemas.frames import Cancelled, Failed, TerminalFrame, Usage
from millrace.schemas.notices import NOTICE_HEADER, header_value
from millrace.schemas.tools import ToolDefinition


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Shared objects of the requests and responses of one gateway. ``run_tools`` runs the tools
    that a choice called and starts its next round; it never raises.
    """

    bus: Bus
    config: GatewayConfig
    clock: Clock
    metrics: Metrics
    failure_log: FailureLog
    models: LoadedModels
    identity: Identity
    index: RequestIndex
    sessions: Sessions
    choice: ModelChoice
    maker: JobMaker
    admission: Admission
    streams: StreamTable
    responses: OpenResponses
    history: DeliveryHistory
    tools: ToolRunner
    run_tools: Callable[[ResponseStream, Choice], Coroutine[Any, Any, None]]


class Keeper(Protocol):
    """Reader of a response that continues without a client."""

    def add(self, part: Part) -> None:
        """Take the next part. Must return at once."""

    async def keep(self) -> None:
        """Handle the end of the response, successful or not."""


class ReaderPhase(Enum):
    """Reader of a response. ``_NEXT`` has the allowed transitions."""

    ATTACHED = auto()  # a client reads it
    DETACHED = auto()  # the client is gone and may come back
    CONCLUDING = auto()  # it ended while detached, and is being stored
    ABORTED = auto()  # the client is gone, and its jobs are cancelled
    FINISHED = auto()  # the end was delivered
    HANDED_OFF = auto()  # another connection has it; do not touch it here


_NEXT = {
    ReaderPhase.ATTACHED: {
        ReaderPhase.DETACHED,
        ReaderPhase.ABORTED,
        ReaderPhase.FINISHED,
        ReaderPhase.HANDED_OFF,
    },
    ReaderPhase.DETACHED: {ReaderPhase.CONCLUDING, ReaderPhase.FINISHED, ReaderPhase.HANDED_OFF},
    ReaderPhase.CONCLUDING: {ReaderPhase.FINISHED, ReaderPhase.HANDED_OFF},
    ReaderPhase.ABORTED: {ReaderPhase.FINISHED, ReaderPhase.HANDED_OFF},
    ReaderPhase.FINISHED: {ReaderPhase.HANDED_OFF},
    ReaderPhase.HANDED_OFF: set[ReaderPhase](),
}


class ResponseStream(ResponseReader):
    """Response that a client reads; runs the gateway's own tools between its choices' rounds.

    A client that is woken calls ``read_parts`` until ``ended``, then ``conclude`` if there is
    something to store, and ``finish``. A client that leaves calls ``abort``, which cancels, or
    ``detach``, after which another client may take the response over. ``owner`` is the client's own
    object. A copy (``is_copy``) is read by another client beside the response itself and has no
    effect on it, except that a ``cancel`` cancels both. ``was_counted``: its end was recorded
    before, and it is read again.
    """

    def __init__(
        self,
        context: ResponseContext,
        accepted: AcceptedRequest,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        first_indices: tuple[int, ...] = (),
        owner: object = None,
        is_copy: bool = False,
        was_counted: bool = False,
    ) -> None:
        super().__init__(accepted, context.metrics.gaps, first_indices)
        self.context = context
        self.idempotency_key = accepted.idempotency_key
        self._path = accepted.path
        self._headers = [*headers, *route_headers(accepted.request)]
        self.owner = owner
        self.is_copy = is_copy
        self.was_counted = was_counted
        # A cancel by the client is no failure, even if ``refusal`` is set.
        self.was_cancelled = False
        self.trace: RequestTrace | None = None
        self._settled: list[Usage | None] = []
        self._phase = ReaderPhase.ATTACHED
        self._detached_until_s: float | None = None
        self._keeper: Keeper | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of its limits and route, and one with the notices so far."""
        notices = self.notices
        told = [(NOTICE_HEADER, header_value(notices))] if notices else []
        return [*self._headers, *told]

    @property
    def tools(self) -> tuple[ToolDefinition, ...]:
        """Return the tools that the model was told of, the gateway's own after the client's."""
        named = map(self.context.tools.catalogue.get, self.request.server_tools)
        return (*self.request.tools, *(tool.definition for tool in named if tool is not None))

    @property
    def was_resumed(self) -> bool:
        """Return whether it was resumed from another connection."""
        return bool(self.first_indices)

    @property
    def is_attached(self) -> bool:
        """Return whether its client still waits for it."""
        return self._phase is ReaderPhase.ATTACHED

    @property
    def was_handed_off(self) -> bool:
        """Return whether another connection has taken it over."""
        return self._phase is ReaderPhase.HANDED_OFF

    @property
    def clients(self) -> set[Client]:
        return {choice.stream.client for choice in self.choices}

    def _enter(self, phase: ReaderPhase) -> bool:
        """Enter a phase if the transition is allowed; return whether it was."""
        if phase not in _NEXT[self._phase]:
            return False
        self._phase = phase
        return True

    # --- calls of a client ---

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the response; its end follows."""
        self.was_cancelled = self.was_cancelled or reason is CancelReason.CLIENT
        for choice in self.choices:
            if choice.runs_tools:
                choice.fail(Cancelled(num_tokens=choice.next_index))
                choice.stream.wake()
            elif choice.end is None:
                self.context.streams.cancel(choice.stream, reason)

    def break_off(self, frame: Failed) -> None:
        """End the response with ``frame``, and cancel its jobs."""
        for choice in self.choices:
            if choice.end is None:
                choice.fail(frame)
                if not self.is_copy:
                    self.context.streams.cancel(choice.stream, CancelReason.DISCONNECT)
                choice.stream.wake()

    def abort(self, outcome: str) -> None:
        """Abort a response without a client: cancel its jobs."""
        if not self._enter(ReaderPhase.ABORTED):
            return
        for choice in self.choices:
            self.context.streams.abort(choice.stream, outcome)
        self.context.responses.copies.discard(self)

    def detach(self, for_s: float | None, outcome: str, keeper: Keeper | None = None) -> None:
        """Detach a client that may return within ``for_s`` (None: until the response has ended).
        ``keeper`` gets the parts.
        """
        if self.is_copy:
            self.abort(outcome)
        if not self._enter(ReaderPhase.DETACHED):
            return
        self._detached_until_s = None if for_s is None else self.context.clock.monotonic() + for_s
        self._keeper = keeper
        client = DetachedClient(self._read_detached)
        for choice in self.choices:
            stream = choice.stream
            stream.outcome = stream.outcome or outcome
            stream.detach(self._detached_until_s)
            stream.change_client(client)

    def hand_off(self) -> None:
        """Hand the response off to another connection."""
        self._enter(ReaderPhase.HANDED_OFF)
        self.context.responses.remove(self)
        for choice in self.choices:
            if choice.runs_tools:
                choice.fail(TAKEN_OVER)
            self.context.streams.hand_off(choice.stream)

    @property
    def must_conclude(self) -> bool:
        """Return whether the end must be stored before the client learns of it."""
        is_kept = self.refusal is None or self.was_cancelled
        return self.session is not None and is_kept and not self.was_handed_off

    async def conclude(self) -> None:
        """Store the turn in its session."""
        if not self.must_conclude:
            return
        assert self.session is not None
        await self.context.sessions.commit_turn(
            self.caller.tenant,
            self.session.session_id,
            self.request_id,
            self.choices[0].conversation,
        )

    async def release_key(self) -> None:
        """Release the Idempotency-Key if the response failed in a way that may pass."""
        refusal = self.refusal
        if refusal is not None and refusal.retry_after_s is not None and self.idempotency_key:
            await self.context.index.release(
                self.caller.tenant, self.idempotency_key, self.request_id
            )

    def finish(self) -> None:
        """Finish a response whose end the client has read."""
        was_attached = self.is_attached
        self._enter(ReaderPhase.FINISHED)
        context = self.context
        for choice in self.choices:
            if choice.stream.ended:
                context.streams.finish(choice.stream)
            else:
                context.streams.abort(choice.stream, "failed")
        for choice in self.choices:
            if choice.stream.ended:
                self._unlink(choice.stream)
        self.owner = None
        context.responses.remove(self)
        if was_attached and not self.is_copy:
            context.history.forget(self.request_id)

    def _on_failure(self, end: TerminalFrame) -> None:
        is_first = self.refusal is None
        super()._on_failure(end)
        if end is TAKEN_OVER or self.is_copy:
            return
        is_wanted = isinstance(end, Cancelled) and not end.reason
        if is_first and not is_wanted and self.refusal is not None:
            self.context.failure_log.failed(
                self._path, self.refusal, self.caller.tenant, self.request_id
            )
        for other in self.choices:
            if other.end is None:  # no longer needed
                self.context.streams.cancel(other.stream, CancelReason.CLIENT)

    # --- without a client ---

    def _read_detached(self) -> None:
        if self.was_handed_off:
            return
        parts = self.read_parts(self.context.clock.monotonic())
        if self._keeper is not None:
            for part in parts:
                self._keeper.add(part)
        if not self.ended:
            return
        if not self.must_conclude and self._keeper is None:
            self.finish()
        elif self._enter(ReaderPhase.CONCLUDING):
            self.context.responses.tasks.spawn(self._conclude_and_finish(), "conclude a response")

    async def _conclude_and_finish(self) -> None:
        try:
            await self.conclude()
            if self._keeper is not None and not self.was_handed_off:
                await self._keeper.keep()
                await self.release_key()
        finally:
            self.finish()

    # --- reports of the table of streams ---

    def note_end(self, stream: OpenStream) -> None:
        """Settle the reservation of a stream of this response that has left the table."""
        context = self.context
        if self._phase is not ReaderPhase.FINISHED or stream.outcome:
            context.history.keep_stream(self.request_id, stream)
        if not any(choice.stream is stream and choice.runs_tools for choice in self.choices):
            self._unlink(stream)
        usage = usage_so_far(stream)
        first_ids = {job_id(self.request_id, choice.index, 0) for choice in self.choices}
        if stream.request_id not in first_ids:
            context.admission.settle(stream.request_id, self.model, [usage])
        else:
            self._settled.append(usage)
            if len(self._settled) == self.num_jobs:
                context.admission.settle(self.request_id, self.model, self._settled)
        if all(choice.stream.ended and not choice.runs_tools for choice in self.choices):
            context.responses.remove(self)

    def release(self, reservation_id: str) -> None:
        """Release the reservation of jobs that were not queued, unless another gateway has taken
        the response over and releases it.
        """
        if not self.was_handed_off:
            self.context.admission.release(reservation_id)

    def _unlink(self, stream: OpenStream) -> None:
        """Remove all references from an ended stream to this object: cycles are freed by the
        garbage collector only, which runs rarely.
        """
        stream.owner = None
        if isinstance(stream.client, DetachedClient):
            stream.client = NULL_CLIENT

    # --- rounds of tools ---

    def _on_round_end(self, choice: Choice) -> None:
        if choice.runs_tools:
            return
        if self.was_handed_off:
            choice.fail(TAKEN_OVER)
        elif self.awaits_round(choice):
            choice.runs_tools = True
            # It is recorded now; the following jobs have records of their own.
            self.context.streams.finish(choice.stream)
            self.context.responses.tasks.spawn(self.context.run_tools(self, choice), "run tools")

    def awaits_round(self, choice: Choice) -> bool:
        """Return whether a choice must continue with the results of its tools: a client or keeper
        still wants it.
        """
        is_wanted = self._phase in (ReaderPhase.ATTACHED, ReaderPhase.DETACHED)
        return is_wanted and choice.is_between_rounds()

    def start_round(self, choice: Choice, stream: OpenStream, *, may_call: bool) -> None:
        """Start the next round of a choice with its queued job's stream, or end the stream if no
        client wants it any more.
        """
        former, streams = choice.stream, self.context.streams
        if self.was_handed_off:
            # The gateway that took over the response has this round, too: do not cancel it.
            streams.hand_off(stream)
            stream.abort(TAKEN_OVER.code)
            return
        if not self.awaits_round(choice):
            streams.abort(stream, former.outcome or "cancelled")
            return
        if self._phase is ReaderPhase.DETACHED:
            stream.outcome = former.outcome
            stream.detach(self._detached_until_s)
        choice.start_round(stream, may_call=may_call)
        # Frames may have come before the queue's acknowledgement, and the client may have left
        # since.
        stream.change_client(former.client)
        self._unlink(former)


class OpenResponses:
    """Table of responses whose end was not delivered yet, of the ``copies`` that other clients
    read, and of their background ``tasks``.
    """

    def __init__(self) -> None:
        self._responses: dict[str, tuple[ResponseStream, RequestState | None]] = {}
        self.copies: set[ResponseStream] = set()
        self.tasks = Tasks()

    def get(self, request_id: str) -> ResponseStream | None:
        """Return the response itself, not a copy."""
        known = self._responses.get(request_id)
        return None if known is None else known[0]

    def state_of(self, request_id: str) -> RequestState | None:
        """Return the state that another gateway needs to continue such a response, once it is
        accepted.
        """
        known = self._responses.get(request_id)
        return None if known is None else known[1]

    def all(self) -> list[ResponseStream]:
        return [*(response for response, _ in self._responses.values()), *self.copies]

    def add(self, response: ResponseStream, state: RequestState | None) -> None:
        """Add a response. ``state`` is None until other gateways may take it over."""
        self._responses[response.request_id] = (response, state)

    def remove(self, response: ResponseStream) -> None:
        """Remove a response that is over, or that another connection has taken over."""
        self.copies.discard(response)
        if self.get(response.request_id) is response:
            del self._responses[response.request_id]
