"""Queries of ClickHouse: read only, limited in number, time and size."""

from __future__ import annotations

import asyncio
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Literal

import msgspec
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import MillraceError

UNKNOWN_ERROR = 1002
TOO_MANY_QUERIES = 202
_CODE = re.compile(r"Code: (\d+)")
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0"}
_TO_ESCAPE = re.compile(r"[\\\t\n\r\0]")

QUOTE_INTEGERS = "output_format_json_quote_64bit_integers"
Parameters = Mapping[str, str | int | float]


User = Literal["full", "analyst"]


class ReadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of queries. Queries of the HTTP interface share limits. The saved queries of the
    operations page and the alerts have their own: ``max_running`` run and ``max_waiting`` may wait.
    """

    max_running: int = 4
    max_waiting: int = 64
    max_execution_s: int = 30
    max_result_bytes: int = 256 * 1024 * 1024
    max_memory_bytes: int = 512 * 1024 * 1024
    max_memory_of_all_bytes: int = 1024 * 1024 * 1024
    max_threads: int = 2
    max_queries: int = 16
    max_queries_per_user: int = 6
    max_queries_waiting: int = 64
    max_query_wait_s: float = 10.0
    max_query_s: int = 60

    @classmethod
    def of(cls, config: ClickHouseConfig) -> ReadLimits:
        """Return the limits of the configuration."""
        return cls(
            max_memory_bytes=config.max_query_memory_bytes,
            max_memory_of_all_bytes=config.max_queries_memory_bytes,
            max_queries=config.max_queries,
            max_queries_per_user=config.max_queries_per_user,
            max_query_wait_s=config.max_query_wait_s,
            max_query_s=config.max_query_s,
        )

    def settings(self) -> dict[str, int | str]:
        """Return the limits of saved queries as settings of ClickHouse. ``final`` hides duplicates
        that have not merged."""
        return {
            "final": 1,
            "max_execution_time": self.max_execution_s,
            "max_result_bytes": self.max_result_bytes,
            "max_memory_usage": self.max_memory_bytes,
            "max_threads": self.max_threads,
            # Times have their zone: 2026-11-01T08:30:00Z.
            "date_time_output_format": "iso",
        }


class ExternalTable(msgspec.Struct, frozen=True):
    """Rows that come with a statement, as a table for this statement only.

    ``structure`` is a list of names and types as in CREATE TABLE, ``types`` a list of types alone,
    whose columns are ``_1``, ``_2`` and so on; one of both is empty. ``data`` has the rows in an
    input format of ClickHouse.
    """

    name: str
    data: bytes
    structure: str = ""
    types: str = ""
    input_format: str = "TabSeparated"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of the HTTP interface. ``output_format`` applies unless the statement has a FORMAT
    clause. ``settings`` apply to this statement alone. ``user`` decides the readable tables: an
    analyst reads all but the transcripts. ``owner`` is the querying user, who may read fewer tables
    than its own: an owner's queries have their own ids, and a user of all tables may end the
    queries of every owner. ``client`` identifies a user for the limit of concurrent queries."""

    sql: str
    parameters: Parameters = {}
    output_format: str = "TabSeparated"
    database: str | None = None
    settings: Mapping[str, str] = {}
    query_id: str = ""
    user: User = "full"
    owner: str = ""
    client: str = ""
    external: tuple[ExternalTable, ...] = ()


class Answer:
    """Bytes of an answer in its output format. The first chunk is available from the start."""

    def __init__(self, output_format: str, chunks: AsyncIterator[bytes]) -> None:
        self.output_format = output_format
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks


class QueryError(MillraceError, code="query_failed", http_status=400):
    """Error if ClickHouse refused a query, or if it was never sent. ``number`` is ClickHouse's
    code."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    @classmethod
    def refusing(cls, number: int, why: str) -> QueryError:
        """Make an error in ClickHouse's format for a query that was not sent."""
        return cls(number, f"Code: {number}. DB::Exception: {why}")

    @classmethod
    def of(cls, text: str) -> QueryError:
        """Parse ClickHouse's error text, from its last ``Code:`` prefix on."""
        start = text.find("Code: ")
        text = text[start:] if start > 0 else text
        match = _CODE.match(text)
        return cls(int(match[1]) if match else UNKNOWN_ERROR, text.strip())


