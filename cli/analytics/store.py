"""Access of commands to the analytics store: of the running system, or of a stopped one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.cli.endpoints import locate, read_endpoints, url
from millrace.cli.running import supervising
from millrace.runtime.settings import load_config
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.telemetry.store.store_folder import is_taken

if TYPE_CHECKING:
    from millrace.cli.analytics.rows import Rows
    from millrace.schemas.config import ClickHouseConfig
    from millrace.telemetry.http.answers import SavedQuery

Value = str | int | float

_WIRE_FORMAT = "JSONCompact"
_TIMEOUT_S = 60.0
# Longest start of a system on a busy machine, in seconds.
_WAIT_S = 60.0
_SILENT_S = 1.0
_LOOK_EVERY_S = 0.2
# ClickHouse's error code.
_UNKNOWN_DATABASE = 81


class NoStoreError(MillraceError, code="store_unavailable", retryable=True):
    """Error if there is neither a running store nor a folder of a store."""


class NotListeningError(NoStoreError):
    """Error if no server listens at an address."""


class NoDatabaseError(NoStoreError):
    """Error if the folder of a store does not contain the database yet."""


class _TakenError(Exception):
    """Error if another process has the folder of the store open."""


def ask(sql: str, data: Path, parameters: Mapping[str, Value] | None = None) -> bytes:
    """Return the JSONCompact answer to a reading statement.

    Queries the store of the ``MILLRACE_*`` variables, or without them the store of the system on
    ``data``. Raises the errors of ``ask_store``.
    """
    return ask_store(sql, load_config(None, os.environ).clickhouse, data, parameters or {})


def ask_store(sql: str, config: ClickHouseConfig, data: Path, given: Mapping[str, Value]) -> bytes:
    """Return the answer of the server in ``config``, else of the store in its folder, else of the
    store in ``data``.

    While a system has the folder, only its telemetry process is asked, with a bounded wait for its
    start. The folder is opened once no process has it. Raises NoStoreError, and QueryError if the
    engine refuses the query.
    """
    if config.url:
        return ask_server(sql, config, given)
    folder = Path(config.path or data / "clickhouse")
    is_of_system = folder.resolve() == (data / "clickhouse").resolve()
    began_s, is_told = time.monotonic(), False
    while True:
        runs = is_of_system and supervising(data) is not None
        if runs or is_taken(folder):
            server = _server_of(config, data if is_of_system else None, runs=runs)
            if server is not None:
                with contextlib.suppress(NotListeningError):
                    return ask_server(sql, server, given)
        else:
            with contextlib.suppress(_TakenError):
                return _ask_folder(sql, folder, config.database, data, given)
        waited_s = time.monotonic() - began_s
        owner = f"the system on {data}" if runs else f"the process that has the store {folder}"
        if waited_s > _WAIT_S:
            raise NoStoreError(
                f"{owner} did not answer within {_WAIT_S:.0f} s. See millrace status and the log "
                "of telemetry, and try again."
            )
        if waited_s > _SILENT_S and not is_told:
            print(f"millrace: waiting for {owner} to answer", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(_LOOK_EVERY_S)


def _server_of(
    config: ClickHouseConfig, data: Path | None, *, runs: bool
) -> ClickHouseConfig | None:
    """Return the address of the telemetry of the system on ``data``, else that of ``config``; None
    while it is unknown.

    If the system on ``data`` ``runs`` but has not published its address yet, the address of
    ``config`` may belong to another system and is not used.
    """
    if data is not None and read_endpoints(data) is not None:
        return locate(data).clickhouse
    if runs or not config.path:
        return None
    return msgspec.structs.replace(config, url=url(config.serve_host, config.serve_port))


def _ask_folder(
    sql: str, folder: Path, database: str, data: Path, given: Mapping[str, Value]
) -> bytes:
    """Return the answer of a store that no process has open. Raises _TakenError if another process
    opened it first."""
    from millrace.telemetry.store.reading import QueryError

    if not folder.is_dir():
        raise NoStoreError(
            f"nothing runs on {data} and no store is there; start it with millrace up --data "
            f"{data}, or name a server in MILLRACE_CLICKHOUSE__URL"
        )
    try:
        return ask_embedded(sql, folder, database, given)
    except NoStoreError as error:
        if is_taken(folder):
            raise _TakenError from error
        raise
    except QueryError as error:
        if error.number == _UNKNOWN_DATABASE:
            raise NoDatabaseError(
                f"the store {folder} has no database {database} so far: no telemetry has run on "
                f"it. Start it with millrace up --data {data}."
            ) from error
        raise


def saved_query(name: str) -> SavedQuery:
    """Return a query of ``telemetry/queries``. Raises ParameterError for an unknown name."""
    from millrace.telemetry.http.answers import load_queries

    queries = load_queries()
    if name not in queries:
        raise ParameterError("saved", f"there is no saved query {name!r}; --list shows all")
    return queries[name]


def ask_saved(name: str, given: Mapping[str, Value], data: Path) -> Rows:
    """Return the rows of a saved query.

    Raises ParameterError for invalid parameters, and the errors of ``ask``.
    """
    from millrace.cli.analytics.rows import parse_rows
    from millrace.telemetry.http.parameters import read_values

    query = saved_query(name)
    values = read_values(query.name, query.parameters, given, time.time())
    return parse_rows(ask(query.sql, data, values))


def ask_server(sql: str, config: ClickHouseConfig, given: Mapping[str, Value]) -> bytes:
    """Return the answer of the server at ``config.url``. Raises the errors of ``ask``."""
    from millrace.runtime.addresses import open_directly
    from millrace.runtime.tls import client_context
    from millrace.telemetry.store.clickhouse_server import raise_refusal, server_address
    from millrace.telemetry.store.reading import QueryError, escaped

    parameters = {
        "database": config.database,
        "default_format": _WIRE_FORMAT,
        "readonly": "1",
        "date_time_output_format": "iso",
        **{f"param_{name}": escaped(str(value)) for name, value in given.items()},
    }
    is_tls = server_address(config).scheme == "https"
    address = f"{config.url.rstrip('/')}/?{urllib.parse.urlencode(parameters)}"
    headers = {"X-ClickHouse-User": config.username, "X-ClickHouse-Key": config.password}
    request = urllib.request.Request(  # noqa: S310 (checked)
        address, data=sql.encode(), headers=headers
    )
    context = client_context("clickhouse", config) if is_tls else None
    try:
        with open_directly(request, timeout_s=_TIMEOUT_S, context=context) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise QueryError.of(error.read().decode(errors="replace")) from error
    except OSError as error:
        raise_refusal(error, config)
        reason = getattr(error, "reason", error)
        is_absent = isinstance(reason, ConnectionRefusedError | ConnectionResetError)
        kind = NotListeningError if is_absent else NoStoreError
        raise kind(f"no ClickHouse answers at {config.url}: {reason}") from error
    return body


def ask_embedded(sql: str, store: Path, database: str, given: Mapping[str, Value]) -> bytes:
    """Return the answer of a store in a folder that no other process has open. Raises the errors of
    ``ask``."""
    from millrace.telemetry.store.reading import ReadLimits
    from millrace.telemetry.store.reading_embedded import EmbeddedReader

    async def read() -> bytes:
        try:
            reader = EmbeddedReader(str(store), database, ReadLimits(max_running=1))
        except RuntimeError as error:
            raise NoStoreError(f"the store {store} cannot be opened: {error}") from error
        try:
            return await reader.read(sql, given, _WIRE_FORMAT)
        finally:
            await reader.close()

    return asyncio.run(read())
