"""``millrace sql``: ask the analytics store."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from cli.endpoints import add_data_argument, locate, read_endpoints
from schemas.errors import MillraceError

if TYPE_CHECKING:
    from schemas.config import ClickHouseConfig

_WIRE_FORMAT = "JSONCompact"
_FORMAT_CLAUSE = re.compile(r"\bFORMAT\s+\w+\s*;?\s*\Z", re.IGNORECASE)
_MAX_SHOWN_CHARS = 2_000
_TIMEOUT_S = 60.0


class StoreAwayError(MillraceError):
    """Neither a running store nor a folder of one."""

    code = "store_unavailable"
    retryable = True


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace sql``."""
    parser = subparsers.add_parser(
        "sql",
        help="ask the analytics store",
        description="Run one reading statement (SELECT, WITH, SHOW, DESCRIBE, EXPLAIN) in the "
        "database millrace: on the system that runs on DIR, else on the store that it left there.",
    )
    parser.add_argument("query", metavar="SQL")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """0; 1 if the engine refuses the query. Raises StoreAwayError if there is no store."""
    from cli.rows import parse_rows, render
    from telemetry.reading import QueryError

    sql = _checked(arguments.query)
    try:
        answer = ask(sql, arguments.data)
        rendered = render(parse_rows(answer), arguments.format)
    except QueryError as error:
        print(f"millrace sql: {error.message[:_MAX_SHOWN_CHARS].strip()}", file=sys.stderr)
        return 1
    sys.stdout.write(rendered)
    return 0


def _checked(query: str) -> str:
    from telemetry.reading import QueryError
    from telemetry.sql_guard import require_reading

    try:
        sql = require_reading(query)
    except QueryError as error:
        why = error.message.rpartition(": ")[2].removesuffix("(READONLY)").strip()
        raise MillraceError(f"one reading statement is run at a time: {why}") from error
    if _FORMAT_CLAUSE.search(sql):
        raise MillraceError("leave FORMAT out of the query and use --format")
    return sql


def ask(sql: str, data: Path) -> bytes:
    """The JSONCompact answer to a reading statement: of the server, or of the embedded store if
    none is configured, or if that of the system on ``data`` has ended. Raises StoreAwayError, and
    QueryError if the engine refuses the query."""
    config = locate(data).clickhouse
    store = Path(config.path or data / "clickhouse")
    if config.url:
        try:
            return _post(sql, config)
        except StoreAwayError:
            ran_here = read_endpoints(data)
            if ran_here is None or config.url != ran_here.clickhouse or not store.is_dir():
                raise
    if not store.is_dir():
        raise StoreAwayError(
            f"nothing runs on {data} and no store is there; start it with millrace up --data "
            f"{data}, or name a server in MILLRACE_CLICKHOUSE__URL"
        )
    return asyncio.run(_read_embedded(sql, store, config.database))


def _post(sql: str, config: ClickHouseConfig) -> bytes:
    from telemetry.reading import QueryError

    parameters = {"database": config.database, "default_format": _WIRE_FORMAT, "readonly": "1"}
    url = f"{config.url.rstrip('/')}/?{urllib.parse.urlencode(parameters)}"
    if not url.startswith(("http://", "https://")):
        raise MillraceError(f"clickhouse.url must look like http://host:8123, got {config.url!r}")
    headers = {"X-ClickHouse-User": config.username, "X-ClickHouse-Key": config.password}
    request = urllib.request.Request(url, data=sql.encode(), headers=headers)  # noqa: S310 (checked)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise QueryError.of(error.read().decode(errors="replace")) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise StoreAwayError(f"no ClickHouse answers at {config.url}: {reason}") from error
    return body


async def _read_embedded(sql: str, store: Path, database: str) -> bytes:
    from telemetry.reading import ReadLimits
    from telemetry.reading_embedded import EmbeddedReader

    try:
        reader = EmbeddedReader(str(store), database, ReadLimits(max_running=1))
    except RuntimeError as error:
        raise StoreAwayError(f"the store {store} cannot be opened: {error}") from error
    try:
        return await reader.read(sql, {}, _WIRE_FORMAT)
    finally:
        await reader.close()
