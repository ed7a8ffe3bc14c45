"""``millrace adapters``: list, add and remove LoRA adapters of a running system."""

from __future__ import annotations

import argparse

from millrace.cli.adapter_options import offered_adapter
from millrace.cli.arguments import path_or_name
from millrace.cli.store_access import (
    add_store_arguments,
    answer,
    print_columns,
    served_catalogue,
    with_store,
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace adapters`` and its subcommands."""
    parser = subparsers.add_parser(
        "adapters",
        help="list, add or remove LoRA adapters of a running system",
        description="LoRA adapters of a running system, which requests name as their model, as "
        "NAME or MODEL:NAME. They are kept in the Redis of the system that runs on DIR or in the "
        "Redis that --redis, --config or MILLRACE_REDIS__URL names.",
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
        help="its folder in PEFT's layout on the machines of gateways and workers, its address in "
        "an object store (s3://bucket/path), or its hub id",
    )
    add.add_argument("--model", metavar="NAME", help="its model, if there are several models")
    add.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="T",
        help="tenant that may use it; may be given several times (default: all)",
    )
    add.add_argument("--description", default="", metavar="TEXT")
    add.add_argument(
        "--replace",
        action="store_true",
        help="replace the adapter of that name; running requests keep the old one",
    )
    add_store_arguments(add, _add)

    remove = commands.add_parser(
        "remove", help="stop offering an adapter; running requests keep it"
    )
    remove.add_argument("name", metavar="NAME")
    add_store_arguments(remove, _remove)


def _list(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.adapters import AdapterStore

    found = with_store(arguments, lambda link: AdapterStore(link).all())
    if arguments.json or not found:
        return answer(arguments, found, "no adapters; add one with millrace adapters add NAME PATH")
    print_columns(
        ("adapter", "model", "version", "rank", "MB", "for", "source"),
        (
            (
                *(one.name, one.model, one.version, str(one.rank)),
                *(f"{one.size_bytes / 1e6:.1f}", ", ".join(one.tenants) or "all", one.source),
            )
            for one in found
        ),
    )
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
    with_store(arguments, lambda link: AdapterStore(link).add(adapter, replace=arguments.replace))
    return answer(
        arguments,
        adapter,
        f"{adapter.name} is offered, of rank {adapter.rank}, as {adapter.name} or "
        f"{adapter.model}:{adapter.name}",
    )


def _remove(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.adapters import AdapterStore

    removed = with_store(arguments, lambda link: AdapterStore(link).remove(arguments.name))
    said = f"{removed.name} is no longer offered; running requests keep it"
    return answer(arguments, removed, said)
