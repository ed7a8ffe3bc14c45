"""ClickHouse's HTTP interface over the embedded store, as a user with ``readonly = 2`` sees it.

``GET /ping``; ``GET`` or ``POST`` on ``/`` with SQL in ``query``, in the body, or the first half in
one and the rest in the other. Output passes through unchanged. All but ``/ping`` needs a password
(see ``access``).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from millrace.runtime.http.content_coding import (
    ACCEPTED,
    BadCodingError,
    ContentCodingError,
    RatioError,
    with_decoded_body,
)
from millrace.runtime.http.protocol import ManagedServer
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError, shown
from millrace.telemetry.http.access import AccessCheck, AccessRefusal
from millrace.telemetry.http.answer_body import AnswerBody, content_type, held, spelled
from millrace.telemetry.http.arguments import TIMEZONE, Arguments, given_in, read_arguments
from millrace.telemetry.http.bodies import SOCKET_TIMEOUT, Bodies, has_form, read_form
from millrace.telemetry.http.codings import decompressed
from millrace.telemetry.http.protocol import Protocol
from millrace.telemetry.http.sql_sessions import Change, SqlSession, SqlSessions, change_of
from millrace.telemetry.store.reading import (
    TOO_MANY_QUERIES,
    UNKNOWN_ERROR,
    ExternalTable,
    QueryError,
    Question,
    StreamingReader,
    User,
)
from millrace.telemetry.store.sql_guard import require_reading
from millrace.telemetry.store.view_statements import changes_views

if TYPE_CHECKING:
    from millrace.telemetry.store.analyst_views import AnalystViews

logger = logging.getLogger(__name__)

_MAX_SQL_BYTES = 256 * 1024  # ClickHouse's own `max_query_size`: looking at one takes 0.7 s
_TOO_BIG = 62
_TIMEOUT_EXCEEDED = 159
# Codes that ClickHouse answers with 404: an unknown table, database, column, function, type,
# setting, format.
_UNKNOWN = frozenset({16, 46, 47, 50, 60, 73, 81, 115})
_NOT_IMPLEMENTED = 48
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_METHODS = "GET, HEAD, POST, OPTIONS"
# Answers have ClickHouse's time format unless a client asks for another.
_DEFAULT_SETTINGS = {"date_time_output_format": "simple", TIMEZONE: "UTC"}
# Progress is unknown when the answer begins.
_NO_PROGRESS = (
    '{"read_rows":"0","read_bytes":"0","written_rows":"0","written_bytes":"0",'
    '"total_rows_to_read":"0","result_rows":"0","result_bytes":"0","elapsed_ns":"0"}'
)


class HttpInterface:
    """ASGI application of the interface."""

    def __init__(
        self,
        reader: StreamingReader,
        config: ClickHouseConfig,
        views: AnalystViews | None = None,
    ) -> None:
        """Create the interface.

        Without ``views``, statements that change views are refused. Raises ConfigError if no
        password is set.
        """
        self._reader = reader
        self._views = views
        self._access = AccessCheck(config)
        self._sessions = SqlSessions()
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        refusal = self._access.refusal_of_origin(scope)
        if refusal is not None:
            await _refuse(send, refusal)
        elif path in {"/ping", "/replicas_status"}:
            if method in {"GET", "HEAD"}:
                await _answer(send, 200, b"Ok.\n")
            else:
                await _answer(send, 405, b"Use GET or HEAD.\n", {"Allow": "GET, HEAD"})
        elif path not in {"/", "/query"}:
            await _answer(send, 404, b"There is no handle for this path. Use /ping or /?query=\n")
        elif method == "OPTIONS":
            await _answer(send, 204, b"", {"Allow": _METHODS})
        elif method not in {"GET", "HEAD", "POST"}:
            await _answer(send, 405, f"Use {_METHODS}.\n".encode(), {"Allow": _METHODS})
        elif path == "/" and method != "POST" and not scope["query_string"]:
            await _answer(send, 200, b"Ok.\n")
        else:
            await self._query(scope, receive, send)

    async def _query(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = given_in(scope["query_string"])
        user = self._access.user_of(scope, given)
        if isinstance(user, AccessRefusal):
            await _refuse(send, user)
            return
        headers = {"X-ClickHouse-Server-Display-Name": "millrace"}
        try:
            with self._bodies.request(f"{user} at {_client(scope)}") as body:
                decoded = body.bounded(with_decoded_body(scope, receive))
                external: tuple[ExternalTable, ...] = ()
                if has_form(scope):
                    # Parts of the form are arguments as well.
                    external, decoded = await read_form(scope, decoded, given), _no_body
                arguments = read_arguments(scope, given)
                headers["X-ClickHouse-Query-Id"] = shown(arguments.query_id)
                sql = _sql(arguments, await _read_body(decoded))
                session = self._sessions.session(user, arguments)
                question = _question(sql, user, arguments, session, scope, external)
                headers["X-ClickHouse-Timezone"] = shown(question.settings[TIMEZONE])
                if self._views is not None and changes_views(sql):
                    work = self._change_views(send, self._views, question, headers)
                elif (change := change_of(sql)) is not None:
                    work = self._change(send, question, session, change, headers)
                else:
                    work = self._stream(send, question, arguments, headers)
                await _while_connected(receive, work)
        except ClientDisconnect:
            return
        except (ContentCodingError, BadCodingError, RatioError) as error:
            more = {"Accept-Encoding": ACCEPTED} if error.http_status == 415 else {}
            await _answer(send, error.http_status, f"{error.message}\n".encode(), more)
        except QueryError as error:
            headers["X-ClickHouse-Exception-Code"] = str(error.number)
            await _answer(send, _status(error.number), f"{error.message}\n".encode(), headers)

    async def _stream(
        self, send: Send, question: Question, arguments: Arguments, headers: Mapping[str, str]
    ) -> None:
        """Send the answer as it comes. An error after its beginning is written at its end, and the
        connection closes before the answer is complete."""
        question = msgspec.structs.replace(question, sql=require_reading(question.sql).text)
        async with self._reader.stream(question) as answer:
            output_format = spelled(answer.output_format)
            body = AnswerBody(arguments, output_format)
            chunks = await held(aiter(answer)) if arguments.waits else aiter(answer)
            first = await body.piece(await anext(chunks, b""))
            more = {
                **headers,
                "X-ClickHouse-Format": output_format,
                "X-ClickHouse-Exception-Tag": body.tag,
                "X-ClickHouse-Summary": _NO_PROGRESS,
                "Content-Type": content_type(output_format, is_array=arguments.is_array),
            }
            if body.content_encoding:
                more["Content-Encoding"] = body.content_encoding
            await _start(send, 200, more)
            await _send_part(send, first)
            try:
                async for chunk in chunks:
                    await _send_part(send, await body.piece(chunk))
            except QueryError as error:
                await _send_part(send, body.failed(error.message))
                return
            await send({"type": "http.response.body", "body": body.end()})

    async def _change(
        self,
        send: Send,
        question: Question,
        session: SqlSession,
        change: Change,
        headers: Mapping[str, str],
    ) -> None:
        """Answer SET or USE, which change the initial state of a session's later statements. The
        engine decides whether it accepts the settings."""
        asked = msgspec.structs.replace(
            question,
            sql="SELECT 1",
            settings={**question.settings, **change.settings},
            database=change.database or question.database,
        )
        async with self._reader.stream(asked) as answer:
            async for _ in answer:
                pass
        session.apply(change)
        await _answer(send, 200, b"", headers)

    async def _change_views(
        self, send: Send, views: AnalystViews, question: Question, headers: Mapping[str, str]
    ) -> None:
        """Answer a statement that makes, renames or drops views."""
        await views.run(question.sql, question.database)
        await _answer(send, 200, b"", {**headers, "X-ClickHouse-Summary": _NO_PROGRESS})


class HttpServer:
    """Server of the interface, until it is stopped."""

    def __init__(
        self,
        reader: StreamingReader,
        config: ClickHouseConfig,
        views: AnalystViews | None = None,
    ) -> None:
        interface = HttpInterface(reader, config, views)
        self._socket = _listen(config.serve_host, config.serve_port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._server = ManagedServer(
            uvicorn.Config(
                interface,
                http=Protocol,
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


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _read_body(receive: Receive) -> bytes:
    parts = []
    size_bytes = 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > _MAX_SQL_BYTES:
            raise QueryError.refusing(_TOO_BIG, f"the query exceeds {_MAX_SQL_BYTES} bytes")
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def _sql(arguments: Arguments, body: bytes) -> str:
    """Return the statement: in the address, in the body, or the first half in one and the rest in
    the other."""
    if arguments.is_compressed:
        body = decompressed(body, _MAX_SQL_BYTES)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        why = "Syntax error: the query is not UTF-8"
        raise QueryError.refusing(_TOO_BIG, why) from error
    return "\n".join(part for part in (arguments.query, text) if part)


def _question(
    sql: str,
    user: User,
    arguments: Arguments,
    session: SqlSession,
    scope: Scope,
    external: tuple[ExternalTable, ...],
) -> Question:
    narrowed: User = "analyst" if arguments.is_analyst or session.is_analyst else user
    return Question(
        sql=sql,
        parameters={**session.parameters, **arguments.parameters},
        output_format=arguments.output_format,
        database=arguments.database or session.database or None,
        settings={**_DEFAULT_SETTINGS, **session.settings, **arguments.settings},
        query_id=arguments.query_id,
        user=narrowed,
        owner=user,
        client=_client(scope),
        external=external,
    )


def _client(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def _status(number: int) -> int:
    if number in _UNKNOWN:
        return 404
    if number in {_TIMEOUT_EXCEEDED, SOCKET_TIMEOUT}:
        return 408
    if number == TOO_MANY_QUERIES:
        return 503
    if number == _NOT_IMPLEMENTED:
        return 501
    return 500 if number == UNKNOWN_ERROR else 400


async def _refuse(send: Send, refusal: AccessRefusal) -> None:
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
                # Values from the client, such as its query id, may hold any character.
                (k.lower().encode(), _CONTROL.sub("?", v).encode("latin-1", "replace"))
                for k, v in headers.items()
            ],
        }
    )


async def _send_part(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work; cancel it when the client closes its connection."""
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
