"""ClickHouse, a server or the embedded engine, behind one interface with the same SQL.

One process owns an embedded store's path; it is free again when the process ends.
"""

from __future__ import annotations

import asyncio
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import clickhouse_connect
import msgspec
from clickhouse_connect.driver import options as client_options
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.schemas.redaction import redact_urls
from millrace.telemetry.store.clickhouse_server import raise_refusal, server_connect
from millrace.telemetry.store.reading import Reader, ReadLimits, ServerReader, quote
from millrace.telemetry.store.store_folder import is_taken
from millrace.telemetry.store.view_statements import ANALYSTS

if TYPE_CHECKING:
    from millrace.telemetry.store.analyst_views import AnalystViews

# ClickHouse's codes for values that do not fit, which a retry would not fix: text, numbers, dates
# and types that it cannot read (6, 27, 38, 41, 53, 69, 70, 72, 117), strings and arrays that are
# too large (128, 131), a NULL (349), an overflow (321, 407), a constraint (469), a throwIf (395).
_REFUSALS = frozenset({6, 27, 38, 41, 53, 69, 70, 72, 117, 128, 131, 321, 349, 395, 407, 469})
_NOT_ENOUGH_SPACE = 243
_NO_ROOM = ("No space left on device", "NOT_ENOUGH_SPACE")
# An insert would import pandas, which is installed with the embedded engine, to check whether its
# rows are a data frame: 0.3 s at the start, and permanent memory. Our rows are lists.
client_options.pd = None

T = TypeVar("T")


class StoreUnavailableError(
    MillraceError, code="store_unavailable", retryable=True, http_status=503
):
    """Error if ClickHouse did not accept a write or query; the same call may succeed later.
    ``is_full``: its disk is full."""

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class StoreTakenError(StoreUnavailableError):
    """Error if another process has the folder of an embedded store open."""


class RejectedRowsError(MillraceError, code="rejected_rows"):
    """Error if a row does not fit its table; no row of the batch was inserted."""


class PlainTable(msgspec.Struct, frozen=True):
    """Table with its columns, in order."""

    name: str
    column_names: tuple[str, ...]
    column_types: tuple[str, ...]


