"""Random requests of ``benchmarks.soak``, with their expected ends."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_SUM_PATTERN = re.compile(r"[0-9]{1,4}(\+[0-9]{1,4})*")
_LETTERS_PATTERN = re.compile(r"[a-z]{1,30}( [a-z]{1,30}){0,4}")
_NEVER_BIAS = -90.0


def problems(requests: Sequence[Expected], answers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each violation."""
    for request, answer in zip_longest(requests, answers):
        if request is None or answer is None:
            yield f"there are {len(requests)} requests, but {len(answers)} answers"
            return
        request_id = request.fields["id"]
        if answer["id"] != request_id:
            yield f"{request_id} was answered as {answer['id']}"
        elif request.error_code:
            code = _error_code(answer)
            if code != request.error_code:
                yield f"{request_id} ended with {code or 'no error'}, not {request.error_code}"
        else:
            for choice in completions(answer):
                yield from (f"{request_id}: {why}" for why in _wrong(request.fields, choice))
            yield from (f"{request_id}: {why}" for why in _wrong_as_a_whole(request.fields, answer))


def completions(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] | None = answer.get("choices")
    return [answer] if choices is None else choices


def twins(
    requests: Sequence[Expected], answers: Sequence[dict[str, Any]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of two equal requests in different batches."""
    by_id = {answer["id"]: answer for answer in answers}
    for request in requests:
        if request.twin and "cancel_after_tokens" not in request.fields:
            pair = (by_id[request.twin], by_id[request.fields["id"]])
            for one, other in zip(*map(completions, pair), strict=True):
                yield one["token_ids"], other["token_ids"]


def _error_code(answer: dict[str, Any]) -> str:
    errors = [one["error"]["code"] for one in completions(answer) if "error" in one]
    return str(errors[0]) if errors else ""


def _wrong(fields: dict[str, Any], choice: dict[str, Any]) -> Iterator[str]:
    if "error" in choice:
        yield f"it failed: {choice['error']}"
        return
    token_ids, text, finish = choice["token_ids"], choice["text"], choice["finish_reason"]
    if choice["completion_tokens"] != len(token_ids):
        yield "completion_tokens is not the number of tokens"
    if (finish is None) != bool(choice.get("cancelled")):
        yield f"finish_reason is {finish}, cancelled is {choice.get('cancelled')}"
    if len(token_ids) > fields["max_tokens"]:
        yield f"{len(token_ids)} tokens are more than max_tokens"
    if finish == "length" and len(token_ids) != fields["max_tokens"]:
        yield f"it ended for its length with {len(token_ids)} tokens"
    stop_strings, grammar = bool(fields.get("stop")), fields.get("grammar")
    # A text that is complete by its grammar ends, regardless of other options.
    bound = 0 if stop_strings or grammar else fields.get("min_tokens", 0)
    if finish == "stop" and len(token_ids) < bound:
        yield "it stopped before min_tokens"
    if any(stop in text for stop in fields.get("stop", ())):
        yield "the text holds a stop string"
    if any(word in text for word in fields.get("bad_words", ())):
        yield "the text holds a bad word"
    biased = fields.get("logit_bias", {})
    if not grammar and any(biased.get(str(t), 0) < _NEVER_BIAS for t in token_ids):
        yield "a token came though its bias forbids it"
    if "logprobs" in fields and len(choice["logprobs"]) != len(token_ids):
        yield f"{len(choice['logprobs'])} logprobs for {len(token_ids)} tokens"
    whole = finish == "stop" and not stop_strings and "stop_token_ids" not in fields
    if whole and grammar and not _matches(grammar, text):
        yield f"{text!r} does not match its grammar"


def _wrong_as_a_whole(fields: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    choices = completions(answer)
    if len(choices) != fields.get("n", 1):
        yield f"{len(choices)} completions for n = {fields.get('n', 1)}"
    if answer.get("prompt_tokens") != len(fields["prompt_token_ids"]):
        yield "prompt_tokens is not the length of the prompt"
    if any(choice.get("cancelled") for choice in choices):
        if "cancel_after_tokens" not in fields:
            yield "it was cancelled without a request to cancel"
        elif answer["completion_tokens"] != fields["cancel_after_tokens"]:
            yield f"it was cancelled after {answer['completion_tokens']} tokens"
        return
    num_scored = len(answer.get("prompt_logprobs", ()))
    wanted = answer["prompt_tokens"] if "prompt_logprobs" in fields else 0
    if num_scored != wanted and not _error_code(answer):
        yield f"{num_scored} prompt_logprobs, not {wanted}"


def _matches(grammar: dict[str, str], text: str) -> bool:
    match grammar["kind"]:
        case "regex":
            return _LETTERS_PATTERN.fullmatch(text) is not None
        case "ebnf":
            return _SUM_PATTERN.fullmatch(text) is not None
        case _:
            try:
                parsed = json.loads(text)
            except ValueError:
                return False
            if grammar["kind"] == "json_schema":
                return set(parsed) == {"colour", "size"}
            return isinstance(parsed, dict)


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
    """Expected end of a request: with ``error_code``, or without an error if it is empty.

    ``twin`` is the request with the same prompt, parameters and seed, if there is one.
    """

    fields: dict[str, Any]
    error_code: str = ""
    twin: str = ""


class Drawer:
    """Generator of requests for a model and a pool.

    The model has ``vocab_size`` tokens, which are text from ``first_token`` on. The pool has
    ``pool_tokens`` within a larger ``context_tokens``.
    """

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
        """Draw ``count`` requests with the ids r0, r1, …"""
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
        """Repeat an earlier request, which runs in another batch now."""
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
