"""One request's answer: its choices as parts, and what becomes of them with their client."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from gateway.errors import Refusal, refusal_of_end
from gateway.request.detached_client import INERT, Nobody
from gateway.request.job_maker import job_id
from gateway.request.model_choice import route_headers
from gateway.request.parsing import Ask
from gateway.streams.choice import Choice
from gateway.streams.parts import Part
from gateway.streams.stream import Client, OpenStream
from gateway.streams.streams import TAKEN_OVER
from gateway.tenancy.caller import Caller
from schemas.control import CancelReason
from schemas.frames import Cancelled, Done, Failed, TokenLogprob, Usage
from schemas.sessions import SessionInfo
from schemas.tools import ToolCall

if TYPE_CHECKING:
    from gateway.request.models import ServedModelLike
    from gateway.request.submitter import Asker
    from gateway.request.tracing import RequestTrace


class _Life(Enum):
    """Who has an answer. Only ``SERVED`` can be held or left; ``LET_GO`` stays so, as somebody
    else's answer must not be touched by what still runs here."""

    SERVED = auto()  # a client waits for it
    HELD = auto()  # the client is gone and may come back
    CONCLUDING = auto()  # it has ended while it was held, and is being stored
    LEFT = auto()  # the client is gone, and what runs is cancelled
    LET_GO = auto()  # another connection has it
    OVER = auto()  # the end was taken


