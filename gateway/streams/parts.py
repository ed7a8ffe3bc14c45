"""What a response is made of on its way to a client, whatever endpoint the client came through."""

from __future__ import annotations

from typing import Any, NamedTuple

from millrace.schemas.frames import TokenLogprob


class AnswerText(NamedTuple):
    """``num_tokens`` more tokens of a choice from ``first_index`` on, and the text that they add,
    which may be empty. ``logprobs`` has an entry for each token if the request asked for them, but
    for one that ended the completion."""

    choice: int
    first_index: int
    num_tokens: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningPart(NamedTuple):
    """As ``AnswerText``, of the thoughts that come before the answer. The tokens with which they
    end and the answer begins are counted there, if they come together."""

    choice: int
    first_index: int
    num_tokens: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CallStart(NamedTuple):
    """The model calls a tool: the ``call``-th call of its choice. The input of a ``custom`` tool is
    text."""

    choice: int
    call: int
    call_id: str
    name: str
    custom: bool = False


class CallArguments(NamedTuple):
    """More of a call's arguments, which are JSON once all are there, or of the text that is the
    input of a ``custom`` tool."""

    choice: int
    call: int
    text: str
    custom: bool = False


class StepPart(NamedTuple):
    """The gateway has run one of its own tools; the next round's text follows. ``output`` is what
    the model is told."""

    call_id: str
    name: str
    arguments: str
    ok: bool
    output: str
    duration_ms: float
    choice: int = 0

    def told(self) -> dict[str, Any]:
        """The fields that clients are told of."""
        fields = self._asdict()
        del fields["choice"]
        return fields


class ChoiceEnd(NamedTuple):
    """A choice ended well: ``stop``, ``length`` or ``tool_calls``. ``stop_reason`` is the stop
    string or the id of the stop token that ended it, if one did. ``is_call_cut``: the arguments of
    the last call that the client was told of are not whole."""

    choice: int
    reason: str
    stop_reason: str | int | None = None
    is_call_cut: bool = False


Part = AnswerText | ReasoningPart | CallStart | CallArguments | StepPart | ChoiceEnd


class PartEvents(NamedTuple):
    """The events of a part. ``delta`` is the event that tells its text, or what else is told of its
    tokens; it comes after the others."""

    others: bytes = b""
    delta: bytes = b""
