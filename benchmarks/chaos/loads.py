"""What the clients of ``benchmarks.chaos`` ask for: plain answers, and what is hard to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.chaos.clients import KINDS, TimedClient, TimedParts
from tests.support.system import System

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
# Long enough that a worker for prompts computes it; none begins as another.
_LONG = "{} " + "What is a KV cache? " * 100
_TOOL = {"type": "function", "function": {"name": "note", "parameters": _OBJECT}}
# A whole object ends by itself, well within.
_ENOUGH_TOKENS = 600


class Load(msgspec.Struct, frozen=True):
    """``options`` gives those of a request of so many tokens by the number of its client, ``kinds``
    are its clients in turn; a request has ``num_choices`` jobs, with a record each. ``question``
    has a place for the client's number."""

    name: str
    options: Callable[[int, int], dict[str, Any]]
    kinds: tuple[type[TimedClient], ...] = (TimedParts,)
    num_choices: int = 1
    question: str = "What is TTFT? {}"

    def clients(self, system: System, num_streams: int, num_tokens: int) -> list[TimedClient]:
        """The same questions each time, so that the answers have to be the same, too."""
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
