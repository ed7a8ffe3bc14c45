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

from millrace.cli.help import Parser
from millrace.schemas.errors import MillraceError

# Each module has add_parser(subparsers), which sets ``handler``: a function from the parsed
# arguments to the exit code. Modules import heavy packages when they run, so that --help is fast.
_COMMANDS = {
    "run a system": {
        "up": "millrace.cli.local.up",
        "status": "millrace.cli.operate.status",
        "logs": "millrace.cli.operate.logs",
        "down": "millrace.cli.operate.down",
        "stages": "millrace.cli.stages",
        "models": "millrace.cli.operate.models",
        "workers": "millrace.cli.operate.workers",
        "adapters": "millrace.cli.operate.adapters",
        "keys": "millrace.cli.keys.command",
        "top": "millrace.cli.top.command",
    },
    "send it work": {
        "publish": "millrace.cli.requests.publish",
        "result": "millrace.cli.requests.result",
    },
    "ask what happened": {
        "sql": "millrace.cli.analytics.sql",
        "usage": "millrace.cli.analytics.usage",
        "migrate": "millrace.cli.analytics.migrate",
    },
    "work without a system": {
        "generate": "millrace.cli.offline.generate",
        "embed": "millrace.cli.offline.embed",
        "quantize": "millrace.cli.offline.quantize",
    },
    "measure and plan": {
        "bench": "millrace.cli.bench.arguments",
        "simulate": "millrace.cli.simulate.arguments",
    },
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
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
    """Return the version of the installed package, or of the checkout's pyproject.toml."""
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        told = tomllib.loads(project.read_text(encoding="utf-8")) if project.is_file() else {}
        return str(told.get("project", {}).get("version", "unknown"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A usage or configuration error, or an unusable file, prints one sentence to stderr and returns
    2.
    """
    parser = build_parser()
    given = sys.argv[1:] if arguments is None else arguments
    for argument in given:
        if not _is_text(argument):
            parser.error(f"{argument!r:.200} is not UTF-8 text")
    parsed = parser.parse_args(given)
    try:
        code: int = parsed.handler(parsed)
        sys.stdout.flush()
    except MillraceError as error:
        print(f"millrace {parsed.command}: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed our output; discard the rest of the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename!r:.200}: "
        print(f"millrace {parsed.command}: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    return code


def _is_text(argument: str) -> bool:
    """Return whether an argument is valid UTF-8; other bytes arrive as surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True