class Store:
    """Database in ClickHouse. Every call runs in a thread; writes run one after the other.

    It owns its connections and threads until ``close``.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        reader: Reader,
        database: str,
        views: AnalystViews | None = None,
    ) -> None:
        """Create the store; ``views`` are those of analysts, which an embedded store has."""
        self._connect = connect
        self._client: Client | None = None
        self._client_lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self.reader = reader
        self.database = database
        self.views = views

    @classmethod
    async def open(cls, config: ClickHouseConfig, limits: ReadLimits | None = None) -> Store:
        """Connect, and create the database if needed.

        Raises ConfigError for a configuration with no store or two, StoreUnavailableError if the
        store cannot be opened (StoreTakenError for a path that another process has),
        UntrustedServerError or CredentialsRefusedError for lasting refusals of a server.
        """
        if bool(config.url) == bool(config.path):
            raise ConfigError("set exactly one of clickhouse.url and clickhouse.path")
        connect: Callable[..., Client]
        limits = limits or ReadLimits.of(config)
        if config.path:
            await asyncio.to_thread(Path(config.path).mkdir, parents=True, exist_ok=True)
            if is_taken(Path(config.path)):
                raise StoreTakenError(
                    f"another process has the store at {config.path} open: a telemetry process, or "
                    "a command that reads it. End it first."
                )
            connect = functools.partial(_connect_embedded, config, limits)
        else:
            connect = server_connect(config)
        try:
            return await asyncio.to_thread(cls._open, config, connect, limits)
        except ImportError as error:
            raise ConfigError(
                "clickhouse.path needs the embedded engine: install millrace[embedded], or set "
                "clickhouse.url to a server."
            ) from error
        except (ClickHouseError, OSError, RuntimeError) as error:
            if config.url:
                await asyncio.to_thread(raise_refusal, error, config)
            where = f"the store at {config.path} (one process may have it)"
            what = where if config.path else f"ClickHouse at {redact_urls(config.url)}"
            raise StoreUnavailableError(f"cannot open {what}: {error}") from error

    @classmethod
    def _open(
        cls, config: ClickHouseConfig, connect: Callable[..., Client], limits: ReadLimits
    ) -> Store:
        with connect() as client:
            client.command(f"CREATE DATABASE IF NOT EXISTS {quote(config.database)}")
            if config.path:
                client.command(f"CREATE DATABASE IF NOT EXISTS {ANALYSTS}")
        connect_to_database = functools.partial(connect, database=config.database)
        # The writer opens first: the engine lives as long as one connection does.
        writing = connect_to_database()
        reader: Reader
        views = None
        if config.path:
            from millrace.telemetry.store.analyst_views import AnalystViews
            from millrace.telemetry.store.reading_embedded import EmbeddedReader

            views = AnalystViews(config.path, config.database)
            reader = EmbeddedReader(config.path, config.database, limits)
        else:
            reader = ServerReader(connect_to_database, limits)
        store = cls(connect_to_database, reader, config.database, views)
        store._client = writing
        return store

    async def command(self, sql: str, parameters: Mapping[str, object] | None = None) -> None:
        """Run a statement without an answer. Raises StoreUnavailableError."""
        await self._write(lambda client: client.command(sql, parameters=dict(parameters or {})))

    async def insert(self, table: PlainTable, columns: Sequence[Sequence[Any]], token: str) -> None:
        """Insert a batch, column by column; a repeated token is the same batch and is ignored.

        Raises RejectedRowsError for values that do not fit, StoreUnavailableError otherwise.
        """

        def run(client: Client) -> None:
            try:
                client.insert(
                    table.name,
                    columns,
                    column_names=table.column_names,
                    column_type_names=table.column_types,
                    column_oriented=True,
                    settings={"insert_deduplication_token": token},
                )
            except (DataError, ArithmeticError, TypeError, ValueError, struct.error) as error:
                raise RejectedRowsError(f"the rows do not fit {table.name}: {error}") from error
            except ClickHouseError as error:
                if getattr(error, "code", None) not in _REFUSALS:
                    raise
                raise RejectedRowsError(f"{table.name} refuses the rows: {error}") from error

        await self._write(run)

    async def rows(
        self, sql: str, parameters: Mapping[str, object] | None = None
    ) -> list[tuple[Any, ...]]:
        """Return a trusted query's rows, on the writing connection, which sees all writes."""

        def run(client: Client) -> list[tuple[Any, ...]]:
            result = client.query(sql, parameters=dict(parameters or {}))
            return [tuple(row) for row in result.result_rows]

        return await self._write(run)

    async def close(self) -> None:
        """Close the store; an embedded path is free when the process ends."""
        await self.reader.close()
        if self.views is not None:
            await self.views.close()
        await asyncio.to_thread(self._writer.shutdown)
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)

    async def _write(self, work: Callable[[Client], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._run, work)

    def _run(self, work: Callable[[Client], T]) -> T:
        try:
            if self._client is None:
                self._client = self._connect()
            return work(self._client)
        except (ClickHouseError, OSError) as error:
            raise StoreUnavailableError(
                f"ClickHouse did not take it: {error}", is_full=_is_full(error)
            ) from error


def _is_full(error: Exception) -> bool:
    if getattr(error, "code", None) == _NOT_ENOUGH_SPACE:
        return True
    text = str(error)
    return any(words in text for words in _NO_ROOM)


def _connect_embedded(config: ClickHouseConfig, limits: ReadLimits, **options: Any) -> Client:
    # The engine is an optional extra, which a telemetry process with a server does not need.
    from millrace.telemetry.store.embedded_engine import engine_options

    with engine_options(config.database, limits=limits) as restrictions:
        return clickhouse_connect.get_client(
            interface="chdb", path=config.path, chdb_options=restrictions, **options
        )
