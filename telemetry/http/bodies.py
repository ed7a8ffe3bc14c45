"""Bodies of requests: limits of their memory and time, and forms of several parts.

A form (``multipart/form-data``) has ClickHouse's external data, rows that clients send with a
query: a part with a file name for each table, and arguments as parts without one.
``NAME_structure`` or ``NAME_types``, and ``NAME_format``, are arguments as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from contextlib import contextmanager

from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from millrace.telemetry.store.reading import TOO_MANY_QUERIES, ExternalTable, QueryError

SOCKET_TIMEOUT = 209
_MIB = 1024 * 1024
_MAX_BYTES = 128 * _MIB
_MAX_BYTES_OF_USER = 96 * _MIB
# Each connection holds this much anyway, so short statements always have room.
_FREE_BYTES = 64 * 1024
# Seconds for a body, plus one second for each so many bytes of it.
_BODY_S = 30.0
_BYTES_PER_S = 64 * 1024


class Bodies:
    """Bodies that requests hold, from their first byte to the end of the request."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextmanager
    def request(self, user: str) -> Iterator[Body]:
        """Count the body of a request of this user until the request is over."""
        body = Body(self, user)
        try:
            yield body
        finally:
            self._held[user] -= body.held_bytes
            if not self._held[user]:
                del self._held[user]

    def take(self, user: str, num_bytes: int) -> None:
        """Count bytes. Raises QueryError if all bodies, or those of the user, hold too many."""
        of_all, of_user = self._held.total() + num_bytes, self._held[user] + num_bytes
        if of_all > _MAX_BYTES or of_user > _MAX_BYTES_OF_USER:
            raise QueryError.refusing(
                TOO_MANY_QUERIES,
                "Too many simultaneous queries: the statements and external tables of all requests "
                f"would hold {of_all // _MIB} of {_MAX_BYTES // _MIB} MiB, those of this user "
                f"{of_user // _MIB} of {_MAX_BYTES_OF_USER // _MIB} MiB. Ask again later. "
                "(TOO_MANY_SIMULTANEOUS_QUERIES)",
            )
        self._held[user] = of_user


class Body:
    """Body of one request. ``held_bytes`` count against the limits."""

    def __init__(self, bodies: Bodies, user: str) -> None:
        self._bodies = bodies
        self._user = user
        self._num_bytes = 0
        self.held_bytes = 0

    def bounded(self, receive: Receive) -> Receive:
        """Return a ``receive`` that counts the body.

        It raises QueryError for a body that is too slow or finds no room, and ClientDisconnect when
        the client leaves.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()

        async def bounded() -> Message:
            whole_s = begun_s + _BODY_S + self._num_bytes / _BYTES_PER_S
            try:
                async with asyncio.timeout_at(min(whole_s, loop.time() + _BODY_S)):
                    message = await receive()
            except TimeoutError as error:
                raise QueryError.refusing(
                    SOCKET_TIMEOUT,
                    f"Timeout exceeded while receiving data from client: {self._num_bytes} bytes "
                    f"came. A body may take {_BODY_S:g} s, and a second more for each "
                    f"{_BYTES_PER_S} bytes. (SOCKET_TIMEOUT)",
                ) from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._num_bytes += len(message.get("body", b""))
            more_bytes = max(0, self._num_bytes - _FREE_BYTES) - self.held_bytes
            if more_bytes:
                self._bodies.take(self._user, more_bytes)
                self.held_bytes += more_bytes
            return message

        return bounded


MAX_EXTERNAL_BYTES = 16 * 1024 * 1024

_MAX_TABLES = 16
_MAX_ARGUMENTS = 256
_BAD_ARGUMENTS = 36
_TOO_LARGE = 307


def has_form(scope: Scope) -> bool:
    """Return whether the body is a form of several parts."""
    kind = Headers(scope=scope).get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "multipart/form-data"


async def read_form(
    scope: Scope, receive: Receive, arguments: MutableMapping[str, str]
) -> tuple[ExternalTable, ...]:
    """Read a form and return its tables.

    Its other parts are added to ``arguments``; the descriptions of the tables are removed from
    them. Raises QueryError.
    """
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
