"""Reader of the embedded engine, with a separate read-only connection for each query."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import msgspec
from chdb import ChdbError

from millrace.telemetry.store import external_tables, own_processes
from millrace.telemetry.store.admission import QueryAdmission
from millrace.telemetry.store.answer_pipe import AnswerPipe
from millrace.telemetry.store.embedded_engine import ANALYST, connect, connect_again
from millrace.telemetry.store.query_watch import QueryWatch, RunningQuery
from millrace.telemetry.store.reading import (
    QUOTE_INTEGERS,
    Answer,
    Parameters,
    QueryError,
    Question,
    ReadLimits,
    StreamingReader,
    escaped,
    literal,
    quote,
)
from millrace.telemetry.store.sql_guard import (
    QUERY_ID_SETTING,
    Statement,
    require_plain_names,
    require_reading,
)

logger = logging.getLogger(__name__)

_UNKNOWN_FORMAT = 73
_SAME_ID, _SAME_ID_NAME = 216, "(QUERY_WITH_SAME_ID_IS_ALREADY_RUNNING)"
_CANCELLED = 394
_REPLACE = "replace_running_query"
_REPLACE_S = 5.0
_FORMAT = re.compile(r"[A-Za-z]\w*")
_SETTING = re.compile(r"[a-z]\w*", re.IGNORECASE)
_MAX_KNOWN = 256
_MAX_KNOWN_CHARS = 16_384
_ROWS = "JSONCompactEachRow"
_TAGS = msgspec.json.Decoder(tuple[str])
_RUNNING = msgspec.json.Decoder(RunningQuery, strict=False)
_NORMAL_FORM = "SELECT formatQuerySingleLine({statement:String})"
_KILL_AGAIN_S = 0.2
_GRACE_S = 2.0
# Settings that make a connection read-only.
_CLOSING = ("allow_ddl", "readonly")


class _Query:
    """Statement from its request until the engine has ended it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.tag = own_processes.new_tag(question.query_id)
        self.is_over = asyncio.Event()
        self.ended: QueryError | None = None
        self.end: Callable[[], None] | None = None
        self._wait = asyncio.timeout(None)

    async def wait_for(self, place: Awaitable[None]) -> None:
        """Wait for a place. Raises QueryError if another query replaces this one."""
        try:
            async with self._wait:
                await place
        except TimeoutError:
            if self.ended is None:
                raise
            raise self.ended from None

    def replace(self) -> None:
        """End the query, since another one takes its id."""
        if self.ended is not None:
            return
        self.ended = QueryError.refusing(
            _CANCELLED, "Query was cancelled: another replaced it. (QUERY_WAS_CANCELLED)"
        )
        if self.end is not None:
            self.end()
        else:
            self._wait.reschedule(0)


