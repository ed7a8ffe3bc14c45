"""Database ``analysts``: views that users of the HTTP interface make and keep.

One connection runs their statements, one after the other, separate from the connections that write
rows and read. Its role has no access to transcripts, so no view can read them; a view is read with
the rights of the querying user (SQL SECURITY INVOKER).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec
from chdb import ChdbError

from millrace.telemetry.store.declaration import load_declaration
from millrace.telemetry.store.embedded_engine import (
    ANALYST,
    PRIVATE_TABLES,
    VIEW_MAKER,
    connect_again,
)
from millrace.telemetry.store.reading import TOO_MANY_QUERIES, QueryError, quote
from millrace.telemetry.store.reading_embedded import normal_form
from millrace.telemetry.store.sql_guard import tokens_of, unquoted
from millrace.telemetry.store.view_statements import (
    ANALYSTS,
    NOTHING,
    ViewStatement,
    view_statement,
)

logger = logging.getLogger(__name__)

MAX_VIEWS = 200
# Maximum number of views that a query of one view reads, including itself: a view is planned anew
# at each place in a query.
MAX_VIEWS_READ = 64

_MAX_WAITING = 16
_MAX_LOGGED = 200
_SETTINGS = ("max_execution_time = 10", "max_memory_usage = 268435456", "max_threads = 1")
_ACCESS_DENIED = 497
_TOO_DEEP = 162
_TOO_MANY_VIEWS = 724
# Table functions that read only their own text. Other functions take table names in strings, which
# may be computed.
_PLAIN_FUNCTIONS = frozenset(
    {
        "format",
        "generaterandom",
        "generateseries",
        "generate_series",
        "null",
        "numbers",
        "numbers_mt",
        "primes",
        "values",
        "view",
        "zeros",
        "zeros_mt",
    }
)
_PARAMETER = re.compile(r"\{\s*\w+\s*:\s*(\w+)")
_VIEWS = "SELECT name, as_select FROM system.tables WHERE database = 'analysts'"
_FUNCTIONS = "SELECT lower(name) AS name, '' AS as_select FROM system.table_functions"


class _Named(msgspec.Struct, frozen=True):
    name: str
    as_select: str


class AnalystViews:
    """Runner of statements that change views."""

    def __init__(self, path: str, database: str) -> None:
        """Create the runner.

        Args:
            path: The path of a store that this process has open.
            database: The database of its tables.
        """
        self._path = path
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-views")
        self._num_inside = 0
        self._taken = {
            name for table in load_declaration().values() for name in (table.name, table.view)
        }

    async def run(self, sql: str, database: str | None) -> None:
        """Run a statement for which ``changes_views`` is true. ``database`` is the default of
        unqualified names. Raises QueryError."""
        if self._num_inside >= _MAX_WAITING:
            raise QueryError.refusing(
                TOO_MANY_QUERIES,
                f"Too many statements that change views: {self._num_inside} wait. Ask again "
                "later. (TOO_MANY_SIMULTANEOUS_QUERIES)",
            )
        self._num_inside += 1
        call = asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, sql, database or self._database
        )
        call.add_done_callback(self._leave)
        await call

    async def close(self) -> None:
        """Wait for the current statement, which its time limit bounds."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _leave(self, _: asyncio.Future[None]) -> None:
        self._num_inside -= 1

    def _run(self, sql: str, database: str) -> None:
        statement = view_statement(normal_form(self._path, sql), database)
        if statement is NOTHING:
            return
        try:
            with closing(connect_again(self._path)) as connection:
                connection.query(f"SET ROLE {ANALYST}, {VIEW_MAKER}")
                connection.query(f"USE {quote(database)}")
                connection.query(f"SET {', '.join(_SETTINGS)}")
                if statement.created:
                    self._check_body(connection, statement.body)
                self._check_views(connection, statement, database)
                connection.query(statement.sql)
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error)) from error
        logger.info("changed views of analysts", extra={"statement": statement.sql[:_MAX_LOGGED]})

    def _check_body(self, connection: Any, body: str) -> None:
        """Raise QueryError for a body that the view maker may not read, or that could later read
        other tables than it names."""
        functions = {row.name for row in _rows(connection, _FUNCTIONS)} - _PLAIN_FUNCTIONS
        tokens = tokens_of(body)
        for token, following in zip(tokens, (*tokens[1:], None), strict=True):
            if token.name in PRIVATE_TABLES:
                raise QueryError.refusing(
                    _ACCESS_DENIED, f"A view cannot read {token.name}. (ACCESS_DENIED)"
                )
            is_call = following is not None and following.text == "("
            if is_call and token.name in functions:
                raise QueryError.refusing(
                    _ACCESS_DENIED,
                    f"A view cannot read the table function {token.name}: name its tables. "
                    "(ACCESS_DENIED)",
                )
        parameters = {kind.lower() for kind in _PARAMETER.findall(body)}
        if "identifier" in parameters:
            raise QueryError.refusing(
                _ACCESS_DENIED,
                "A view cannot have a parameter of the type Identifier. (ACCESS_DENIED)",
            )
        if not parameters:
            connection.query(f"DESCRIBE TABLE ({body})")

    def _check_views(self, connection: Any, statement: ViewStatement, database: str) -> None:
        """Raise QueryError for taken names, for too many views, or too many views in one."""
        before = {row.name: _references(row.as_select) for row in _rows(connection, _VIEWS)}
        after = dict(before)
        if statement.created:
            body = statement.body
            after[statement.created] = _references(body, unqualified=database == ANALYSTS)
        for old, new in statement.renamed:
            after[new] = after.pop(old, [])
        taken = sorted((after.keys() - before.keys()) & self._taken)
        if taken:
            raise QueryError.refusing(
                _ACCESS_DENIED,
                f"{taken[0]} is the name of a table of {self._database}: give the view another "
                "name. (ACCESS_DENIED)",
            )
        if len(after) > max(MAX_VIEWS, len(before)):
            raise QueryError.refusing(
                _TOO_MANY_VIEWS,
                f"{ANALYSTS} has {len(before)} views, of {MAX_VIEWS} at most: drop one first. "
                "(TOO_MANY_TABLES)",
            )
        for name, num_read in _views_read(after).items():
            if num_read > MAX_VIEWS_READ:
                raise QueryError.refusing(
                    _TOO_DEEP,
                    f"The view {name} would read {num_read} views, its own views included, of "
                    f"{MAX_VIEWS_READ} at most. (TOO_DEEP_SUBQUERIES)",
                )


def _rows(connection: Any, sql: str) -> list[_Named]:
    lines: bytes = connection.query(sql, "JSONEachRow").bytes() or b""
    return msgspec.json.Decoder(_Named).decode_lines(lines)


def _references(body: str, *, unqualified: bool = False) -> list[str]:
    """Return names in a body that may be views, one entry per occurrence.

    The engine stores bodies with qualified names; ``unqualified`` is for a body that it has not
    stored.
    """
    names = []
    before: tuple[str, str] = ("", "")
    for token in tokens_of(body):
        if token.kind in {"word", "quoted"}:
            is_qualified = before == (ANALYSTS, ".")
            if is_qualified or (unqualified and before[1] in {"from", "join", "in", ","}):
                names.append(unquoted(token))
        before = (before[1], token.name or token.text)
    return names


def _views_read(references: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the number of views that a query of each view reads. The engine refuses cycles."""
    counts: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in references:
            return 0
        if name not in counts:
            counts[name] = 1
            counts[name] += sum(map(count, references[name]))
        return counts[name]

    return {name: count(name) for name in references}
