"""``millrace models``: list, add and remove models of a running system."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from millrace.cli.arguments import path_or_name, whole_number
from millrace.cli.endpoints import add_data_argument
from millrace.cli.engine_arguments import absolute_command, split_arguments
from millrace.cli.operate import rollouts
from millrace.cli.operate.status import ask_system, change, from_anywhere
from millrace.cli.running import supervising
from millrace.schemas.engines import QUANTIZATIONS, EngineKind
from millrace.schemas.errors import ConfigError

_ANSWERS_WITHIN_S = 10.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace models`` and its subcommands."""
    parser = subparsers.add_parser(
        "models",
        help="list, add, remove and roll out models while the system runs",
        description="List the models of the system that runs on DIR, add one or remove one, while "
        "it serves the others. Changes are kept when millrace up is started again on the folder; "
        "models of its --model are always served, even if they were removed.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="models_command", required=True)

    listing = commands.add_parser("list", help="list the models, their workers and sources")
    listing.add_argument("--json", action="store_true", help="answer in JSON")
    _add_common(listing, _list)

    add = commands.add_parser(
        "add",
        help="serve one more",
        description="Start workers for a model and offer it once one of them has answered. Nothing "
        "changes if that fails.",
    )
    add.add_argument(
        "name",
        metavar="NAME",
        help="name for clients; NAME@VERSION is a version of the model NAME",
    )
    add.add_argument(
        "--model",
        type=path_or_name,
        metavar="NAME|PATH",
        help="a model of the catalogue, a folder in Hugging Face layout, a GGUF file or a hub id "
        "(default: the model NAME of the catalogue)",
    )
    add.add_argument(
        "--workers", type=whole_number, default=1, help="number of workers (default: %(default)s)"
    )
    add.add_argument(
        "--engine",
        choices=[kind.value for kind in EngineKind],
        help="its engine (default: the engine of the other models)",
    )
    add.add_argument("--engine-url", metavar="URL", default="", help="URL of a running server")
    add.add_argument("--engine-command", metavar="PROGRAM", default="", help="what starts one")
    add.add_argument("--engine-arguments", metavar="TEXT", default="", help="its command line")
    add.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantize the weights at load (default: from the catalogue)",
    )
    _add_common(add, _add)

    remove = commands.add_parser(
        "remove",
        help="serve one less",
        description="Stop offering a model, let its workers finish their requests within their "
        "drain time, and stop them. Requests that still wait then end with the error "
        "model_not_found.",
    )
    remove.add_argument("name", metavar="NAME")
    _add_common(remove, _remove)
    rollouts.add_commands(commands)


def _add_common(
    parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], int]
) -> None:
    add_data_argument(parser)
    parser.set_defaults(handler=action)


def _list(arguments: argparse.Namespace) -> int:
    import msgspec

    from millrace.cli.local.control import StatusRequest, SystemReport
    from millrace.runtime.text_table import text_table

    report = ask_system(arguments.data, StatusRequest(), _ANSWERS_WITHIN_S)
    assert isinstance(report, SystemReport)
    if arguments.json:
        print(msgspec.json.encode(report.models).decode())
        return 0
    rows = [
        (
            *(model.name, model.state, str(model.workers), model.engine),
            *("added" if model.added else "", model.source),
        )
        for model in report.models
    ]
    names = ("model", "state", "workers", "engine", "", "source")
    print(text_table(names, rows, (False, False, True, False, False, False)), end="")
    return 0


def _add(arguments: argparse.Namespace) -> int:
    from millrace.cli.local.control import AddModelRequest

    given = (arguments.engine_url, arguments.engine_command, arguments.engine_arguments)
    if any(given) and arguments.engine in (None, EngineKind.REAL, EngineKind.SIMULATED):
        raise ConfigError(
            "--engine-url, --engine-command and --engine-arguments go with --engine and the name "
            "of another engine."
        )
    if arguments.engine == EngineKind.OPENAI and not arguments.engine_url:
        raise ConfigError("--engine openai needs --engine-url: where a server runs already.")
    return change(
        arguments.data,
        AddModelRequest(
            name=arguments.name,
            model=from_anywhere(arguments.model or arguments.name),
            workers=arguments.workers,
            engine=arguments.engine and EngineKind(arguments.engine),
            engine_url=arguments.engine_url,
            engine_command=absolute_command(arguments.engine_command),
            engine_arguments=split_arguments(arguments.engine_arguments),
            quantization=arguments.quantization,
        ),
    )


def _remove(arguments: argparse.Namespace) -> int:
    from millrace.cli.local.control import RemoveModelRequest

    if supervising(arguments.data) is None and _forget(arguments.data, arguments.name):
        return 0
    return change(arguments.data, RemoveModelRequest(arguments.name))


def _forget(data: Path, name: str) -> bool:
    """Forget a model that was added earlier to a system that does not run; return whether it was
    added.

    Without this, a model whose workers no longer come up would block every start.
    """
    from millrace.cli.local.models import read_saved, with_removed, write_saved

    saved = read_saved(data)
    if name not in saved.added:
        return False
    write_saved(data, with_removed(saved, name))
    print(f"Nothing runs on {data}; {name} is not served when it is started again")
    return True
