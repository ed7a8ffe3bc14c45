"""``millrace migrate``: update the tables of an analytics store."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.cli.analytics.store import NoDatabaseError, ask_store
from millrace.cli.arguments import path_or_name
from millrace.cli.endpoints import add_data_argument
from millrace.cli.running import supervising
from millrace.schemas.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from millrace.schemas.config import ClickHouseConfig

_NUMBERS = "SELECT number FROM schema_migrations"
# ClickHouse's error codes for an unknown table and an unknown database.
_NOT_MADE = frozenset({60, 81})


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace migrate``."""
    parser = subparsers.add_parser(
        "migrate",
        help="update the tables of an analytics store",
        description="Run the migrations that a store lacks, update comments and views that differ "
        "from this version's, and list the changes. The store is the server that --config or "
        "MILLRACE_CLICKHOUSE__URL names, else the store in DIR. Telemetry does the same at each "
        "start. A store in a folder belongs to the system that runs on it; --dry-run asks that "
        "system.",
    )
    parser.add_argument(
        "--config",
        type=path_or_name,
        metavar="FILE",
        help="a configuration file that names the store",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the pending changes")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Migrate the store; return 0. Raises ConfigError, NoStoreError, StoreUnavailableError,
    MigrationError."""
    config = _store_of(arguments)
    folder = "" if config.url else config.path or str(arguments.data / "clickhouse")
    where = config.url or folder
    if arguments.dry_run:
        names = _pending(config, arguments.data)
        title = f"Would run on {where}:"
    else:
        names = asyncio.run(_migrate(msgspec.structs.replace(config, path=folder)))
        title = f"Ran on {where}:"
    if names:
        print("\n  ".join([title, *names]))
    else:
        print(f"The tables of {where} are up to date.")
    return 0


def _store_of(arguments: argparse.Namespace) -> ClickHouseConfig:
    """Return the configuration of the store; it names no store if the store is the one in
    ``--data``.

    Raises ConfigError if there is no store, MillraceError if a store to change is in use.
    """
    from millrace.runtime.settings import load_config

    config = load_config(arguments.config, os.environ).clickhouse
    if config.url and config.path:
        raise ConfigError("set exactly one of clickhouse.url and clickhouse.path")
    if config.url or config.path:
        return config
    if arguments.config is not None:
        raise ConfigError(
            f"{arguments.config} names no store: set clickhouse.url or clickhouse.path in it."
        )
    data: Path = arguments.data
    if supervising(data) is not None and not arguments.dry_run:
        raise MillraceError(
            f"Millrace runs on {data}, and its telemetry has brought the store up to date when it "
            "started; see it with --dry-run, or stop it first (millrace down) to migrate by hand"
        )
    if not data.is_dir():
        raise ConfigError(
            f"{data} is not there, and no server is named: give --data, --config or "
            "MILLRACE_CLICKHOUSE__URL."
        )
    return config


async def _migrate(config: ClickHouseConfig) -> list[str]:
    from millrace.telemetry.store.migrate import migrate
    from millrace.telemetry.store.store import Store

    store = await Store.open(config)
    try:
        return await migrate(store)
    finally:
        await store.close()


def _pending(config: ClickHouseConfig, data: Path) -> list[str]:
    """List the migrations that the store lacks and the differences in comments and views. Changes
    nothing."""
    from millrace.telemetry.store.migrate import lacking
    from millrace.telemetry.store.views import STATE, Changes, Existing

    applied = {int(number) for (number,) in _rows(_NUMBERS, config, data)}
    names = [migration.name for migration in lacking(applied, config.database)]
    existing = Existing.of(_rows(STATE, config, data))
    return names + Changes.of(existing, config.database).summary()


def _rows(statement: str, config: ClickHouseConfig, data: Path) -> list[tuple[Any, ...]]:
    """Return the rows of the store's answer; empty if its database or the table does not exist."""
    from millrace.cli.analytics.rows import parse_rows
    from millrace.telemetry.store.reading import QueryError

    folder = Path(config.path or data / "clickhouse")
    if not (config.url or folder.is_dir() or supervising(data)):
        return []
    try:
        answer = ask_store(statement, config, data, {})
    except NoDatabaseError:
        return []
    except QueryError as error:
        if error.number in _NOT_MADE:
            return []
        raise
    return list(parse_rows(answer).rows)
