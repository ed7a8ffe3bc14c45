"""The ``millrace`` command: one module for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from cli.help import Parser
from schemas.errors import MillraceError

# Each has add_parser(subparsers), which sets ``handler``: a function from the parsed arguments to
# the exit code. They import what is heavy when they run, so that --help is quick.
_COMMANDS = {
    "run a system": {
        "up": "cli.local.up",
        "status": "cli.operate.status",
        "logs": "cli.operate.logs",
        "down": "cli.operate.down",
        "models": "cli.operate.models",
        "keys": "cli.keys.command",
        "top": "cli.top.command",
    },
    "send it work": {
        "publish": "cli.requests.publish",
        "result": "cli.requests.result",
    },
    "ask what happened": {
        "sql": "cli.analytics.sql",
        "usage": "cli.analytics.usage",
        "migrate": "cli.analytics.migrate",
    },
    "work without a system": {
        "generate": "cli.offline.generate",
        "embed": "cli.offline.embed",
    },
    "measure and plan": {
        "bench": "cli.bench.arguments",
        "simulate": "cli.simulate.arguments",
    },
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    groups = {name: heading for heading, commands in _COMMANDS.items() for name in commands}
    parser = Parser(
        prog="millrace", description="Event-driven LLM serving on a message bus.", groups=groups
    )
    parser.add_argument("--version", action="version", version=f"millrace {version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for commands in _COMMANDS.values():
        for module in commands.values():
            importlib.import_module(module).add_parser(subparsers)
    return parser


def version() -> str:
    """Of the installed package; of a checkout that nobody installed, what its pyproject.toml
    says."""
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:
        projects = (folder / "pyproject.toml" for folder in Path(__file__).parents)
        project = next((file for file in projects if file.is_file()), None)
        told = {} if project is None else tomllib.loads(project.read_text(encoding="utf-8"))
        return str(told.get("project", {}).get("version", "unknown"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A usage or configuration error is 2, with one sentence on
    stderr."""
    parsed = build_parser().parse_args(arguments)
    try:
        code: int = parsed.handler(parsed)
        sys.stdout.flush()
    except MillraceError as error:
        print(f"millrace {parsed.command}: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