class EmbeddedReader(StreamingReader):
    """Read-only connections to the store that this process has open.

    A connection serves one statement, since a failed or abandoned statement leaves rows in it.
    Opening one takes half a millisecond.
    """

    def __init__(self, path: str, database: str, limits: ReadLimits) -> None:
        super().__init__(limits)
        self._database = database
        self._path = path
        self._known: dict[str, Statement] = {}
        self._admission = QueryAdmission(
            limits.max_queries,
            limits.max_queries_per_user,
            limits.max_queries_waiting,
            limits.max_query_wait_s,
        )
        # Ends queries independently of the other threads.
        self._ender = ThreadPoolExecutor(1, thread_name_prefix="store-kill")
        self._queries: dict[tuple[str, str], _Query] = {}
        self._left: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Future[None]] = set()
        self._watch = QueryWatch(
            limits.max_memory_of_all_bytes, self._running, lambda each: self._try_kill([each])
        )
        # This connection keeps the engine open.
        self._held = connect(path, database, limits=limits)

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[Answer]:
        question = _with_id(question)
        key = question.owner, question.query_id
        if key in self._queries:
            await self._replace(key, question)
        query = self._queries[key] = _Query(question)
        user = f"{question.owner or question.user} at {question.client}"
        try:
            await query.wait_for(self._admission.enter(user))
        except BaseException:
            self._over(key)
            raise

        loop = asyncio.get_running_loop()

        def over(_: asyncio.Future[None] | None) -> None:
            self._over(key)
            self._admission.leave(user)

        pipe: AnswerPipe | None = None
        try:
            pipe = AnswerPipe()
            call = _in_new_thread(partial(self._write, query, pipe))
        except BaseException:
            # No room for a pipe or a thread.
            if pipe is not None:
                pipe.leave()
                pipe.end()
            over(None)
            raise
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(over)
        # The engine's own limit does not apply while it waits for a reader that takes nothing.
        limit_s = self._limits.max_query_s + _GRACE_S
        query.end = partial(self._leave_early, pipe, query, call)
        expiry = loop.call_later(limit_s, query.end)
        try:
            chunks = pipe.chunks(call)
            first = await anext(chunks)
            yield Answer(pipe.output_format, _all(first, chunks))
        finally:
            expiry.cancel()
            self._leave_early(pipe, query, call)

    async def _replace(self, key: tuple[str, str], question: Question) -> None:
        """End the query of the same owner and id if the new one replaces it.

        Raises QueryError if it does not, or if that query does not end soon.
        """
        running = f"Query with id = {question.query_id:.200} is already running"
        refusal = QueryError.refusing(_SAME_ID, f"{running}. {_SAME_ID_NAME}")
        if question.settings.get(_REPLACE, "0").lower() not in {"1", "true"}:
            raise refusal
        given_ms = question.settings.get(f"{_REPLACE}_max_wait_ms", "")
        wait_s = min(int(given_ms) / 1000, _REPLACE_S) if given_ms.isdecimal() else _REPLACE_S
        try:
            async with asyncio.timeout(wait_s):
                while (other := self._queries.get(key)) is not None:
                    other.replace()
                    await other.is_over.wait()
        except TimeoutError:
            raise refusal from None

    def _over(self, key: tuple[str, str]) -> None:
        self._queries.pop(key).is_over.set()

    def _leave_early(self, pipe: AnswerPipe, query: _Query, call: asyncio.Future[None]) -> None:
        """End a query that is still running."""
        pipe.leave()
        if not call.done():
            ending = asyncio.create_task(self._end(query.tag, call))
            self._left.add(ending)
            ending.add_done_callback(self._left.discard)

    async def _end(self, tag: str, call: asyncio.Future[None]) -> None:
        """Kill a query repeatedly until it is over, since it may not have begun."""
        loop = asyncio.get_running_loop()
        while not call.done():
            await loop.run_in_executor(self._ender, self._try_kill, [tag])
            await asyncio.wait([call], timeout=_KILL_AGAIN_S)
        call.exception()

    def _write(self, query: _Query, pipe: AnswerPipe) -> None:
        """Have the engine write the answer into the pipe, in a thread."""
        question = query.question
        self._watch.enter()
        try:
            if pipe.is_left:
                return
            ours, given = self._settings_of(query)
            with closing(self._connection(ours, question, given)) as connection:
                statement = self._statement(question.sql)
                output_format = statement.output_format or question.output_format
                if not _FORMAT.fullmatch(output_format):
                    raise QueryError.refusing(
                        _UNKNOWN_FORMAT, f"Unknown format {output_format:.100}. (UNKNOWN_FORMAT)"
                    )
                values = _values(question.parameters)
                require_plain_names(statement.text, values)
                tags: list[str] = []
                if own_processes.is_kill(statement):
                    head, tags = self._find(connection, statement, query, values)
                else:
                    database = question.database or self._database
                    head = own_processes.with_known_ids(statement, database)
                pipe.output_format = output_format
                if head.lower().startswith("show "):
                    # The engine leaves the rows of most SHOW statements out of an outfile.
                    rows = connection.query(
                        f"{head} {statement.tail}", output_format, params=values
                    )
                    pipe.write(rows.bytes() or b"")
                    return
                connection.query(
                    f"{head} {pipe.clause} FORMAT {output_format} {statement.tail}",
                    "Null",
                    params=values,
                )
                if tags:
                    self._kill(tags)
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error)) from error
        finally:
            pipe.end()
            ended = self._watch.leave(query.tag) or query.ended
            if ended is not None:
                raise ended

    def _find(
        self, connection: Any, statement: Statement, query: _Query, values: Parameters
    ) -> tuple[str, list[str]]:
        """Return the answer to KILL QUERY as a query, and the tags of its targets: queries of the
        same owner, or of all owners."""
        question = query.question
        known = [
            other.tag
            for (owner, _), other in list(self._queries.items())
            if (question.user == "full" or owner == question.owner) and other is not query
        ]
        kill = own_processes.Kill(statement)
        rows: bytes = connection.query(kill.find(known), _ROWS, params=values).bytes()
        tags = [tag for (tag,) in map(_TAGS.decode, rows.splitlines())]
        return own_processes.found(tags), [] if kill.is_test else tags

    def _kill(self, tags: list[str]) -> None:
        with closing(connect_again(self._path)) as connection:
            connection.query(own_processes.kill_statement(tags))

    def _try_kill(self, tags: list[str]) -> bool:
        """Send a kill; return False if the engine refused it, for example for lack of memory."""
        try:
            self._kill(tags)
        except (ChdbError, RuntimeError) as error:
            logger.warning("a query could not be ended yet", extra={"reason": str(error)[:500]})
            return False
        return True

    def _running(self) -> list[RunningQuery]:
        """Return the running queries of users."""
        try:
            with closing(connect_again(self._path)) as connection:
                rows: bytes = connection.query(own_processes.RUNNING, _ROWS).bytes()
        except (ChdbError, RuntimeError):
            # The engine is at its own limit, and ends queries itself.
            return []
        return [_RUNNING.decode(row) for row in rows.splitlines()]

    def _settings_of(self, query: _Query) -> tuple[dict[str, int | str], dict[str, str]]:
        """Return our settings for a statement, and its own settings within their limits."""
        limits = self._limits
        spilling = limits.max_memory_bytes // 4
        bounds = {
            "max_execution_time": limits.max_query_s,
            "max_memory_usage": limits.max_memory_bytes,
            "max_threads": limits.max_threads,
            "max_bytes_before_external_group_by": spilling,
            "max_bytes_before_external_sort": spilling,
        }
        given = dict(query.question.settings)
        for name, bound in bounds.items():
            value = given.get(name, "")
            if value.isdecimal() and not 0 < int(value) <= bound:
                given[name] = str(bound)
        given[QUERY_ID_SETTING] = query.tag
        ours: dict[str, int | str] = {
            "final": 1,
            "date_time_output_format": "iso",
            **bounds,
            "allow_ddl": 0,
            "readonly": 2,
        }
        return ours, given

    def _connection(
        self,
        ours: Mapping[str, int | str],
        question: Question | None = None,
        given: Mapping[str, str] | None = None,
    ) -> Any:
        """Open a read-only connection for one statement, with our settings and its own."""
        for name in given or {}:
            if not _SETTING.fullmatch(name):
                raise QueryError.refusing(115, f"Unknown setting {name:.100}. (UNKNOWN_SETTING)")
        external = question.external if question else ()
        # External tables are made before the connection becomes read-only.
        opening = {name: value for name, value in ours.items() if name not in _CLOSING}
        connection = connect_again(self._path, opening if external else ours)
        try:
            database = question.database if question else None
            connection.query(f"USE {quote(database or self._database)}")
            if given:
                values = [f"{name} = {literal(value)}" for name, value in given.items()]
                connection.query(f"SET {', '.join(values)}")
            if question and question.user == "analyst":
                connection.query(f"SET ROLE {ANALYST}")
            for table in external:
                external_tables.load(connection, table)
            if external:
                closing = ", ".join(f"{name} = {ours[name]}" for name in _CLOSING)
                connection.query(f"SET {closing}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _run(
        self,
        sql: str,
        parameters: Parameters,
        output_format: str,
        quotes_integers: bool,
    ) -> bytes:
        values = _values(parameters)
        try:
            settings = {**self._limits.settings(), QUOTE_INTEGERS: int(quotes_integers)}
            with closing(self._connection({**settings, "readonly": 1})) as connection:
                text = self._statement(sql).text
                result: bytes = connection.query(text, output_format, params=values).bytes()
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error)) from error
        return result or b""

    def _statement(self, sql: str) -> Statement:
        """Return the statement to run. Repeated statements of pages are checked once."""
        statement = self._known.get(sql)
        if statement is None:
            statement = require_reading(normal_form(self._path, sql))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            if len(sql) <= _MAX_KNOWN_CHARS:
                self._known[sql] = statement
        return statement

    async def close(self) -> None:
        await super().close()
        for query in list(self._queries.values()):
            await asyncio.to_thread(self._try_kill, [query.tag])
        await asyncio.gather(*self._left)
        if self._calls:
            await asyncio.wait(self._calls)
        await asyncio.to_thread(self._ender.shutdown)
        await asyncio.to_thread(self._watch.close)
        self._held.close()


def normal_form(path: str, sql: str) -> str:
    """Return the single statement in the engine's own spelling, without comments.

    The check and the engine get this same text, so that no spelling makes them differ. Raises
    QueryError unless the text is one statement.
    """
    with closing(connect_again(path)) as connection:
        try:
            given = {"statement": escaped(sql)}
            written: bytes = connection.query(_NORMAL_FORM, "RawBLOB", params=given).bytes()
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error).partition(": In scope SELECT formatQuery")[0]) from error
    return written.decode()


def _in_new_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run work in a thread that is not reused: ``QueryWatch`` may have raised its niceness for
    good."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="store-query")
    call = asyncio.get_running_loop().run_in_executor(thread, work)
    thread.shutdown(wait=False)
    return call


async def _all(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk


def _with_id(question: Question) -> Question:
    if question.query_id:
        return question
    return msgspec.structs.replace(question, query_id=str(uuid.uuid4()))


def _values(parameters: Parameters) -> dict[str, Any]:
    return {
        name: escaped(value) if isinstance(value, str) else value
        for name, value in parameters.items()
    }
