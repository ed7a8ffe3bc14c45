"""The analytics store, as commands read it: of the system that runs, or the one that it left."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.endpoints import locate, read_endpoints, without_user
from millrace.schemas.errors import MillraceError, ParameterError

if TYPE_CHECKING:
    from millrace.cli.analytics.rows import Rows
    from millrace.schemas.config import ClickHouseConfig
    from millrace.telemetry.http.answers import SavedQuery

Value = str | int | float

_WIRE_FORMAT = "JSONCompact"
_TIMEOUT_S = 60.0


class NoStoreError(MillraceError, code="store_unavailable", retryable=True):
    """Neither a running store nor a folder of one."""


def ask(sql: str, data: Path, parameters: Mapping[str, Value] | None = None) -> bytes:
    """The JSONCompact answer to a reading statement: of the server, or of the embedded store if
    none is configured, or if that of the system on ``data`` has ended. Raises NoStoreError, and
    QueryError if the engine refuses the query."""
    config = locate(data).clickhouse
    store = Path(config.path or data / "clickhouse")
    given = parameters or {}
    if config.url:
        try:
            return ask_server(sql, config, given)
        except NoStoreError:
            ran_here = read_endpoints(data)
            is_ours = ran_here is not None and config.url == without_user(ran_here.clickhouse)
            if not is_ours or not store.is_dir():
                raise
    if not store.is_dir():
        raise NoStoreError(
            f"nothing runs on {data} and no store is there; start it with millrace up --data "
            f"{data}, or name a server in MILLRACE_CLICKHOUSE__URL"
        )
    return ask_embedded(sql, store, config.database, given)


def saved_query(name: str) -> SavedQuery:
    """A query of ``telemetry/queries``. Raises ParameterError for a name that is none."""
    from millrace.telemetry.http.answers import load_queries

    queries = load_queries()
    if name not in queries:
        raise ParameterError("saved", f"there is no saved query {name!r}; --list shows all")
    return queries[name]


def ask_saved(name: str, given: Mapping[str, Value], data: Path) -> Rows:
    """What a saved query answers. Raises ParameterError for parameters that it cannot have, and
    what ``ask`` does."""
    from millrace.cli.analytics.rows import parse_rows
    from millrace.telemetry.http.parameters import read_values

    query = saved_query(name)
    values = read_values(query.name, query.parameters, given, time.time())
    return parse_rows(ask(query.sql, data, values))


def ask_server(sql: str, config: ClickHouseConfig, given: Mapping[str, Value]) -> bytes:
    """The answer of the server at ``config.url``. Raises as ``ask`` does."""
    from millrace.runtime.proxies import open_directly
    from millrace.runtime.tls import client_context
    from millrace.telemetry.store.clickhouse_server import raise_refusal
    from millrace.telemetry.store.reading import QueryError, escaped

    parameters = {
        "database": config.database,
        "default_format": _WIRE_FORMAT,
        "readonly": "1",
        **{f"param_{name}": escaped(str(value)) for name, value in given.items()},
    }
    url = f"{config.url.rstrip('/')}/?{urllib.parse.urlencode(parameters)}"
    if not url.startswith(("http://", "https://")):
        raise MillraceError(f"clickhouse.url must look like http://host:8123, got {config.url!r}")
    headers = {"X-ClickHouse-User": config.username, "X-ClickHouse-Key": config.password}
    request = urllib.request.Request(url, data=sql.encode(), headers=headers)  # noqa: S310 (checked)
    context = client_context("clickhouse", config) if url.startswith("https://") else None
    try:
        with open_directly(request, timeout_s=_TIMEOUT_S, context=context) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise QueryError.of(error.read().decode(errors="replace")) from error
    except OSError as error:
        raise_refusal(error, config)
        reason = getattr(error, "reason", error)
        raise NoStoreError(f"no ClickHouse answers at {config.url}: {reason}") from error
    return body


def ask_embedded(sql: str, store: Path, database: str, given: Mapping[str, Value]) -> bytes:
    """The answer of the store in a folder that no other process has. Raises as ``ask`` does."""
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
