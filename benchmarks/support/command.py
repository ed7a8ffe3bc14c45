"""Command line of benchmarks: a folder is a subject, and its parts are functions."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

RESULTS = Path(__file__).parents[1] / "results"


class PartResult(NamedTuple):
    """Figures of a part, whether it met its goals, and the file in ``RESULTS`` for ``--save``."""

    figures: object
    met_goals: bool = True
    file: str = ""


def run_parts(package: str, description: str | None, parts: Mapping[str, str]) -> int:
    """Run ``python -m PACKAGE``, such as benchmarks.kv. Return 0 if all goals were met, else 1.

    ``parts`` has ``module:function`` by name. The parameters of a function are the options of its
    part. One part runs in this process; several run one after the other, each in its own process.
    """
    name = package.rpartition(".")[2]
    first = argparse.ArgumentParser(prog=f"python -m {package}", add_help=False, allow_abbrev=False)
    _add_only(first, parts)
    chosen, options = first.parse_known_args()
    if len(chosen.only) == 1:
        module_name, _, function = parts[chosen.only[0]].partition(":")
        module = import_module(f".{module_name}", package)
        return run_command(name, getattr(module, function), module.__doc__, chosen.only[0], options)
    if {"-h", "--help"} & set(options):
        parser = command_parser(name, description)
        _add_only(parser, parts)
        parser.parse_args()
    command = [sys.executable, "-m", package]
    codes = [
        subprocess.run([*command, "--only", part, *options], check=False).returncode
        for part in chosen.only or parts
    ]
    return int(any(codes))


def run_command(
    name: str,
    function: Callable[..., PartResult | None],
    description: str | None,
    part: str = "",
    given: Sequence[str] | None = None,
) -> int:
    """Run a function whose parameters are options, and write its figures to the chosen files.

    Positional-only parameters are arguments without an option's name.

    Returns 0 if the goals were met, else 1. A run with ``--smoke`` has no goals.
    """
    parser = command_parser(f"{name} --only {part}" if part else name, description)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--save", action="store_true", help="write the figures to benchmarks/results"
    )
    positional = []
    for parameter in signature(function, eval_str=True).parameters.values():
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            parser.add_argument(parameter.name, type=parameter.annotation)
            positional.append(parameter.name)
        else:
            _add_option(parser, parameter)
    options = vars(parser.parse_args(given))
    arguments = [options.pop(name) for name in positional]
    file, is_saved = options.pop("json"), options.pop("save")
    result = function(*arguments, **options) or PartResult(None)
    if is_saved:
        file = RESULTS / (result.file or (f"{name}/{part}.json" if part else f"{name}.json"))
    write_json(file, result.figures)
    return 0 if result.met_goals or options.get("smoke") else 1


def _add_only(parser: argparse.ArgumentParser, parts: Mapping[str, str]) -> None:
    text = "run these parts only; --only PART --help shows the options of a part"
    parser.add_argument("--only", nargs="+", choices=list(parts), default=[], help=text)


def _add_option(parser: argparse.ArgumentParser, parameter: Parameter) -> None:
    """Add an option for a parameter with a default."""
    kind, default = parameter.annotation, parameter.default
    origin, kinds = get_origin(kind), get_args(kind)
    if kinds and get_origin(kinds[0]) is Literal and origin is not Sequence:
        origin, kinds = Literal, get_args(kinds[0])  # or None
    more: dict[str, Any] = {"type": kinds[0] if kinds else kind}
    if kind is bool:
        more = {"action": "store_true"}
    elif origin is Literal:
        more = {"choices": kinds}
    elif origin is Sequence:
        choices = get_args(kinds[0])
        more = {"nargs": "+", **({"choices": choices} if choices else more)}
    flag = f"--{parameter.name.replace('_', '-')}"
    is_required = default is Parameter.empty
    parser.add_argument(
        flag, default=default, required=is_required, help="default: %(default)s", **more
    )


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.<name>``; its help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def write_json(file: Path | None, figures: object) -> None:
    """Write figures to a file, if one is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
