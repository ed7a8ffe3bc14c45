"""Jobs as services publish them: job fields beside a request body, or a nested Job.

The scheduler reads the body later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec

from millrace.bus import codec
from millrace.runtime.json.tolerant import tolerated
from millrace.schemas.errors import MalformedMessageError, ParameterError, shown
from millrace.schemas.jobs import Job
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest
from millrace.schemas.published_jobs import REQUEST_ID, JobFields

_T = TypeVar("_T")
_Parts = Mapping[str, msgspec.Raw]

_PARTS: codec.Codec[dict[str, msgspec.Raw]] = codec.Codec(dict[str, msgspec.Raw])
_ANY: codec.Codec[Any] = codec.Codec(object)
_TEXT: codec.Codec[str] = codec.Codec(str)
_FIELDS: codec.Codec[JobFields] = codec.Codec(JobFields)

# Fields of ``Job`` that services must not set.
_OWN_FIELDS = ("body", "answer", "asked", "part", "batch_id")
_NESTED_FIELDS = ("sampling", "prompt_token_ids", "pooling", "text_pair")
# Hints: the form that a chat body uses in place of the nested form.
_HOW_ELSEWHERE = "write what is in sampling beside messages, or leave the field out"
_HOW_IN_CHAT = {
    "tools": 'write a tool as {"type": "function", "function": {"name": ...}}',
    "tool_calls": 'write a call as {"id": ..., "type": "function", "function": {"name": ...}}',
    "prediction": 'write it as {"type": "content", "content": ...}',
}
_DEADLINE, _DEADLINE_NS = "deadline", "deadline_ns"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_NS = 2**63 - 1
_MICROSECOND = timedelta(microseconds=1)


def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


_JOB_FIELDS = _names(JobFields)
_NESTED_FORM = _names(Job) - set(_OWN_FIELDS)
_CHAT_FIELDS = _names(ChatCompletionRequest)
_COMPLETION_FIELDS = _names(CompletionRequest)


class _Head(msgspec.Struct, frozen=True):
    """Head of a tool or call. The place of its name tells the form."""

    name: msgspec.Raw = msgspec.Raw(b"")
    type: msgspec.Raw = msgspec.Raw(b"")
    function: msgspec.Raw = msgspec.Raw(b"")

    @property
    def is_nested(self) -> bool:
        return bool(bytes(self.name)) and not bytes(self.type) and not bytes(self.function)


class _Turn(msgspec.Struct, frozen=True):
    tool_calls: list[_Head] | None = None


_HEADS: codec.Codec[list[_Head]] = codec.Codec(list[_Head])
_TURNS: codec.Codec[list[_Turn]] = codec.Codec(list[_Turn])


def read_published(payload: bytes, content_type: str | None) -> Job:
    """Decode a published job.

    Null counts as unset, and an integral float as an integer where one is expected. Raises
    MalformedMessageError, which names the field.
    """
    given = _parts(payload, content_type)
    for name in _OWN_FIELDS:
        if name in given:
            raise MalformedMessageError(f"{name} is not a field of a job; leave it out", name)
    _check_request_id(given, content_type)
    given = _with_deadline(given, content_type)
    sign = _nested_sign(given, content_type)
    if sign is None:
        return _with_body(given, content_type)
    if sign:
        beyond = (given.keys() - _NESTED_FORM) & (_CHAT_FIELDS | _COMPLETION_FIELDS)
        for name in sorted(beyond):
            how = _HOW_IN_CHAT.get(sign, _HOW_ELSEWHERE)
            raise MalformedMessageError(
                f"{name} does not go with {sign} in the nested form of a job: {how}", name
            )
    return _tolerantly(codec.JOB, _encoded(given, content_type), content_type)


def encode_job(job: Job) -> bytes:
    """Encode a job in MessagePack as it is published.

    The fields of a body, which must be MessagePack, are beside the job's own.
    """
    if not job.body:
        return codec.encode(job)
    bare = msgspec.structs.replace(job, body=b"", prompt_token_ids=())
    own = _PARTS.decode(codec.encode(bare))
    del own["prompt_token_ids"]
    return codec.encode(_PARTS.decode(job.body) | own)


def _parts(payload: bytes, content_type: str | None) -> dict[str, msgspec.Raw]:
    """Return the raw fields of a message without null fields."""
    null = b"null" if codec.is_json(content_type) else b"\xc0"
    parts = _PARTS.decode(payload, content_type)
    return {name: raw for name, raw in parts.items() if bytes(raw) != null}


def _with_body(given: _Parts, content_type: str | None) -> Job:
    """Make a job whose body is read later. Only its model is known here."""
    kind, known = "messages", _CHAT_FIELDS
    if "messages" not in given:
        kind, known = "prompt", _COMPLETION_FIELDS
        if "prompt" not in given:
            raise MalformedMessageError("give messages or prompt", "messages")
    for name in given:
        if name not in known and name not in _JOB_FIELDS:
            message = f"`{shown(name)}` is not a field of a job with {kind}; leave it out"
            raise MalformedMessageError(message, name)
    if "model" not in given:
        raise MalformedMessageError("model is missing: name the model of the subject", "model")
    own = {name: raw for name, raw in given.items() if name in _JOB_FIELDS}
    fields = _tolerantly(_FIELDS, _encoded(own, content_type), content_type)
    # Sorted, since another process may publish the same job again.
    body = {name: given[name] for name in sorted(given) if name not in _JOB_FIELDS}
    try:
        return Job(
            **{
                name: getattr(fields, name)
                for name in JobFields.__struct_fields__
                if name != _DEADLINE
            },
            model=_model(given["model"], content_type),
            body=_encoded(body, content_type),
        )
    except ValueError as error:
        # The message begins with the field.
        name = str(error).partition(" ")[0]
        raise MalformedMessageError(str(error), name if name in _JOB_FIELDS else "") from error


def _model(raw: msgspec.Raw, content_type: str | None) -> str:
    if not _is_text(raw, content_type):
        raise MalformedMessageError("model must be a string", "model")
    return _TEXT.decode(bytes(raw), content_type)


def _nested_sign(given: _Parts, content_type: str | None) -> str | None:
    """Return the field that only the nested form of a job has.

    Empty if nothing tells the two forms apart, as both then mean the same. None for a job with a
    body.
    """
    for name in _NESTED_FIELDS:
        if name in given:
            return name
    if "messages" not in given:
        is_either = "prompt" in given and not _is_list(given["prompt"], content_type)
        return "" if is_either and given.keys() <= _NESTED_FORM else None
    if "prediction" in given and not _is_object(given["prediction"], content_type):
        return "prediction"
    if "tools" in given and _are_nested(_heads(given["tools"], content_type)):
        return "tools"
    return "tool_calls" if _are_nested(_called(given["messages"], content_type)) else None


def _heads(raw: msgspec.Raw, content_type: str | None) -> list[_Head]:
    try:
        return _HEADS.decode(bytes(raw), content_type)
    except MalformedMessageError:
        return []  # the reader of the body refuses it with a reason


def _called(raw: msgspec.Raw, content_type: str | None) -> list[_Head]:
    try:
        turns = _TURNS.decode(bytes(raw), content_type)
    except MalformedMessageError:
        return []
    return [head for turn in turns for head in turn.tool_calls or ()]


def _are_nested(heads: Iterable[_Head]) -> bool:
    return any(head.is_nested for head in heads)


def _is_text(raw: msgspec.Raw, content_type: str | None) -> bool:
    first = bytes(raw)[0]
    if codec.is_json(content_type):
        return first == ord('"')
    return 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB


def _is_list(raw: msgspec.Raw, content_type: str | None) -> bool:
    first = bytes(raw)[0]
    if codec.is_json(content_type):
        return first == ord("[")
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _is_object(raw: msgspec.Raw, content_type: str | None) -> bool:
    first = bytes(raw)[0]
    if codec.is_json(content_type):
        return first == ord("{")
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _check_request_id(given: _Parts, content_type: str | None) -> None:
    raw = given.get("request_id")
    if raw is not None and not _is_text(raw, content_type):
        raise MalformedMessageError(REQUEST_ID, "request_id")


def _with_deadline(
    given: dict[str, msgspec.Raw], content_type: str | None
) -> dict[str, msgspec.Raw]:
    """Replace a deadline that is a text or a time by ``deadline_ns``."""
    named = [name for name in (_DEADLINE, _DEADLINE_NS) if name in given]
    if not named or (named == [_DEADLINE_NS] and not _is_text(given[_DEADLINE_NS], content_type)):
        return given
    if len(named) > 1:
        raise MalformedMessageError("give one of deadline and deadline_ns, not both", _DEADLINE)
    name = named[0]
    ns = _ns_of(_ANY.decode(bytes(given[name]), content_type), name)
    raw = msgspec.Raw(_encoded(ns, content_type))
    return {field: one for field, one in given.items() if field != name} | {_DEADLINE_NS: raw}


def _ns_of(value: object, name: str) -> int:
    """Return the UTC epoch in ns of a time, or of an ISO 8601 text."""
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        time = None
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise MalformedMessageError(
            f"{name} must be a time in ISO 8601 with an offset from UTC, such as "
            '"2026-11-28T12:00:00Z"; deadline_ns also takes nanoseconds since 1970',
            name,
        )
    ns = (time - _EPOCH) // _MICROSECOND * 1_000
    if not 0 <= ns <= _MAX_NS:
        raise MalformedMessageError(f"{name} must be a time from 1970 to 2261", name)
    return ns


def _tolerantly(kind: codec.Codec[_T], payload: bytes, content_type: str | None) -> _T:
    """Decode a message as written, else as other languages' serializers write it."""
    try:
        return kind.decode(payload, content_type)
    except MalformedMessageError:
        try:
            value = tolerated(_ANY.decode(payload, content_type), kind.kind)
        except ParameterError as error:
            raise MalformedMessageError(error.message.removesuffix("."), error.param) from error
        return kind.decode(_encoded(value, content_type), content_type)


def _encoded(value: object, content_type: str | None) -> bytes:
    return codec.encode_json(value) if codec.is_json(content_type) else codec.encode(value)
