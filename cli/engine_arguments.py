"""Options of ``millrace up`` for its workers: their number per model, and their engines."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.cli.arguments import as_path, whole_number
from millrace.runtime.connection_settings import check_user_data
from millrace.schemas.config import AutoscaleConfig, EngineConfig
from millrace.schemas.engines import (
    QUANTIZATIONS,
    SPECULATIONS,
    EngineKind,
    WorkerRole,
    check_parallel,
    check_quantization,
    check_remote_stages,
    check_speculation,
    speculation_option,
)
from millrace.schemas.errors import ConfigError, MillraceError


def add_own_engine(group: argparse._ArgumentGroup) -> None:
    """Declare the options for running models on Millrace's own engine."""
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantization of wide weights at load, on Millrace's own engine (default: from the "
        "catalogue, else none)",
    )
    group.add_argument(
        "--speculation",
        type=speculation_option,
        metavar="|".join(SPECULATIONS),
        help="speculative decoding on Millrace's own engine, which does not change the tokens: "
        "its method, with the path of a draft or EAGLE-3 head (default: from the catalogue, else "
        "ngram if rows are batch-invariant)",
    )
    add_ranks(group)


def add_ranks(group: argparse._ArgumentGroup) -> None:
    """Declare the options for the ranks over which Millrace's own engine computes a model."""
    group.add_argument(
        "--tensor-parallel",
        type=whole_number,
        metavar="N",
        help="ranks that compute each layer together, a process each, on Millrace's own engine "
        "(default: from the catalogue, else 1)",
    )
    group.add_argument(
        "--pipeline-parallel",
        type=whole_number,
        metavar="N",
        help="pipeline stages, each with some of the layers, on Millrace's own engine (default: "
        "from the catalogue, else 1)",
    )
    group.add_argument(
        "--expert-parallel",
        action="store_true",
        default=None,
        help="give each rank some of a mixture's experts whole, rather than a slice of all experts",
    )
    group.add_argument(
        "--remote-stages",
        type=whole_number,
        metavar="N",
        help="number of stages, counted from the last one, on other hosts, each run by millrace "
        "stages --join (default: 0)",
    )
    group.add_argument(
        "--stages-address",
        metavar="HOST:PORT",
        help="address at which they join; beyond this machine it needs a token (default: "
        "127.0.0.1:7500)",
    )
    group.add_argument(
        "--stages-token-file",
        type=as_path,
        metavar="FILE",
        help="file with the token of these hosts",
    )


def told_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings of the options of ``add_ranks``. Raises ConfigError."""
    from millrace.runtime.tls import read_setting_file

    given = {
        "tensor_parallel": arguments.tensor_parallel,
        "pipeline_parallel": arguments.pipeline_parallel,
        "expert_parallel": arguments.expert_parallel,
        "remote_stages": arguments.remote_stages,
        "stages_address": arguments.stages_address,
    }
    file = arguments.stages_token_file
    if file is not None:
        given["stages_token"] = token = read_setting_file("--stages-token-file", str(file)).strip()
        if not token:
            raise ConfigError(f"--stages-token-file: {file} is empty.")
    return {name: value for name, value in given.items() if value is not None}


def add_other_engine(group: argparse._ArgumentGroup) -> None:
    """Declare the address options of another engine's server."""
    group.add_argument("--engine-url", metavar="URL", help="URL of a running server of that engine")
    group.add_argument(
        "--engine-command",
        metavar="PROGRAM",
        help="command that starts such a server (default: its name)",
    )
    group.add_argument(
        "--engine-arguments",
        metavar="TEXT",
        help='further arguments of its command line, such as "--tensor-parallel-size 4"',
    )


