"""Queries to the embedded engine, each on a connection that can never write again."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping

import chdb
from chdb import ChdbError

from telemetry.reading import QueryError, ReadLimits, Turnstile, escaped


class EmbeddedReader:
    """A pool of read-only connections to the store that this process has open.

    ``readonly`` is set last on each connection and cannot be unset on it.
    """

    def __init__(self, path: str, database: str, limits: ReadLimits) -> None:
        self._database = database
        self._turnstile = Turnstile(limits, "store-read")
        self._idle: queue.SimpleQueue[chdb.state.sqlitelike.Connection] = queue.SimpleQueue()
        self._num_connections = limits.max_running
        for _ in range(limits.max_running):
            # The engine knows its path by the resolved spelling, as clickhouse_connect opens it.
            connection = chdb.connect(os.path.realpath(path))  # type: ignore[no-untyped-call]
            for name, value in limits.settings().items():
                connection.query(f"SET {name} = {value}")
            connection.query("SET readonly = 1")
            self._idle.put(connection)

    async def read(
        self,
        sql: str,
        parameters: Mapping[str, str | int | float],
        output_format: str,
        database: str | None = None,
    ) -> bytes:
        """The engine's own output. Raises QueryError."""
        return await self._turnstile.run(
            lambda: self._run(sql, parameters, output_format, database or self._database)
        )

    def _run(
        self,
        sql: str,
        parameters: Mapping[str, str | int | float],
        output_format: str,
        database: str,
    ) -> bytes:
        connection = self._idle.get()
        quoted = database.replace("\\", "\\\\").replace("`", "\\`")
        try:
            connection.query(f"USE `{quoted}`")
            values = {
                name: escaped(value) if isinstance(value, str) else value
                for name, value in parameters.items()
            }
            result: bytes = connection.query(sql, output_format, params=values).bytes()
        except (ChdbError, RuntimeError) as error:
            raise QueryError.of(str(error)) from error
        finally:
            self._idle.put(connection)
        return result or b""

    async def close(self) -> None:
        await self._turnstile.close()
        for _ in range(self._num_connections):
            self._idle.get().close()
