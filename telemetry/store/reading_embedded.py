"""Queries to the embedded engine, each on a connection that can never write again."""

from __future__ import annotations

import queue
from typing import Any

from chdb import ChdbError

from millrace.telemetry.store.embedded_engine import connect, connect_again
from millrace.telemetry.store.reading import (
    QUOTE_INTEGERS,
    Parameters,
    QueryError,
    Reader,
    ReadLimits,
    escaped,
    quote,
)
from millrace.telemetry.store.sql_guard import require_plain_names, require_reading

_UNKNOWN_FORMAT = 73
# What chDB makes Python's objects of: no bytes to hand on.
_OBJECTS = frozenset({"arrowtable", "dataframe", "datastore"})
_MAX_KNOWN = 256
_MAX_KNOWN_CHARS = 16_384
_NORMAL_FORM = "SELECT formatQuerySingleLine({statement:String})"


class EmbeddedReader(Reader):
    """A pool of read-only connections to the store that this process has open.

    ``readonly`` is set last on each connection and cannot be unset on it, so that connections that
    quote 64-bit integers are others.
    """

    def __init__(self, path: str, database: str, limits: ReadLimits) -> None:
        super().__init__(limits)
        self._database = database
        self._path = path
        self._known: dict[str, str] = {}
        # Idle connections by whether they quote integers. One stays open, and with it the engine.
        self._idle: dict[bool, queue.SimpleQueue[Any]] = {
            quotes: queue.SimpleQueue() for quotes in (False, True)
        }
        self._idle[False].put(self._set_up(connect(path, database), quotes_integers=False))

    def _set_up(self, connection: Any, *, quotes_integers: bool) -> Any:
        settings = {
            **self._limits.settings(),
            QUOTE_INTEGERS: int(quotes_integers),
            "allow_introspection_functions": 0,
            "allow_ddl": 0,
            "readonly": 1,
        }
        for name, value in settings.items():
            connection.query(f"SET {name} = {value!r}")
        return connection

    def _connection(self, *, quotes_integers: bool) -> Any:
        """A connection for this thread alone. Each kind has at most one connection a thread."""
        try:
            return self._idle[quotes_integers].get_nowait()
        except queue.Empty:
            return self._set_up(connect_again(self._path), quotes_integers=quotes_integers)

    def _run(
        self,
        sql: str,
        parameters: Parameters,
        output_format: str,
        database: str | None,
        quotes_integers: bool,
    ) -> bytes:
        if output_format.lower() in _OBJECTS:
            raise QueryError.refusing(
                _UNKNOWN_FORMAT, f"Unknown format {output_format}. (UNKNOWN_FORMAT)"
            )
        try:
            connection = self._connection(quotes_integers=quotes_integers)
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error)) from error
        values = {
            name: escaped(value) if isinstance(value, str) else value
            for name, value in parameters.items()
        }
        try:
            statement = self._checked(connection, sql)
            require_plain_names(statement, values)
            connection.query(f"USE {quote(database or self._database)}")
            result: bytes = connection.query(statement, output_format, params=values).bytes()
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error)) from error
        finally:
            self._idle[quotes_integers].put(connection)
        return result or b""

    def _checked(self, connection: Any, sql: str) -> str:
        """The statement to run. Those that pages ask again and again are looked at once."""
        statement = self._known.get(sql)
        if statement is None:
            statement = require_reading(_normal_form(connection, sql))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            if len(sql) <= _MAX_KNOWN_CHARS:
                self._known[sql] = statement
        return statement

    async def close(self) -> None:
        await super().close()
        for idle in self._idle.values():
            while not idle.empty():
                idle.get().close()


def _normal_form(connection: Any, sql: str) -> str:
    """The one statement as the engine itself reads it, in its own spelling, without comments. What
    is looked at and what is run are this text, so that no way of writing it tells them apart.
    Raises QueryError for what is not one statement."""
    parameters = {"statement": escaped(sql)}
    try:
        written: bytes = connection.query(_NORMAL_FORM, "RawBLOB", params=parameters).bytes()
    except (ChdbError, RuntimeError) as error:
        raise QueryError.of(str(error).partition(": In scope SELECT formatQuery")[0]) from error
    return written.decode()