class Answer:
    """What a client waits for: takes from its choices' streams, has the gateway's own tools run.

    A client that is woken calls ``take`` until ``ended``, then ``conclude`` if there is something
    to store, and ``finish``. One that goes away calls ``leave``, which cancels, or ``hold``, after
    which somebody else may take the answer over. ``owner`` is the client's own. One that
    ``is_copy`` is read by another client beside the answer itself, and leaves that alone: only a
    ``cancel`` is for both.
    """

    def __init__(
        self,
        asker: Asker,
        ask: Ask,
        caller: Caller,
        model: ServedModelLike,
        request_id: str,
        created_s: int,
        *,
        session: SessionInfo | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        idempotency_key: str = "",
        first_indices: tuple[int, ...] = (),
        owner: object = None,
        is_copy: bool = False,
    ) -> None:
        self.is_copy = is_copy
        self.ask = ask
        self.caller = caller
        self.model = model
        self.request_id = request_id
        self.created_s = created_s
        self.session = session
        self.headers = [*headers, *route_headers(ask)]
        self.idempotency_key = idempotency_key
        self.first_indices = first_indices
        self.owner = owner
        self.choices: list[Choice] = []
        self.own_tools = frozenset(ask.server_tools)
        self.was_cancelled = False
        self.trace: RequestTrace | None = None
        self._asker = asker
        self._settled: list[Usage | None] = []
        self._failure: Refusal | None = None
        self._life = _Life.SERVED
        self._held_until_s: float | None = None

    # --- what a client reads ---

    def take(self, now_s: float) -> list[Part]:
        """The parts that came since the last call, in the order of each choice."""
        parts: list[Part] = []
        gaps = self._asker.gaps
        for choice in self.choices:
            if choice.end is None or choice.pending:
                choice.collect(now_s, gaps, parts)
            if choice.round_end is not None:
                self._next_round(choice)
            if choice.end is not None and type(choice.end) is not Done:
                self._fail(choice)
        return parts

    @property
    def ended(self) -> bool:
        """Whether all that will ever come has been taken."""
        if self._failure is not None:
            return True
        first = self.choices[0]
        if first.end is None or first.pending:
            return False  # the usual answer while tokens come, at no cost
        return not any(choice.end is None or choice.pending for choice in self.choices)

    @property
    def refusal(self) -> Refusal | None:
        """Why it ended, if that was not well; a cancel that the client asked for is in
        ``was_cancelled``."""
        return self._failure

    @property
    def was_resumed(self) -> bool:
        """Whether another connection had it before."""
        return bool(self.first_indices)

    @property
    def is_kept(self) -> bool:
        """Whether it is made to its end though nobody waits for it, for who comes with its key."""
        return bool(self.idempotency_key)

    @property
    def is_served(self) -> bool:
        """Whether its client still waits for it."""
        return self._life is _Life.SERVED

    @property
    def is_held_here(self) -> bool:
        """Of a copy: whether this gateway has the answer itself."""
        return self._asker.get(self.request_id) is not None

    @property
    def was_let_go(self) -> bool:
        """Whether another connection has it now."""
        return self._life is _Life.LET_GO

    @property
    def clients(self) -> set[Client]:
        return {choice.stream.client for choice in self.choices}

    @property
    def has_begun(self) -> bool:
        """Whether there is a sign of life from a worker."""
        return any(
            choice.round or choice.stream.reader.started or choice.stream.reader.has_pending
            for choice in self.choices
        )

    @property
    def usage(self) -> Usage:
        """Of all choices and rounds; the prompt that they share counts once."""
        usages = [choice.usage for choice in self.choices]
        num_choices = self.ask.sampling.n
        first = usages[::num_choices]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in first),
            cached_tokens=sum(usage.cached_tokens for usage in first),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
        )

    @property
    def texts(self) -> list[str]:
        """The whole text of each choice so far, without the markup of tool calls."""
        return [choice.text for choice in self.choices]

    @property
    def calls(self) -> list[list[ToolCall]]:
        """The calls of each choice that are for the client to run."""
        return [choice.client_calls for choice in self.choices]

    @property
    def reasons(self) -> list[str]:
        """How each choice ended."""
        return [choice.reason for choice in self.choices]

    @property
    def next_indices(self) -> tuple[int, ...]:
        """The index of the first token of each choice that was not taken yet."""
        return tuple([choice.next_index for choice in self.choices])

    def prompt_of(self, choice: int) -> str | tuple[int, ...]:
        """The prompt of a choice, if the ask had a prompt."""
        ask = self.ask
        number = choice // ask.sampling.n
        if number:
            return ask.other_prompts[number - 1]
        return ask.prompt if ask.prompt is not None else ask.prompt_token_ids or ()

    def prompt_logprobs(self, choice: int) -> tuple[TokenLogprob | None, ...]:
        return self.choices[choice].stream.reader.prompt_logprobs

    # --- what a client does ---

    def cancel(self, reason: CancelReason) -> None:
        """Stop; the end follows."""
        self.was_cancelled = self.was_cancelled or reason is CancelReason.CLIENT
        for choice in self.choices:
            if choice.runs_tools:
                choice.fail(Cancelled(num_tokens=choice.next_index))
                choice.stream.wake()
            elif choice.end is None:
                self._asker.streams.cancel(choice.stream, reason)

    def break_off(self, frame: Failed) -> None:
        """End here with ``frame``, and cancel what runs."""
        for choice in self.choices:
            if choice.end is None:
                choice.fail(frame)
                if not self.is_copy:
                    self._asker.streams.cancel(choice.stream, CancelReason.DISCONNECT)
                choice.stream.wake()

    def leave(self, outcome: str) -> None:
        """The client is gone and wants nothing more: cancel what runs."""
        if not self.is_served:
            return
        self._life = _Life.LEFT
        for choice in self.choices:
            self._asker.streams.leave(choice.stream, outcome)
        self._asker.copies.discard(self)

    def hold(self, for_s: float | None, outcome: str) -> None:
        """The client is gone but may come back within ``for_s`` (None: until it has ended)."""
        if self.is_copy:
            self.leave(outcome)
        if not self.is_served:
            return
        self._life = _Life.HELD
        self._held_until_s = None if for_s is None else self._asker.now_s() + for_s
        nobody = Nobody(self, self._asker.now_s)
        for choice in self.choices:
            stream = choice.stream
            stream.outcome = stream.outcome or outcome
            self._asker.streams.hold(stream, self._held_until_s)
            stream.change_client(nobody)

    def let_go(self) -> None:
        """Another connection has it now."""
        self._life = _Life.LET_GO
        self._asker.copies.discard(self)
        for choice in self.choices:
            if choice.runs_tools:
                choice.fail(TAKEN_OVER)
            self._asker.streams.let_go(choice.stream)

    @property
    def must_conclude(self) -> bool:
        """Whether the end has something to be stored before the client learns of it."""
        is_kept = self._failure is None or self.was_cancelled
        return self.session is not None and is_kept and not self.was_let_go

    async def conclude(self) -> None:
        """Store the turn in its session."""
        if self.must_conclude:
            await self._asker.commit_turn(self)

    def finish_unseen(self) -> None:
        """It has ended while it was held."""
        if not self.must_conclude:
            self.finish()
        elif self._life is _Life.HELD:
            self._life = _Life.CONCLUDING
            self._asker.spawn(self._conclude_and_finish())

    async def _conclude_and_finish(self) -> None:
        try:
            await self.conclude()
        finally:
            self.finish()

    def finish(self) -> None:
        """The client has taken the end."""
        was_taken = self.is_served
        if not self.was_let_go:
            self._life = _Life.OVER
        for choice in self.choices:
            if choice.stream.ended:
                self._asker.streams.finish(choice.stream)
            else:
                self._asker.streams.leave(choice.stream, "failed")
        for choice in self.choices:
            if choice.stream.ended:
                self._part(choice.stream)
        self.owner = None
        self._asker.forget(self)
        self._asker.copies.discard(self)
        if was_taken and not self.is_copy:
            self._asker.seen.forget(self.request_id)

    # --- what the table of streams tells ---

    def note_end(self, stream: OpenStream) -> None:
        """A stream of this answer has left the table: settle what was reserved for it."""
        if self._life is not _Life.OVER or stream.outcome:
            self._asker.seen.keep_stream(self.request_id, stream)
        if not any(choice.stream is stream and choice.runs_tools for choice in self.choices):
            self._part(stream)
        usage = _usage_of(stream)
        admission = self._asker.admission
        if stream.request_id not in self._first_ids():
            admission.settle(stream.request_id, self.model, [usage])
        else:
            self._settled.append(usage)
            if len(self._settled) == len(self.choices):
                admission.settle(self.request_id, self.model, self._settled)
        if all(choice.stream.ended and not choice.runs_tools for choice in self.choices):
            self._asker.forget(self)

    def _part(self, stream: OpenStream) -> None:
        """Let nothing lead from a stream that has ended back here: what is in a circle is freed by
        the garbage collector only, which comes rarely."""
        stream.owner = None
        if isinstance(stream.client, Nobody):
            stream.client = INERT

    def _first_ids(self) -> set[str]:
        return {job_id(self.request_id, choice.index, 0) for choice in self.choices}

    # --- rounds of tools ---

    def _next_round(self, choice: Choice) -> None:
        if choice.runs_tools:
            return
        if self.was_let_go:
            choice.fail(TAKEN_OVER)
        elif self.awaits_round(choice):
            choice.runs_tools = True
            # It is recorded now; what follows are jobs of their own.
            self._asker.streams.finish(choice.stream)
            self._asker.spawn(self._asker.rounds.run(self, choice))

    def awaits_round(self, choice: Choice) -> bool:
        """Whether somebody here wants a choice to go on with what its tools give."""
        is_wanted = self._life in (_Life.SERVED, _Life.HELD)
        return is_wanted and choice.is_between_rounds()

    def begin_round(self, choice: Choice, stream: OpenStream, *, may_call: bool) -> None:
        """The job of a choice's next round is queued: go on with its stream, or have it end if
        nobody wants it any more."""
        former, streams = choice.stream, self._asker.streams
        if self.was_let_go:
            # Whoever has the answer now has this round, too: it must not be cancelled.
            streams.let_go(stream)
            stream.leave(TAKEN_OVER.code)
            return
        if not self.awaits_round(choice):
            streams.leave(stream, former.outcome or "cancelled")
            return
        if self._life is _Life.HELD:
            stream.outcome = former.outcome
            streams.hold(stream, self._held_until_s)
        choice.begin_round(stream, may_call=may_call)
        # Frames may have come before the queue's answer did, and the client may be gone since.
        stream.change_client(former.client)
        self._part(former)

    # --- ends ---

    def _fail(self, choice: Choice) -> None:
        """One choice has failed: so has the answer, and the others are of no use."""
        end = choice.end
        assert end is not None
        assert not isinstance(end, Done)
        if self._failure is None:
            self._failure = refusal_of_end(end)
        if end is TAKEN_OVER or self.is_copy:
            return
        for other in self.choices:
            if other.end is None:
                self._asker.streams.cancel(other.stream, CancelReason.CLIENT)


def _usage_of(stream: OpenStream) -> Usage | None:
    """What was computed for a stream as far as it is known; None: nothing was."""
    reader = stream.reader
    if reader.usage is not None:
        return reader.usage
    if reader.started is None:
        return None
    return Usage(
        prompt_tokens=reader.started.num_prompt_tokens,
        cached_tokens=reader.started.num_cached_tokens,
        completion_tokens=reader.next_index,
    )
