"""``millrace adapters``: which LoRA adapters a system offers, one more, or one less."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millrace.cli.adapter_options import offered_adapter
from millrace.cli.arguments import path_or_name
from millrace.cli.store_access import (
    add_store_arguments,
    print_json,
    served_catalogue,
    with_store,
)

if TYPE_CHECKING:
    from millrace.runtime.redis.link import RedisLink
    from millrace.schemas.models.adapters import Adapter


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace adapters`` and its own commands."""
    parser = subparsers.add_parser(
        "adapters",
        help="list, add or remove LoRA adapters of a running system",
        description="LoRA adapters that requests may name as their model, by their own name or as "
        "MODEL:NAME, while the system runs: in the Redis of the system that runs on DIR or of the "
        "one that --redis, --config or MILLRACE_REDIS__URL names.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="adapters_command", required=True)
    listing = commands.add_parser("list", help="all adapters")
    add_store_arguments(listing, _list)

    add = commands.add_parser("add", help="offer an adapter")
    add.add_argument("name", metavar="NAME")
    add.add_argument(
        "path",
        type=path_or_name,
        metavar="PATH",
        help="its folder in PEFT's layout, there on the machines of gateways and workers, or its "
        "address in an object store (s3://bucket/path), or its hub id",
    )
    add.add_argument("--model", metavar="NAME", help="whose it is, where there are several models")
    add.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="T",
        help="whom it is for alone; may be given several times (default: all)",
    )
    add.add_argument("--description", default="", metavar="TEXT")
    add.add_argument(
        "--replace",
        action="store_true",
        help="take the place of the adapter of that name; what runs with it goes on with it",
    )
    add_store_arguments(add, _add)

    remove = commands.add_parser(
        "remove", help="offer an adapter no more; what runs with it goes on"
    )
    remove.add_argument("name", metavar="NAME")
    add_store_arguments(remove, _remove)


def _list(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.adapters import AdapterStore

    async def read(link: RedisLink) -> list[Adapter]:
        return await AdapterStore(link).all()

    found = with_store(arguments, read)
    if arguments.json:
        print_json(found)
        return 0
    from rich.console import Console
    from rich.table import Table

    if not found:
        print("no adapters; add one with millrace adapters add NAME PATH")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("adapter", "model", "version", "rank", "MB", "for", "source"):
        table.add_column(heading, overflow="fold")
    for one in found:
        table.add_row(
            one.name,
            one.model,
            one.version,
            str(one.rank),
            f"{one.size_bytes / 1e6:.1f}",
            ", ".join(one.tenants) or "all",
            one.source,
        )
    Console().print(table)
    return 0


def _add(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.adapters import AdapterStore

    adapter = offered_adapter(
        served_catalogue(arguments),
        arguments.name,
        arguments.path,
        model=arguments.model,
        tenants=arguments.tenant,
        description=arguments.description,
    )

    async def store(link: RedisLink) -> None:
        await AdapterStore(link).add(adapter, replace=arguments.replace)

    with_store(arguments, store)
    if arguments.json:
        print_json(adapter)
    else:
        print(
            f"{adapter.name} is offered, of rank {adapter.rank}, as {adapter.name} or "
            f"{adapter.model}:{adapter.name}"
        )
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.adapters import AdapterStore

    async def remove(link: RedisLink) -> Adapter:
        return await AdapterStore(link).remove(arguments.name)

    removed = with_store(arguments, remove)
    if arguments.json:
        print_json(removed)
    else:
        print(f"{removed.name} is offered no more; what runs with it goes on")
    return 0