class EscapedText(str):
    """Text of a parameter with ClickHouse's escapes: a field of TabSeparated."""

    __slots__ = ()


def escaped(text: str) -> EscapedText:
    """Escape a parameter's text for ClickHouse; an EscapedText stays as it is."""
    if isinstance(text, EscapedText):
        return text
    return EscapedText(_TO_ESCAPE.sub(lambda match: _ESCAPES[match[0]], text))


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    inner = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{inner}'"


def quote(identifier: str) -> str:
    """Return an identifier as quoted SQL."""
    inner = identifier.replace("\\", "\\\\").replace("`", "\\`")
    return f"`{inner}`"


class Reader(ABC):
    """Runner of saved queries, which only read, each in a thread, with a bounded queue."""

    def __init__(self, limits: ReadLimits) -> None:
        self._limits = limits
        self._pool = ThreadPoolExecutor(limits.max_running, thread_name_prefix="store-read")
        self._num_inside = 0

    async def read(
        self,
        sql: str,
        parameters: Parameters,
        output_format: str,
        *,
        quotes_integers: bool = False,
    ) -> bytes:
        """Return the result of a saved query in the given format.

        A parameter's text is used literally unless it is an EscapedText. With ``quotes_integers``,
        JSON formats write 64-bit integers as strings: most readers of JSON round numbers above
        2^53. Raises QueryError, at once when too many queries wait already.
        """
        if self._num_inside >= self._limits.max_running + self._limits.max_waiting:
            raise QueryError.refusing(
                TOO_MANY_QUERIES,
                f"Too many simultaneous queries: {self._num_inside}. Ask again later. "
                "(TOO_MANY_SIMULTANEOUS_QUERIES)",
            )
        self._num_inside += 1
        call = asyncio.get_running_loop().run_in_executor(
            self._pool, self._run, sql, parameters, output_format, quotes_integers
        )
        call.add_done_callback(self._leave)
        return await call

    @abstractmethod
    def _run(
        self,
        sql: str,
        parameters: Parameters,
        output_format: str,
        quotes_integers: bool,
    ) -> bytes:
        """Run the query of ``read``, in one of ``max_running`` threads."""

    def _leave(self, _: asyncio.Future[bytes]) -> None:
        self._num_inside -= 1

    async def close(self) -> None:
        """Wait for the running queries, which their time limit bounds."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


class StreamingReader(Reader):
    """Reader that also answers arbitrary statements of users."""

    @abstractmethod
    def stream(self, question: Question) -> AbstractAsyncContextManager[Answer]:
        """Stream an answer of any size: the engine waits while its reader takes nothing.

        Leaving the context ends the query. Raises QueryError, also while the answer is read.
        """


class ServerReader(Reader):
    """Reader of a server, with one connection for each thread."""

    def __init__(self, connect: Callable[..., Client], limits: ReadLimits) -> None:
        super().__init__(limits)
        self._connect = connect
        # Level 2 accepts the settings sent along and forbids other changes.
        self._settings = {**limits.settings(), "readonly": 2}
        self._local = threading.local()

    def _run(
        self,
        sql: str,
        parameters: Parameters,
        output_format: str,
        quotes_integers: bool,
    ) -> bytes:
        try:
            if not hasattr(self._local, "client"):
                self._local.client = self._connect()
            result: bytes = self._local.client.raw_query(
                sql,
                parameters=dict(parameters),
                settings={**self._settings, QUOTE_INTEGERS: int(quotes_integers)},
                fmt=output_format,
            )
        except (ClickHouseError, OSError) as error:
            raise QueryError.of(str(error)) from error
        return result
