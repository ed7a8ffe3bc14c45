"""Redis access of commands that change a system's stored data: options, address and connection."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from millrace.cli.arguments import path_or_name
from millrace.cli.endpoints import add_data_argument, locate, read_endpoints, running_config
from millrace.schemas.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from millrace.registry.catalogue import Catalogue
    from millrace.runtime.redis.link import RedisLink
    from millrace.schemas.config import Config

_T = TypeVar("_T")

_NAMES_REDIS = {"MILLRACE_REDIS__URL", "MILLRACE_REDIS__URL_FILE", "MILLRACE_CONFIG"}


def add_store_arguments(
    parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], int]
) -> None:
    """Declare ``--json``, and the address of the store: ``--redis``, ``--config`` or ``--data``."""
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    group = parser.add_argument_group("where")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--redis", metavar="URL", help="the server to use instead")
    where.add_argument(
        "--config",
        type=path_or_name,
        metavar="FILE",
        help="the configuration that names the server",
    )
    add_data_argument(group)
    parser.set_defaults(handler=action)


def locate_store(arguments: argparse.Namespace) -> Config:
    """Return the configuration with the address to use.

    Raises ConfigError if no option names an address: a default could reach another system.
    """
    import msgspec

    from millrace.runtime.connection_settings import check_connections
    from millrace.runtime.settings import load_config

    if arguments.config is not None:
        return load_config(arguments.config, os.environ)
    endpoints = read_endpoints(arguments.data)
    named = arguments.redis is not None or not _NAMES_REDIS.isdisjoint(os.environ)
    if not named and endpoints is None:
        raise ConfigError(
            f"Nothing runs on {arguments.data}. Start it with millrace up --data {arguments.data}, "
            "or give --redis URL."
        )
    config = locate(arguments.data)
    if arguments.redis is None:
        return config
    redis = msgspec.structs.replace(config.redis, url=arguments.redis)
    config = msgspec.structs.replace(config, redis=redis)
    check_connections(config)
    return config


def served_catalogue(arguments: argparse.Namespace) -> Catalogue:
    """Return the models that the system serves, as far as this machine knows."""
    from millrace.registry.catalogue import load_catalogue

    running = None if arguments.config is not None else running_config(arguments.data)
    config = running or locate_store(arguments)
    return load_catalogue(config.catalogue)


def print_json(value: object) -> None:
    """Print a value in the format of ``--json``."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def answer(arguments: argparse.Namespace, value: object, text: str) -> int:
    """Print the value with ``--json``, else the text. Returns the exit code 0."""
    if arguments.json:
        print_json(value)
    else:
        print(text)
    return 0


def print_columns(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in the width of the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def with_store(arguments: argparse.Namespace, action: Callable[[RedisLink], Awaitable[_T]]) -> _T:
    """Return the result of ``action``. Raises MillraceError if Redis cannot be reached."""
    from millrace.runtime.redis.link import RedisLink, RedisUnreachableError

    config = locate_store(arguments).redis

    async def work() -> _T:
        link = RedisLink(config)
        try:
            return await action(link)
        except RedisUnreachableError as error:
            await link.check()
            host = config.url.rpartition("@")[2]  # what is before it may be a password
            raise MillraceError(f"no Redis answers at {host}") from error
        finally:
            await link.close()

    return asyncio.run(work())
