"""Parts of a response on its way to a client, independent of the endpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from millrace.schemas.frames import TokenLogprob


class AnswerText(NamedTuple):
    """Text of ``num_tokens`` more tokens of a choice from ``first_index`` on; it may be empty.
    ``logprobs`` has an entry for each token if the request asked for them, except for the token
    that ended the completion.
    """

    choice: int
    first_index: int
    num_tokens: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningPart(NamedTuple):
    """Text of the thoughts before the answer, with the fields of ``AnswerText``. Tokens that end
    the thoughts and begin the answer are counted there if they come together.
    """

    choice: int
    first_index: int
    num_tokens: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CallStart(NamedTuple):
    """Start of a tool call: the ``call``-th call of its choice. The input of a ``custom`` tool is
    text.
    """

    choice: int
    call: int
    call_id: str
    name: str
    custom: bool = False


class CallArguments(NamedTuple):
    """More of a call's arguments, which form JSON once complete, or of a ``custom`` tool's input
    text.
    """

    choice: int
    call: int
    text: str
    custom: bool = False


class StepPart(NamedTuple):
    """Run of a gateway tool; the next round's text follows. ``output`` is its result for the
    model.
    """

    call_id: str
    name: str
    arguments: str
    ok: bool
    output: str
    duration_ms: float
    choice: int = 0

    def told(self) -> dict[str, Any]:
        """Return the fields for clients."""
        fields = self._asdict()
        del fields["choice"]
        return fields


class ChoiceEnd(NamedTuple):
    """Successful end of a choice: ``stop``, ``length`` or ``tool_calls``. ``stop_reason`` is the
    stop string or the id of the stop token that ended it, if any. ``is_call_cut``: the arguments of
    the last call that the client got are incomplete.
    """

    choice: int
    reason: str
    stop_reason: str | int | None = None
    is_call_cut: bool = False


Part = AnswerText | ReasoningPart | CallStart | CallArguments | StepPart | ChoiceEnd


class PartEvents(NamedTuple):
    """Events of a part. ``delta`` is the event with its text or other token data; it comes after
    the others.
    """

    others: bytes = b""
    delta: bytes = b""
