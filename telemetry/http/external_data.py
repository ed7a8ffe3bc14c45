"""Rows that clients send along with a question: ClickHouse's external data.

A body of ``multipart/form-data`` has a part for each table, with a file name, and arguments as
parts without one. ``NAME_structure`` or ``NAME_types``, and ``NAME_format``, are arguments as well.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, MutableMapping

from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive, Scope

from millrace.telemetry.store.reading import ExternalTable, QueryError

MAX_EXTERNAL_BYTES = 16 * 1024 * 1024

_MAX_TABLES = 16
_MAX_ARGUMENTS = 256
_BAD_ARGUMENTS = 36
_TOO_LARGE = 307


def has_form(scope: Scope) -> bool:
    """Whether the body is a form of several parts."""
    kind = Headers(scope=scope).get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "multipart/form-data"


async def read_form(
    scope: Scope, receive: Receive, arguments: MutableMapping[str, str]
) -> tuple[ExternalTable, ...]:
    """Read a body for which ``has_form``: return its tables, put its other parts to ``arguments``,
    and take what describes the tables out of them. Raises QueryError."""
    parser = MultiPartParser(
        Headers(scope=scope),
        _bounded(receive),
        max_files=_MAX_TABLES,
        max_fields=_MAX_ARGUMENTS,
        max_part_size=MAX_EXTERNAL_BYTES,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError, KeyError, UnicodeDecodeError) as error:
        raise QueryError.refusing(
            _BAD_ARGUMENTS, f"Cannot read the form of several parts: {error}. (BAD_ARGUMENTS)"
        ) from error
    uploads = {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                uploads[name] = await value.read()
            else:
                arguments[name] = value
    finally:
        await form.close()
    return tuple(
        ExternalTable(
            name=name,
            data=data,
            structure=arguments.pop(f"{name}_structure", ""),
            types=arguments.pop(f"{name}_types", ""),
            input_format=arguments.pop(f"{name}_format", "TabSeparated"),
        )
        for name, data in uploads.items()
    )


async def _bounded(receive: Receive) -> AsyncGenerator[bytes]:
    size_bytes = 0
    while True:
        message = await receive()
        chunk = message.get("body", b"")
        size_bytes += len(chunk)
        if size_bytes > MAX_EXTERNAL_BYTES:
            raise QueryError.refusing(
                _TOO_LARGE,
                f"The question and its external tables have more than {MAX_EXTERNAL_BYTES} bytes. "
                "Send fewer rows, or join them on your side. (TOO_MANY_BYTES)",
            )
        yield chunk
        if not message.get("more_body", False):
            return