def told_engine(engine: EngineConfig, arguments: argparse.Namespace) -> EngineConfig:
    """Return the settings, changed by the command line.

    Raises ConfigError for an option that the engine does not support.
    """
    given = {
        "quantization": arguments.quantization,
        "speculation": arguments.speculation,
        **told_ranks(arguments),
        **_of_other_engine(arguments),
    }
    told = {name: value for name, value in given.items() if value is not None}
    engine = msgspec.structs.replace(engine, **told)
    check_quantization(engine.quantization, engine.kind)
    check_speculation(engine.speculation, engine.kind)
    check_parallel(
        engine.tensor_parallel, engine.pipeline_parallel, engine.expert_parallel, engine.kind
    )
    check_remote_stages(engine.remote_stages, engine.kind)
    if engine.kind is EngineKind.OPENAI and not engine.url:
        raise ConfigError("--engine openai needs --engine-url: the URL of a running server.")
    check_user_data("--engine-url", engine.url)
    return engine


def _of_other_engine(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "kind": arguments.engine and EngineKind(arguments.engine),
        "url": arguments.engine_url,
        "command": arguments.engine_command and absolute_command(arguments.engine_command),
        "arguments": arguments.engine_arguments and split_arguments(arguments.engine_arguments),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and arguments.engine in (None, EngineKind.REAL, EngineKind.SIMULATED):
        names = ", ".join(f"--engine-{name}" for name in given if name != "kind")
        if names:
            raise ConfigError(f"{names} goes with --engine and the name of another engine.")
    return given


def split_arguments(text: str) -> tuple[str, ...]:
    """Split a command line as the shell does. Raises ConfigError for an unclosed quote."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--engine-arguments cannot be read: {error}.") from error


def absolute_command(command: str) -> str:
    """Make the path of a program, or of a custom engine's file, absolute."""
    return str(Path(command).expanduser().resolve()) if "/" in command else command


class FirstWorkers(NamedTuple):
    """Initial workers of a model: their number and their roles; empty: each has both roles."""

    number: int
    roles: tuple[WorkerRole, ...] = ()


def workers_option(text: str) -> FirstWorkers:
    """Parse ``N``, or a number of workers for each role (``prefill:1,decode:2``). Raises
    ArgumentTypeError."""
    if re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        return FirstWorkers(int(text))
    roles: list[WorkerRole] = []
    for part in text.split(","):
        name, _, count = part.partition(":")
        if name not in set(WorkerRole) or not re.fullmatch(r"[1-9]\d{0,3}", count, re.ASCII):
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number nor ROLE:N,ROLE:N with roles of "
                f"{', '.join(WorkerRole)}, such as prefill:1,decode:2"
            )
        roles += [WorkerRole(name)] * int(count)
    return FirstWorkers(len(roles), tuple(roles))


def parse_bounds(text: str, at_most: int) -> tuple[int, int]:
    """Parse MIN, at least 0, and MAX, from 1 to ``at_most``. Raises ConfigError."""
    matched = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if matched is None:
        raise ConfigError(f"--autoscale: {text!r} is not MIN:MAX, such as 1:4")
    fewest, most = int(matched[1]), int(matched[2])
    if not 1 <= most <= at_most:
        raise ConfigError(f"--autoscale: MAX must be between 1 and {at_most}, got {most}")
    if fewest > most:
        raise ConfigError(f"--autoscale: MIN is {fewest}, which is more than MAX, {most}")
    return fewest, most


def num_first(autoscale: AutoscaleConfig, asked: int | None) -> int:
    """Return the initial number of workers per model. It is at least 1, since the start ends when
    each model has answered."""
    if not autoscale.is_on:
        return asked or 1
    if not 0 <= autoscale.min_workers <= autoscale.max_workers:
        raise ConfigError(
            f"scheduler.autoscale: min_workers is {autoscale.min_workers}, which is not between 0 "
            f"and max_workers, {autoscale.max_workers}."
        )
    if not 0 <= autoscale.warm <= autoscale.max_workers:
        raise ConfigError(
            f"scheduler.autoscale: warm is {autoscale.warm}, which is not between 0 and "
            f"max_workers, {autoscale.max_workers}."
        )
    if (asked or 1) > autoscale.max_workers:
        raise MillraceError(
            f"--workers {asked} is more than autoscaling allows, which is {autoscale.max_workers}"
        )
    return max(asked or 1, autoscale.min_workers)
