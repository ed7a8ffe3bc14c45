"""A response and its client: who reads it, what becomes of it, and how it ends."""

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
    """What the requests and responses of one gateway share. ``run_tools`` runs the tools that a
    choice called and starts its next round; it never raises."""

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
    """Reads a response that goes on without a client."""

    def add(self, part: Part) -> None:
        """The next part. Must return at once."""

    async def keep(self) -> None:
        """The response has ended, well or not."""


class ReaderPhase(Enum):
    """Who reads a response. ``_NEXT`` says what may follow what."""

    ATTACHED = auto()  # a client reads it
    DETACHED = auto()  # the client is gone and may come back
    CONCLUDING = auto()  # it ended while detached, and is being stored
    ABORTED = auto()  # the client is gone, and what runs is cancelled
    FINISHED = auto()  # the end was delivered
    HANDED_OFF = auto()  # another connection has it, and nothing here may touch it


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
    """What a client waits for; has the gateway's own tools run between its choices' rounds.

    A client that is woken calls ``read_parts`` until ``ended``, then ``conclude`` if there is
    something to store, and ``finish``. One that goes away calls ``abort``, which cancels, or
    ``detach``, after which somebody else may take the response over. ``owner`` is the client's own.
    One that ``is_copy`` is read by another client beside the response itself, and leaves that
    alone: only a ``cancel`` is for both. ``was_counted``: its end was recorded before, and it is
    read again.
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
        # A cancel that the client asked for is no failure, whatever ``refusal`` says.
        self.was_cancelled = False
        self.trace: RequestTrace | None = None
        self._settled: list[Usage | None] = []
        self._phase = ReaderPhase.ATTACHED
        self._detached_until_s: float | None = None
        self._keeper: Keeper | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of its limits and route, and one with the notices so far."""
        notices = self.notices
        told = [(NOTICE_HEADER, header_value(notices))] if notices else []
        return [*self._headers, *told]

    @property
    def tools(self) -> tuple[ToolDefinition, ...]:
        """Those that the model was told of, the gateway's own after the client's."""
        named = map(self.context.tools.catalogue.get, self.request.server_tools)
        return (*self.request.tools, *(tool.definition for tool in named if tool is not None))

    @property
    def was_resumed(self) -> bool:
        """Whether another connection had it before."""
        return bool(self.first_indices)

    @property
    def is_attached(self) -> bool:
        """Whether its client still waits for it."""
        return self._phase is ReaderPhase.ATTACHED

    @property
    def was_handed_off(self) -> bool:
        """Whether another connection has it now."""
        return self._phase is ReaderPhase.HANDED_OFF

    @property
    def clients(self) -> set[Client]:
        return {choice.stream.client for choice in self.choices}

    def _enter(self, phase: ReaderPhase) -> bool:
        """Go on to a phase, if it may follow; whether it did."""
        if phase not in _NEXT[self._phase]:
            return False
        self._phase = phase
        return True

    # --- what a client does ---

    def cancel(self, reason: CancelReason) -> None:
        """Stop; the end follows."""
        self.was_cancelled = self.was_cancelled or reason is CancelReason.CLIENT
        for choice in self.choices:
            if choice.runs_tools:
                choice.fail(Cancelled(num_tokens=choice.next_index))
                choice.stream.wake()
            elif choice.end is None:
                self.context.streams.cancel(choice.stream, reason)

    def break_off(self, frame: Failed) -> None:
        """End here with ``frame``, and cancel what runs."""
        for choice in self.choices:
            if choice.end is None:
                choice.fail(frame)
                if not self.is_copy:
                    self.context.streams.cancel(choice.stream, CancelReason.DISCONNECT)
                choice.stream.wake()

    def abort(self, outcome: str) -> None:
        """The client is gone and wants nothing more: cancel what runs."""
        if not self._enter(ReaderPhase.ABORTED):
            return
        for choice in self.choices:
            self.context.streams.abort(choice.stream, outcome)
        self.context.responses.copies.discard(self)

    def detach(self, for_s: float | None, outcome: str, keeper: Keeper | None = None) -> None:
        """The client is gone but may come back within ``for_s`` (None: until it has ended);
        ``keeper`` gets what comes."""
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
        """Another connection has it now."""
        self._enter(ReaderPhase.HANDED_OFF)
        self.context.responses.remove(self)
        for choice in self.choices:
            if choice.runs_tools:
                choice.fail(TAKEN_OVER)
            self.context.streams.hand_off(choice.stream)

    @property
    def must_conclude(self) -> bool:
        """Whether the end has something to be stored before the client learns of it."""
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
        """Let the Idempotency-Key be tried again if the response failed in a way that may pass."""
        refusal = self.refusal
        if refusal is not None and refusal.retry_after_s is not None and self.idempotency_key:
            await self.context.index.release(
                self.caller.tenant, self.idempotency_key, self.request_id
            )

    def finish(self) -> None:
        """The client has read the end."""
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
            if other.end is None:  # of no use any more
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

    # --- what the table of streams reports ---

    def note_end(self, stream: OpenStream) -> None:
        """A stream of this response has left the table: settle what was reserved for it."""
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
        """Give back what was reserved for jobs that were not queued; where another gateway has the
        response by now, that is its to do."""
        if not self.was_handed_off:
            self.context.admission.release(reservation_id)

    def _unlink(self, stream: OpenStream) -> None:
        """Let nothing lead from a stream that has ended back here: what is in a circle is freed by
        the garbage collector only, which comes rarely."""
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
            # It is recorded now; what follows are jobs of their own.
            self.context.streams.finish(choice.stream)
            self.context.responses.tasks.spawn(self.context.run_tools(self, choice), "run tools")

    def awaits_round(self, choice: Choice) -> bool:
        """Whether somebody here wants a choice to go on with the results of its tools."""
        is_wanted = self._phase in (ReaderPhase.ATTACHED, ReaderPhase.DETACHED)
        return is_wanted and choice.is_between_rounds()

    def start_round(self, choice: Choice, stream: OpenStream, *, may_call: bool) -> None:
        """The job of a choice's next round is queued: go on with its stream, or have it end if
        nobody wants it any more."""
        former, streams = choice.stream, self.context.streams
        if self.was_handed_off:
            # Whoever has the response now has this round, too: it must not be cancelled.
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
        # Frames may have come before the queue's answer did, and the client may be gone since.
        stream.change_client(former.client)
        self._unlink(former)


class OpenResponses:
    """Owns the responses whose end was not delivered yet, the ``copies`` that other clients read,
    and the background ``tasks`` that run for them."""

    def __init__(self) -> None:
        self._responses: dict[str, tuple[ResponseStream, RequestState | None]] = {}
        self.copies: set[ResponseStream] = set()
        self.tasks = Tasks()

    def get(self, request_id: str) -> ResponseStream | None:
        """The response itself, not a copy."""
        known = self._responses.get(request_id)
        return None if known is None else known[0]

    def state_of(self, request_id: str) -> RequestState | None:
        """What another gateway has to know of such a response, once it is accepted."""
        known = self._responses.get(request_id)
        return None if known is None else known[1]

    def all(self) -> list[ResponseStream]:
        return [*(response for response, _ in self._responses.values()), *self.copies]

    def add(self, response: ResponseStream, state: RequestState | None) -> None:
        """``state`` is None until others may go on with it."""
        self._responses[response.request_id] = (response, state)

    def remove(self, response: ResponseStream) -> None:
        """It is over, or another connection has it."""
        self.copies.discard(response)
        if self.get(response.request_id) is response:
            del self._responses[response.request_id]
