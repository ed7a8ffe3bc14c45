"""Loads of ``benchmarks.chaos``: plain answers, and answers that are hard to move."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from tests.e2e.clients import Answer
from tests.e2e.resuming import EventClient, Persistent, SocketClient
from tests.support.system import System


class Arrivals:
    """Arrival times of the parts of one answer, on this process's monotonic clock."""

    def __init__(self) -> None:
        self.parts_s: list[float] = []

    def note(self) -> None:
        self.parts_s.append(time.monotonic())

    def longest_gap_s(self, from_s: float, to_s: float) -> float | None:
        """Return the longest gap that ended after ``from_s`` and began before ``to_s``.

        Returns None for a stream that had not begun by then, or was over.
        """
        gaps = [
            after_s - before_s
            for before_s, after_s in pairwise(self.parts_s)
            if after_s > from_s and before_s < to_s
        ]
        has_begun = bool(self.parts_s) and self.parts_s[0] < from_s
        return max(gaps) if gaps and has_begun else None


class TimedSocket(SocketClient):
    """WebSocket client that resumes at the first missing token index."""

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self.arrivals = Arrivals()

    def _read(self, message: dict[str, Any]) -> Answer | None:
        if message["type"] == "delta":
            self.arrivals.note()
        return super()._read(message)


class TimedEvents(EventClient):
    """Server-sent events client that resumes by Last-Event-ID."""

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self.arrivals = Arrivals()

    def _note(self, event_id: str) -> None:
        self.arrivals.note()
        super()._note(event_id)


@dataclass
class PartsAnswer(Answer):
    """Answer with several parts.

    ``text`` is a line of JSON for each choice: its content, its calls, its tokens, and its finish
    reason. ``logprobs`` holds the reported log-probabilities, by choice.
    """

    logprobs: dict[int, list[float]]


class Choice:
    """Parts of one choice, as received."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: dict[int, list[str]] = {}
        self.tokens: list[list[str]] = []
        self.logprobs: list[float] = []
        self.finish_reason = ""

    def read(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.content += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            # The id includes the request's, so it differs each time.
            parts = self.calls.setdefault(call["index"], ["", ""])
            function = call.get("function", {})
            parts[0] += function.get("name") or ""
            parts[1] += function.get("arguments") or ""
        for token in (choice.get("logprobs") or {}).get("content") or ():
            best = sorted(token["top_logprobs"], key=lambda one: one["token"])
            self.tokens.append([token["token"], *(one["token"] for one in best)])
            self.logprobs += [token["logprob"], *(one["logprob"] for one in best)]
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def line(self) -> str:
        return json.dumps([self.content, self.calls, self.tokens, self.finish_reason])


class TimedParts(TimedEvents):
    """Server-sent events client that reads every part of a choice.

    It never needs to resume, because the faults leave its gateway alone.
    """

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self._choices: defaultdict[int, Choice] = defaultdict(Choice)

    def _read(self, chunk: dict[str, Any]) -> bool:
        assert "error" not in chunk, chunk
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._choices[choice["index"]].read(choice)
        return True

    def _note(self, event_id: str) -> None:
        del event_id
        self.arrivals.note()

    def _answer(self) -> Answer:
        assert self.num_connections == 1, "it lost its gateway"
        choices = sorted(self._choices.items())
        return PartsAnswer(
            self.request_id,
            "\n".join(choice.line() for _, choice in choices),
            ",".join(choice.finish_reason for _, choice in choices),
            self._usage["prompt_tokens"],
            self._usage["completion_tokens"],
            {index: choice.logprobs for index, choice in choices},
        )


TimedClient = TimedSocket | TimedEvents
KINDS: tuple[type[TimedSocket] | type[TimedEvents], ...] = (TimedSocket, TimedEvents)

__all__ = [
    "KINDS",
    "Answer",
    "Arrivals",
    "Choice",
    "PartsAnswer",
    "Persistent",
    "TimedClient",
    "TimedParts",
]


_TEXTS = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{6} [a-z]{6}$"},
    "minItems": 12,
    "maxItems": 12,
}
_OBJECT = {
    "type": "object",
    "properties": {"answer": _TEXTS, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
# Long enough for a prefill worker; no two prompts begin alike.
_LONG = "{} " + "What is a KV cache? " * 100
_TOOL = {"type": "function", "function": {"name": "note", "parameters": _OBJECT}}
# Enough tokens for a whole object, which ends by itself.
_ENOUGH_TOKENS = 600


class Load(msgspec.Struct, frozen=True):
    """Load of chaos clients.

    ``options`` returns a request's options by number of tokens and client. ``kinds`` are the
    clients' classes in turn. A request has ``num_choices`` jobs, with a record each. ``question``
    has a placeholder for the client's number.
    """

    name: str
    options: Callable[[int, int], dict[str, Any]]
    kinds: tuple[type[TimedClient], ...] = (TimedParts,)
    num_choices: int = 1
    question: str = "What is TTFT? {}"

    def clients(self, system: System, num_streams: int, num_tokens: int) -> list[TimedClient]:
        """Return clients with the same questions each time, so that answers must be the same."""
        return [
            self.kinds[number % len(self.kinds)](
                system, self.question.format(number), **self.options(num_tokens, number)
            )
            for number in range(num_streams)
        ]


def _plain(num_tokens: int, _number: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "ignore_eos": True}


def _schema(_num_tokens: int, _number: int) -> dict[str, Any]:
    form = {"name": "answer", "schema": _OBJECT, "strict": True}
    return {
        "response_format": {"type": "json_schema", "json_schema": form},
        "max_tokens": _ENOUGH_TOKENS,
        "logprobs": True,
    }


def _tool_calls(_num_tokens: int, _number: int) -> dict[str, Any]:
    return {"tools": [_TOOL], "tool_choice": "required", "max_tokens": _ENOUGH_TOKENS}


def _choices(num_tokens: int, number: int) -> dict[str, Any]:
    drawn = {"n": 3, "temperature": 1.0, "seed": number, "logprobs": True}
    return _plain(num_tokens, number) | drawn


def _logprobs(num_tokens: int, number: int) -> dict[str, Any]:
    return _plain(num_tokens, number) | {"logprobs": True, "top_logprobs": 3}


def _penalties(num_tokens: int, number: int) -> dict[str, Any]:
    drawn = {
        "temperature": 1.2,
        "seed": number,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logprobs": True,
    }
    return _plain(num_tokens, number) | drawn


LOADS = {
    load.name: load
    for load in (
        Load("plain", _plain, KINDS),
        Load("schema", _schema),
        Load("tool calls", _tool_calls),
        Load("n = 3", _choices, num_choices=3),
        Load("logprobs", _logprobs),
        Load("penalties", _penalties),
        Load("long prompts", _plain, KINDS, question=_LONG),
    )
}
