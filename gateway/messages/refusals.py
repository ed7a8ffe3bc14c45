"""Refusals as clients of Anthropic's API read them."""

from __future__ import annotations

import msgspec

from millrace.gateway.errors import Refusal
from millrace.gateway.tenancy.identity import AuthenticationError
from millrace.schemas.anthropic.answers import MessagesError, MessagesErrorInfo
from millrace.schemas.context_length import in_anthropic_words
from millrace.schemas.errors import ContextLengthError

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesRefusal(Refusal, frozen=True, kw_only=True):
    """A refusal whose body has Anthropic's shape."""

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(error_of(self))


def error_of(refusal: Refusal) -> MessagesError:
    """What is told of a refusal, in a body or an event."""
    kind = "invalid_request_error" if refusal.status < 500 else "api_error"
    info = MessagesErrorInfo(
        type=_TYPES.get(refusal.status, kind),
        message=_message(refusal),
        code=refusal.code,
        param=refusal.param,
    )
    return MessagesError(error=info)


def _message(refusal: Refusal) -> str:
    """The sentence, in Anthropic's words where clients look for them."""
    if refusal.code == AuthenticationError.code:
        return f"invalid x-api-key: {refusal.message}"
    if refusal.code == ContextLengthError.code:
        return in_anthropic_words(refusal.message)
    return refusal.message


def in_messages_shape(refusal: Refusal) -> Refusal:
    """The same refusal, told in Anthropic's shape."""
    return MessagesRefusal(**msgspec.structs.asdict(refusal))
