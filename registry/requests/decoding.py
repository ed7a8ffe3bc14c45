"""Decoder of request bodies: the typed body, or an error that names the invalid field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from millrace.runtime.json.faults import check_outline, json_fault
from millrace.runtime.json.tolerant import without_mark
from millrace.schemas.chat.messages import MESSAGE_OF_ROLE
from millrace.schemas.errors import InvalidJsonError, ParameterError

_T = TypeVar("_T")

_METADATA = "metadata"


class _Metadata(msgspec.Struct):
    metadata: Any = None


# Entries of an object have no name of their own there.
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])*`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]+)`")
_INVALID_VALUE = re.compile(r"Invalid (?:enum )?value '(.*)' - at ", re.DOTALL)
_ROLE = re.compile(r"(?:^|\.)role$")
# Types of a text part in the other APIs: in chats and Messages, and in Responses.
_OTHER_TEXT = {"text": "input_text", "input_text": "text", "output_text": "text"}
_CONTENT_TYPE = re.compile(r"(?:^|\.)(?:content|output)\[\d+\]\.type$")


def decode(decoder: msgspec.json.Decoder[_T], body: bytes | str) -> _T:
    """Return the typed body, without a leading byte order mark.

    Raises:
        InvalidJsonError: the body is not valid JSON.
        ParameterError: a field is invalid; names it.
    """
    body = without_mark(body)
    check_outline(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _parameter_error(str(error), body) from error
    except RecursionError as error:
        raise InvalidJsonError("The JSON is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidJsonError(f"The body is not valid JSON: {json_fault(body, error)}.") from error


def _parameter_error(text: str, body: bytes | str) -> ParameterError:
    """Build the error with the field from the decoder's message, and the entry of metadata from the
    body.
    """
    path = _PATH.search(text)
    field = _FIELD.search(text)
    where = path.group(1) if path else ""
    param = ".".join(part for part in (where, field.group(1) if field else "") if part)
    if text.startswith("Object contains unknown field"):
        return ParameterError(param, f"{param} is not a field of this request; remove it.")
    if text.startswith("Object missing required field"):
        return ParameterError(param, f"{param} is required.")
    given = _INVALID_VALUE.match(text)
    if given and _ROLE.search(param):
        return ParameterError(param, f"{param} must be one of {', '.join(MESSAGE_OF_ROLE)}.")
    if given and _CONTENT_TYPE.search(param):
        other = _OTHER_TEXT.get(given.group(1))
        if other:
            return ParameterError(
                param, f"{param} must be {other!r} for text here, not {given.group(1)!r}."
            )
        return ParameterError(
            param, f"{param}: this model takes text only, not {given.group(1)!r:.100}."
        )
    sentence = _PATH.sub("", text)
    if param == _METADATA:
        param = _entry_of_metadata(body)
    return ParameterError(param, f"{param}: {sentence}" if param else sentence)


def _entry_of_metadata(body: bytes | str) -> str:
    """Return the path of the first entry that is not text; the field itself if it is not an
    object.
    """
    try:
        given = msgspec.json.decode(body, type=_Metadata).metadata
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _METADATA  # the text after it is not JSON
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(value, str):
                return f"{_METADATA}.{name:.100}"
    return _METADATA
