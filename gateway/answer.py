"""One request's answer: its choices, and the rounds of tools that it takes, as parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.caller import Caller
from gateway.choice import TOOL_CALLS, Choice
from gateway.errors import Refusal, refusal_of_end
from gateway.model_choice import route_headers
from gateway.nobody import INERT, Nobody
from gateway.parsing import Ask
from gateway.parts import Part, StepPart
from gateway.stream import Client, OpenStream
from gateway.streams import TAKEN_OVER
from schemas.control import CancelReason
from schemas.errors import MillraceError
from schemas.frames import Cancelled, Done, Failed, TokenLogprob, Usage
from schemas.jobs import ChatMessage
from schemas.sessions import SessionInfo
from schemas.tools import ToolCall

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from gateway.asking import Asker
    from gateway.models import ServedModelLike


class Answer:
    """What a client waits for: takes from its choices' streams, runs the gateway's own tools.

    A client that is woken calls ``take`` until ``ended``, then ``conclude`` if there is something
    to store, and ``finish``. One that goes away calls ``leave``, which cancels, or ``hold``, after
    which somebody else may take the answer over. ``owner`` is the client's own.
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
    ) -> None:
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
        self.was_let_go = False
        self._asker = asker
        self._settled: list[Usage | None] = []
        self._conversations: dict[int, list[ChatMessage]] = {}
        self._rounds: set[int] = set()
        self._failure: Refusal | None = None
        self._held = False
        self._held_until_s: float | None = None
        self._left = ""
        self._is_concluding = False
        self._is_over = False

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
            elif choice.end is not None and type(choice.end) is not Done:
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
        return not (self._left or self._held or self.was_let_go or self._is_over)

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
            if choice.index in self._rounds:
                choice.fail(Cancelled(num_tokens=choice.next_index))
                choice.stream.wake()
            elif choice.end is None:
                self._asker.streams.cancel(choice.stream, reason)

    def leave(self, outcome: str) -> None:
        """The client is gone and wants nothing more: cancel what runs."""
        if self._left or self._held:
            return
        self._left = outcome
        for choice in self.choices:
            self._asker.streams.leave(choice.stream, outcome)

    def hold(self, for_s: float | None, outcome: str) -> None:
        """The client is gone but may come back within ``for_s`` (None: until it has ended)."""
        if not self.is_served:
            return
        self._held = True
        self._held_until_s = None if for_s is None else self._asker.now_s() + for_s
        nobody = Nobody(self, self._asker.now_s)
        for choice in self.choices:
            stream = choice.stream
            stream.outcome = stream.outcome or outcome
            self._asker.streams.hold(stream, self._held_until_s)
            stream.change_client(nobody)

    def let_go(self) -> None:
        """Another connection has it now."""
        self.was_let_go = True
        for choice in self.choices:
            if choice.index in self._rounds:
                choice.fail(Failed(code=TAKEN_OVER, message="Another connection goes on with it."))
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
        """It has ended and nobody was there."""
        if self.must_conclude:
            if not self._is_concluding:
                self._is_concluding = True
                self._asker.spawn(self._conclude_and_finish())
        else:
            self.finish()

    async def _conclude_and_finish(self) -> None:
        try:
            await self.conclude()
        finally:
            self.finish()

    def finish(self) -> None:
        """The client has taken the end."""
        self._is_over = True
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

    # --- what the table of streams tells ---

    def note_end(self, stream: OpenStream) -> None:
        """A stream of this answer has left the table: settle what was reserved for it."""
        if not any(
            choice.stream is stream and choice.index in self._rounds for choice in self.choices
        ):
            self._part(stream)
        usage = _usage_of(stream)
        if stream.request_id not in self._first_ids():
            self._asker.settle(stream.request_id, self, [usage])
        else:
            self._settled.append(usage)
            if len(self._settled) == len(self.choices):
                self._asker.settle(self.request_id, self, self._settled)
        if not self._rounds and all(choice.stream.ended for choice in self.choices):
            self._asker.forget(self)

    def _part(self, stream: OpenStream) -> None:
        """Let nothing lead from a stream that has ended back here: what is in a circle is freed by
        the garbage collector only, which comes rarely."""
        stream.owner = None
        if self._held:
            stream.client = INERT

    def _first_ids(self) -> set[str]:
        return {job_id(self.request_id, choice.index, 0) for choice in self.choices}

    # --- rounds of tools ---

    def _next_round(self, choice: Choice) -> None:
        if choice.index in self._rounds or self._left:
            return
        self._rounds.add(choice.index)
        # It is recorded now; what follows are jobs of their own.
        self._asker.streams.finish(choice.stream)
        self._asker.spawn(self._run_round(choice))

    async def _run_round(self, choice: Choice) -> None:
        """Run the tools that were called, then let the model go on with what they gave."""
        try:
            await self._run_tools(choice)
        except MillraceError as error:
            choice.fail(Failed(code=error.code, message=error.message, retryable=error.retryable))
        except Exception:
            logger.exception("a round failed", extra={"request_id": self.request_id})
            choice.fail(Failed(code="internal_error", message="The gateway failed."))
        finally:
            self._rounds.discard(choice.index)
            choice.stream.wake()

    async def _run_tools(self, choice: Choice) -> None:
        said = choice.round_end
        assert said is not None
        own = [call for call in said.calls if call.name in self.own_tools]
        results = await asyncio.gather(*(self._asker.run_tool(self, call) for call in own))
        # Who has tokens of the next round has these already.
        steps = choice.pending if choice.next_index <= choice.num_tokens else choice.had
        steps += [
            StepPart(
                call.id, call.name, call.arguments, result.ok, result.output, result.duration_ms
            )
            for call, result in zip(own, results, strict=True)
        ]
        if self._left or not choice.is_between_rounds():
            return  # nobody wants it any more
        if len(own) < len(said.calls):
            choice.end_with(TOOL_CALLS)
            return
        turns = self._conversations.setdefault(choice.index, [])
        turns.append(ChatMessage("assistant", said.text, tool_calls=said.calls))
        turns += [
            ChatMessage("tool", result.output, name=call.name, tool_call_id=call.id)
            for call, result in zip(own, results, strict=True)
        ]
        choice.stream.wake()
        stream = await self._asker.publish_round(self, choice, tuple(turns))
        if self.was_let_go:
            # Whoever has the answer now has this round, too: it must not be cancelled.
            self._asker.streams.let_go(stream)
            stream.leave(TAKEN_OVER)
            return
        if self._left or not choice.is_between_rounds():
            self._asker.streams.leave(stream, self._left or "cancelled")
            return
        if self._held:
            self._asker.streams.hold(stream, self._held_until_s)
        former = choice.stream
        choice.begin_round(stream, may_call=self._asker.may_call(choice.round + 1))
        # Frames may have come before the queue's answer did, and the client may be gone since.
        stream.change_client(former.client)
        self._part(former)

    def turns_of(self, choice: int) -> list[ChatMessage]:
        """What was said in the answer: rounds of tools, then the last text and calls."""
        last = self.choices[choice]
        turns = list(self._conversations.get(choice, ()))
        earlier = sum(len(turn.content) for turn in turns if turn.role == "assistant")
        text, calls = last.text[earlier:], tuple(last.client_calls)
        if text or calls:
            turns.append(ChatMessage("assistant", text, tool_calls=calls))
        return turns

    # --- ends ---

    def _fail(self, choice: Choice) -> None:
        """One choice has failed: so has the answer, and the others are of no use."""
        end = choice.end
        assert end is not None
        assert not isinstance(end, Done)
        if self._failure is None:
            self._failure = refusal_of_end(end)
        if isinstance(end, Failed) and end.code == TAKEN_OVER:
            return
        for other in self.choices:
            if other.end is None:
                self._asker.streams.cancel(other.stream, CancelReason.CLIENT)


def job_id(request_id: str, choice: int, round_: int) -> str:
    """The id of the job of one round of one choice; the first round of the first has the request's
    own."""
    return request_id + (f".{choice}" if choice else "") + (f"-r{round_}" if round_ else "")


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
