"""The requests of ``benchmarks.soak``: everything that may be asked for, drawn at random, and what
each has to end in."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

LONGEST_TOKENS = 1_500
_SHARE_CANCELLED = 0.10
_SHARE_BAD = 0.01
_SHARE_SHARING = 0.25
_NUM_PREFIXES = 8
_TWIN_EVERY = 40

_LETTERS = {"kind": "regex", "text": "[a-z]{1,30}( [a-z]{1,30}){0,4}"}
_COLOUR = {
    "kind": "json_schema",
    "text": json.dumps(
        {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "green", "blue"]},
                "size": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["colour", "size"],
            "additionalProperties": False,
        }
    ),
}
_SUM = {"kind": "ebnf", "text": 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,4}/\n'}
GRAMMARS = (_LETTERS, _COLOUR, _SUM, {"kind": "json_object"})


@dataclass(frozen=True)
class Expected:
    """How a request has to end: with ``error_code``, or, where that is empty, without an error.

    ``twin`` is the request of the same prompt, parameters and seed, if there is one.
    """

    fields: dict[str, Any]
    error_code: str = ""
    twin: str = ""


class Drawer:
    """Draws requests for a model of ``vocab_size`` tokens of which those from ``first_token`` on
    are text, and a pool of ``pool_tokens`` within a larger ``context_tokens``."""

    def __init__(
        self, seed: int, *, vocab_size: int, first_token: int, pool_tokens: int, context_tokens: int
    ) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._first_token = first_token
        self._pool_tokens = pool_tokens
        self._context_tokens = context_tokens
        self._prefixes = [self._tokens(self._random.randint(32, 400)) for _ in range(_NUM_PREFIXES)]

    def draw(self, count: int) -> list[Expected]:
        """``count`` requests with the ids r0, r1, …"""
        drawn: list[Expected] = []
        for number in range(count):
            request_id = f"r{number}"
            if number % _TWIN_EVERY == _TWIN_EVERY - 1:
                drawn.append(self._twin(request_id, drawn))
            elif self._random.random() < _SHARE_BAD:
                drawn.append(self._bad(request_id))
            else:
                drawn.append(Expected(self._good(request_id)))
        return drawn

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._first_token, self._vocab_size) for _ in range(count)]

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _good(self, request_id: str) -> dict[str, Any]:
        total = self._log_uniform(2, LONGEST_TOKENS)
        max_tokens = self._log_uniform(1, total - 1)
        fields = {
            "id": request_id,
            "prompt_token_ids": self._prompt(total - max_tokens),
            "max_tokens": max_tokens,
            "seed": self._random.randrange(2**40),
            "priority": self._random.choice((0, 0, 0, 1, 2, -1)),
            **self._sampling(max_tokens),
        }
        if self._chance(_SHARE_CANCELLED):
            fields["cancel_after_tokens"] = self._random.choice(
                (0, 1, self._random.randint(0, max_tokens))
            )
        return fields

    def _prompt(self, count: int) -> list[int]:
        if not self._chance(_SHARE_SHARING):
            return self._tokens(count)
        shared = self._random.choice(self._prefixes)[:count]
        return shared + self._tokens(count - len(shared))

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        pick, chance = self._random, self._chance
        fields: dict[str, Any] = {"temperature": pick.choice((0, 0, 0.3, 0.7, 1, 1, 1.5))}
        options: list[tuple[float, dict[str, Any]]] = [
            (0.3, {"top_k": pick.choice((1, 2, 20, 500))}),
            (0.3, {"top_p": pick.choice((0.1, 0.9, 0.99))}),
            (0.2, {"min_p": pick.choice((0.01, 0.2))}),
            (0.1, {"typical_p": pick.choice((0.5, 0.95))}),
            (0.2, {"repetition_penalty": pick.choice((0.8, 1.1, 1.5))}),
            (0.2, {"presence_penalty": pick.uniform(-2, 2)}),
            (0.2, {"frequency_penalty": pick.uniform(-2, 2)}),
            (0.1, {"logit_bias": {str(t): pick.uniform(-100, 10) for t in self._tokens(3)}}),
            (0.1, {"bad_words": [chr(pick.randrange(0x61, 0x7B)) + "a", "zz"]}),
            (0.1, {"min_tokens": pick.randint(0, max_tokens)}),
            (0.3, {"ignore_eos": True}),
            (0.2, {"stop": [chr(pick.randrange(0x41, 0x5B)) * 2]}),
            (0.1, {"stop_token_ids": self._tokens(5)}),
            (0.2, {"logprobs": pick.choice((0, 3, 20))}),
            (0.03, {"prompt_logprobs": pick.choice((0, 3))}),
            (0.05, {"n": pick.randint(2, 4)}),
            (0.08, {"grammar": pick.choice(GRAMMARS)}),
            (0.1, {"cache_salt": pick.choice(("one", "another"))}),
        ]
        for probability, option in options:
            if chance(probability):
                fields |= option
        return fields

    def _twin(self, request_id: str, drawn: list[Expected]) -> Expected:
        """An earlier request again, which has other company now."""
        earlier = [
            one
            for one in drawn[-4 * _TWIN_EVERY :]
            if not one.error_code and not one.twin and "cancel_after_tokens" not in one.fields
        ]
        if not earlier:
            return Expected(self._good(request_id))
        original = self._random.choice(earlier)
        return Expected(original.fields | {"id": request_id}, twin=original.fields["id"])

    def _bad(self, request_id: str) -> Expected:
        good = self._good(request_id) | {"n": 1}
        good.pop("cancel_after_tokens", None)
        good.pop("grammar", None)
        too_long = (self._pool_tokens + self._context_tokens) // 2
        kinds: list[tuple[dict[str, Any], str]] = [
            ({"prompt_token_ids": [self._first_token, self._vocab_size]}, "invalid_parameter"),
            ({"prompt_token_ids": [-1]}, "invalid_parameter"),
            ({"prompt_token_ids": []}, "invalid_parameter"),
            ({"temperature": 7}, "invalid_input"),
            ({"no_such_field": 1}, "invalid_input"),
            ({"max_tokens": too_long, "min_tokens": 0}, "kv_capacity_exceeded"),
            (
                {"max_tokens": self._context_tokens, "min_tokens": 0},
                "context_length_exceeded",
            ),
            ({"grammar": {"kind": "regex", "text": "(unclosed"}}, "grammar_invalid"),
            ({"grammar": {"kind": "json_schema", "text": "{"}}, "grammar_invalid"),
        ]
        changes, code = self._random.choice(kinds)
        return Expected(good | changes, error_code=code)

    def _log_uniform(self, low: int, high: int) -> int:
        return round(math.exp(self._random.uniform(math.log(low), math.log(high))))
