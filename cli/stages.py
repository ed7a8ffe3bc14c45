"""``millrace stages``: compute stages of a model whose worker is on another host."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from millrace.cli.arguments import as_path, path_or_name, whole_number
from millrace.schemas.errors import ConfigError

_LEVELS = ("debug", "info", "warning", "error")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace stages``."""
    parser = subparsers.add_parser(
        "stages",
        help="compute stages of a worker on another host",
        description="Join a worker that was started with --remote-stages and compute its remote "
        "stages: some layers of its model, with their part of the KV cache, on CPUs if the worker "
        "computes on CPUs, else on GPUs, one for each rank of a stage. The command joins again "
        "whenever the worker restarts its model, and runs until Ctrl-C or SIGTERM. The connection "
        "between the hosts is not encrypted, so keep it to a private network. The exit code is 2 "
        "if one side refuses the other.",
    )
    parser.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="address of the worker: its worker.engine.stages_address",
    )
    parser.add_argument(
        "--model",
        type=as_path,
        metavar="PATH",
        help="the same checkpoint on this host (default: the worker's path)",
    )
    parser.add_argument(
        "--token-file",
        type=as_path,
        metavar="FILE",
        help="file with the token of the worker (default: worker.engine.stages_token of the "
        "settings, such as by MILLRACE_WORKER__ENGINE__STAGES_TOKEN)",
    )
    parser.add_argument(
        "--max-stages",
        type=whole_number,
        default=1,
        metavar="N",
        help="most stages that this host computes at a time, of one worker or of several "
        "(default: 1)",
    )
    parser.add_argument("--config", type=path_or_name, help="a YAML or TOML file of settings")
    parser.add_argument("--log-level", choices=_LEVELS, default="info")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Compute until Ctrl-C or SIGTERM; return 0. Raises the error with which one side refuses the
    other."""
    from millrace.engine.transfer.addresses import host_and_port
    from millrace.runtime.logs import configure_logging
    from millrace.runtime.settings import load_config
    from millrace.runtime.tls import read_setting_file

    if arguments.max_stages < 1:
        raise ConfigError("--max-stages must be at least 1")
    address = host_and_port(arguments.join, "--join")
    if arguments.token_file is None:
        token = load_config(arguments.config, os.environ).worker.engine.stages_token
    else:
        token = read_setting_file("--token-file", str(arguments.token_file)).strip()
        if not token:
            raise ConfigError(f"--token-file: {arguments.token_file} is empty.")
    path = None if arguments.model is None else _checkpoint(arguments.model)
    configure_logging("stages", arguments.log_level)
    # Imports torch.
    from millrace.engine.parallel.remote.host import Joining, StageHost

    host = StageHost(Joining(address, token, path, arguments.max_stages))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: host.stop())
    host.run()
    return 0


def _checkpoint(path: Path) -> Path:
    """Return the checkpoint's folder. Raises ConfigError if there is none."""
    path = path.expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model: {path} holds no config.json; name a checkpoint's folder.")
    return path
