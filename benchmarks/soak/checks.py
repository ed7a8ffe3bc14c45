"""What is wrong with the answers to the requests of ``benchmarks.soak``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from benchmarks.soak.requests import Expected

_SUM = re.compile(r"[0-9]{1,4}(\+[0-9]{1,4})*")
_LETTERS = re.compile(r"[a-z]{1,30}( [a-z]{1,30}){0,4}")
_NEVER_BIAS = -90.0


def problems(requests: Sequence[Expected], answers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each thing that is not as it should be."""
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
    """The tokens of two requests that are the same but for their company."""
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
    # A text that is complete by its grammar ends, whatever else was asked for.
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
            yield "it was cancelled by nobody"
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
            return _LETTERS.fullmatch(text) is not None
        case "ebnf":
            return _SUM.fullmatch(text) is not None
        case _:
            try:
                parsed = json.loads(text)
            except ValueError:
                return False
            if grammar["kind"] == "json_schema":
                return set(parsed) == {"colour", "size"}
            return isinstance(parsed, dict)
