"""A small, read-only part of ClickHouse's HTTP interface over the embedded store.

``GET /ping``; ``GET`` or ``POST`` on ``/`` with SQL in ``query``, in the body, or the first half in
one and the rest in the other. Output goes through as the engine made it. All but ``/ping`` is for
who has the password (see ``door``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Coroutine, Mapping
from urllib.parse import parse_qsl

import uvicorn
from starlette.types import Receive, Scope, Send

from millrace.runtime.http.content_coding import (
    ACCEPTED,
    BadCodingError,
    ContentCodingError,
    RatioError,
    with_decoded_body,
)
from millrace.runtime.http.protocol import HttpProtocol
from millrace.runtime.http.server import ManagedServer
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError, shown
from millrace.telemetry.http.access import AccessCheck, Refusal, header_of
from millrace.telemetry.store.reading import (
    TOO_MANY_QUERIES,
    UNKNOWN_ERROR,
    EscapedText,
    QueryError,
    Question,
    StreamingReader,
)
from millrace.telemetry.store.sql_guard import require_reading

logger = logging.getLogger(__name__)

_MAX_SQL_BYTES = 1024 * 1024
_TOO_BIG = 62
_TIMEOUT_EXCEEDED = 159
# Codes for which ClickHouse itself answers 404: an unknown table, database, column, function, type.
_UNKNOWN = frozenset({16, 46, 47, 50, 60, 81, 115})
_PARAMETER_PREFIX = "param_"
_CONTENT_TYPES = (
    ("JSONEachRow", "application/x-ndjson"),
    ("JSON", "application/json"),
    ("CSV", "text/csv"),
    (("TabSeparated", "TSV"), "text/tab-separated-values"),
    ("Pretty", "text/plain"),
)
# What ClickHouse's clients send along and what changes nothing here: sessions, identification,
# compression of a transport that is the loopback, and modes that are ours anyway.
_ACCEPTED = frozenset(
    {
        "add_http_cors_header",
        "buffer_size",
        "cancel_http_readonly_queries_on_client_close",
        "client_protocol_version",
        "compress",
        "database",
        "date_time_input_format",
        "decompress",
        "default_format",
        "enable_http_compression",
        "http_headers_progress_interval_ms",
        "password",
        "query",
        "query_id",
        "readonly",
        "send_progress_in_http_headers",
        "session_check",
        "session_id",
        "session_timeout",
        "user",
        "wait_end_of_query",
    }
)


class HttpInterface:
    """A bare ASGI application."""

    def __init__(self, reader: StreamingReader, config: ClickHouseConfig) -> None:
        """Raises ConfigError where there is no password to ask for."""
        self._reader = reader
        self._access = AccessCheck(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        refusal = self._access.refusal_of_origin(scope)
        if refusal is not None:
            await _refuse(send, refusal)
        elif path == "/ping":
            if method in {"GET", "HEAD"}:
                await _answer(send, 200, b"Ok.\n")
            else:
                await _answer(send, 405, b"Use GET or HEAD.\n", {"Allow": "GET, HEAD"})
        elif path not in {"/", "/query"}:
            await _answer(send, 404, b"There is no handle for this path. Use /ping or /?query=\n")
        elif method not in {"GET", "POST"}:
            await _answer(send, 405, b"Use GET or POST.\n", {"Allow": "GET, POST"})
        else:
            await self._query(scope, receive, send)

    async def _query(self, scope: Scope, receive: Receive, send: Send) -> None:
        arguments = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        user = self._access.user_of(scope, arguments)
        if isinstance(user, Refusal):
            await _refuse(send, user)
            return
        query_id = shown(arguments.get("query_id") or str(uuid.uuid4()))
        headers = {
            "X-ClickHouse-Query-Id": query_id,
            "X-ClickHouse-Server-Display-Name": "millrace",
            "X-ClickHouse-Timezone": "UTC",
        }
        database = header_of(scope, b"x-clickhouse-database") or arguments.get("database")
        output_format = (
            header_of(scope, b"x-clickhouse-format")
            or arguments.get("default_format")
            or "TabSeparated"
        )
        try:
            body = await _read_body(with_decoded_body(scope, receive))
            sql = "\n".join(part for part in (arguments.get("query", ""), body) if part)
            question = Question(
                sql=require_reading(sql).text,
                parameters=_parameters(arguments),
                output_format=output_format,
                database=database or None,
                settings=_settings(arguments),
                query_id=query_id,
                user=user,
                client=scope["client"][0] if scope.get("client") else "",
            )
            await _while_connected(receive, self._stream(send, question, headers))
        except (ContentCodingError, BadCodingError, RatioError) as error:
            more = {"Accept-Encoding": ACCEPTED} if error.http_status == 415 else {}
            await _answer(send, error.http_status, f"{error.message}\n".encode(), more)
            return
        except QueryError as error:
            headers["X-ClickHouse-Exception-Code"] = str(error.number)
            await _answer(send, _status(error.number), f"{error.message}\n".encode(), headers)

    async def _stream(self, send: Send, question: Question, headers: Mapping[str, str]) -> None:
        """Send the answer as it comes. An error behind its beginning stands at its end, and the
        connection closes before the answer is complete."""
        async with self._reader.stream(question) as answer:
            more = {
                **headers,
                "X-ClickHouse-Format": answer.output_format,
                "Content-Type": _content_type(answer.output_format),
            }
            await _start(send, 200, more)
            try:
                async for chunk in answer:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except QueryError as error:
                text = f"\n{error.message}\n".encode()
                await send({"type": "http.response.body", "body": text, "more_body": True})
                return
            await send({"type": "http.response.body", "body": b""})


class HttpServer:
    """Serves the interface until it is told to stop."""

    def __init__(self, reader: StreamingReader, config: ClickHouseConfig) -> None:
        interface = HttpInterface(reader, config)
        self._socket = _listen(config.serve_host, config.serve_port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._server = ManagedServer(
            uvicorn.Config(
                interface,
                http=HttpProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )

    async def run(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        self._server.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on clickhouse.serve_host:serve_port {host}:{port}: {error.strerror}"
        ) from error
    return listener


async def _read_body(receive: Receive) -> str:
    parts = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > _MAX_SQL_BYTES:
            raise QueryError.refusing(_TOO_BIG, f"the query exceeds {_MAX_SQL_BYTES} bytes")
        if not message.get("more_body", False):
            break
    try:
        return b"".join(parts).decode()
    except UnicodeDecodeError as error:
        why = "Syntax error: the query is not UTF-8"
        raise QueryError.refusing(_TOO_BIG, why) from error


def _parameters(arguments: Mapping[str, str]) -> dict[str, str | int | float]:
    return {
        name.removeprefix(_PARAMETER_PREFIX): EscapedText(value)
        for name, value in arguments.items()
        if name.startswith(_PARAMETER_PREFIX)
    }


def _settings(arguments: Mapping[str, str]) -> dict[str, str]:
    """All other arguments are settings of the statement."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in _ACCEPTED and not name.startswith(_PARAMETER_PREFIX)
    }


def _status(number: int) -> int:
    if number in _UNKNOWN:
        return 404
    if number == _TIMEOUT_EXCEEDED:
        return 408
    if number == TOO_MANY_QUERIES:
        return 503
    return 500 if number == UNKNOWN_ERROR else 400


def _content_type(output_format: str) -> str:
    for prefix, kind in _CONTENT_TYPES:
        if output_format.startswith(prefix):
            return f"{kind}; charset=UTF-8"
    return "application/octet-stream"


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = {"X-ClickHouse-Exception-Code": str(refusal.number)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="Millrace", charset="UTF-8"'
    await _answer(send, refusal.status, f"{refusal.message}\n".encode(), headers)


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    content_type: str = "text/plain; charset=UTF-8",
) -> None:
    lines = {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}
    await _start(send, status, lines)
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (k.lower().encode(), v.encode("latin-1", "replace")) for k, v in headers.items()
            ],
        }
    )


async def _while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work, and end it when the client closes its connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
