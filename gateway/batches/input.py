"""Lines of a batch's input file, and its validation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple

import msgspec

from millrace.registry.requests.decoding import decode
from millrace.runtime.json.tolerant import without_mark
from millrace.schemas.batches.batches import MAX_LINES, BatchError, BatchLine
from millrace.schemas.errors import MillraceError, ParameterError

_MAX_ERRORS = 100
_MAX_CUSTOM_ID_CHARACTERS = 512
_METHOD = "POST"
_decoder = msgspec.json.Decoder(BatchLine)


class InputLine(NamedTuple):
    """Line of an input file. ``number`` counts all lines of the file from 1; blank lines are left
    out.
    """

    number: int
    raw: bytes


class LineTooLongError(MillraceError, code="line_too_long", http_status=400):
    """Line longer than its endpoint accepts."""


class InputCheck(NamedTuple):
    """Result of validation: the number of requests, and the first hundred errors."""

    num_lines: int
    errors: tuple[BatchError, ...]


async def lines_of(chunks: AsyncIterator[bytes], limit_bytes: int) -> AsyncGenerator[InputLine]:
    """Yield the lines of a file. Raises LineTooLongError that names the line."""
    held = b""
    number = 0
    async for chunk in chunks:
        *whole, held = (held + chunk).split(b"\n")
        for raw in whole:
            number += 1
            _check_length(number, raw, limit_bytes)
            if (line := _without_mark(number, raw)).strip():
                yield InputLine(number, line)
        _check_length(number + 1, held, limit_bytes)
    if (line := _without_mark(number + 1, held)).strip():
        yield InputLine(number + 1, line)


async def check_input(lines: AsyncIterator[InputLine], endpoint: str) -> InputCheck:
    """Validate a whole file. Errors in a request's body are reported when it runs."""
    num_lines = 0
    errors: list[BatchError] = []
    seen: dict[str, int] = {}
    try:
        async for line in lines:
            num_lines += 1
            if num_lines > MAX_LINES:
                message = f"A batch has at most {MAX_LINES} requests; divide the file."
                errors.append(BatchError(code="too_many_lines", message=message))
                break
            if len(errors) < _MAX_ERRORS and (error := _error_of(line, endpoint, seen)):
                errors.append(error)
    except LineTooLongError as error:
        errors.append(BatchError(code=error.code, message=error.message))
    if not num_lines and not errors:
        errors.append(BatchError(code="empty_file", message="The file holds no request."))
    return InputCheck(num_lines, tuple(errors[:_MAX_ERRORS]))


def read_line(line: InputLine) -> BatchLine:
    """Decode a line of a validated file."""
    return _decoder.decode(line.raw)


def _error_of(line: InputLine, endpoint: str, seen: dict[str, int]) -> BatchError | None:
    try:
        request = decode(_decoder, line.raw)
    except MillraceError as error:
        param = (error.param or None) if isinstance(error, ParameterError) else None
        code = error.code if param else "invalid_json_line"
        return BatchError(code=code, message=error.message, line=line.number, param=param)
    if request.method != _METHOD:
        return _bad(line, "invalid_method", "method", f"method must be {_METHOD}.")
    if request.url != endpoint:
        message = f"url must be {endpoint}, which is the batch's endpoint."
        return _bad(line, "mismatched_url", "url", message)
    if not 1 <= len(request.custom_id) <= _MAX_CUSTOM_ID_CHARACTERS:
        message = f"custom_id must have 1 to {_MAX_CUSTOM_ID_CHARACTERS} characters."
        return _bad(line, "invalid_custom_id", "custom_id", message)
    first = seen.setdefault(request.custom_id, line.number)
    if first != line.number:
        message = f"custom_id is also that of line {first}; give each request its own."
        return _bad(line, "duplicate_custom_id", "custom_id", message)
    return None


def _without_mark(number: int, raw: bytes) -> bytes:
    """Remove the byte order mark that some editors put before a file in UTF-8."""
    return without_mark(raw) if number == 1 else raw


def _bad(line: InputLine, code: str, param: str, message: str) -> BatchError:
    return BatchError(code=code, message=message, line=line.number, param=param)


def _check_length(number: int, raw: bytes, limit_bytes: int) -> None:
    if len(raw) > limit_bytes:
        raise LineTooLongError(
            f"Line {number} is longer than {limit_bytes} bytes, the most that a request may be."
        )
