"""Parsers of server messages: OpenAI's chunks, their errors, and messages of millrace.v1."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.bench.clients.exchange import ClientExchange

_DONE = b"[DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Message(msgspec.Struct):
    type: str
    id: str | None = None
    num_tokens: int = 0
    usage: _Usage | None = None
    code: str = ""


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_message = msgspec.json.Decoder(_Message).decode


def read_event(exchange: ClientExchange, data: bytes, now_s: float) -> None:
    """Process the data of one server-sent event."""
    if data == _DONE:
        exchange.finished = True
        exchange.end_s = now_s
        return
    try:
        chunk = _decode_chunk(data)
    except msgspec.DecodeError:
        exchange.fail("malformed_event")
        return
    for choice in chunk.choices:
        delta = choice.delta
        if choice.text or (
            delta is not None
            and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        ):
            exchange.part(now_s)
        if choice.finish_reason is not None:
            exchange.finished = True
    if chunk.usage is not None:
        _count(exchange, chunk.usage)
    if chunk.error is not None:
        exchange.fail(error_code(chunk.error))


def read_message(exchange: ClientExchange, data: bytes, now_s: float) -> bool:
    """Process a message of millrace.v1; return True if it is the last of its generation."""
    try:
        message = _decode_message(data)
    except msgspec.DecodeError:
        exchange.fail("malformed_message")
        return True
    if message.type == "delta":
        if message.num_tokens:
            exchange.part(now_s)
            exchange.part_tokens.append(message.num_tokens)
        return False
    if message.type == "done":
        exchange.finished = True
        if message.usage is not None:
            _count(exchange, message.usage)
        return True
    if message.type == "error":
        exchange.fail(message.code or "error")
        return True
    return False


def error_code(error: object) -> str:
    """Return the code of an ``error`` object in OpenAI's or a similar format; its type if it has
    none."""
    if isinstance(error, dict):
        for key in ("code", "type"):
            if error.get(key):
                return str(error[key])[:80]
    return "error"


def read_refusal(exchange: ClientExchange) -> None:
    """Process the body of an HTTP status that is not 200."""
    try:
        body = msgspec.json.decode(exchange.body)
    except msgspec.DecodeError:
        body = None
    named = error_code(body["error"]) if isinstance(body, dict) and "error" in body else "error"
    exchange.fail(f"{exchange.status} {named}" if named != "error" else f"{exchange.status}")


def read_whole_usage(exchange: ClientExchange) -> None:
    """Process the usage of an answer that was not streamed."""
    try:
        answer = _decode_chunk(exchange.body)
    except msgspec.DecodeError:
        exchange.fail("malformed_body")
        return
    if answer.usage is not None:
        _count(exchange, answer.usage)


def _count(exchange: ClientExchange, usage: _Usage) -> None:
    details = usage.prompt_tokens_details
    exchange.has_usage = True
    exchange.prompt_tokens = usage.prompt_tokens
    exchange.output_tokens = usage.completion_tokens
    exchange.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
