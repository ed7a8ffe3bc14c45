"""The ``millrace`` command: one module for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from millrace.schemas.errors import MillraceError

# Each has add_parser(subparsers), which sets ``handler``: a function from the parsed arguments to
# the exit code. They import what is heavy when they run, so that --help is quick.
_COMMANDS = (
    "millrace.cli.local.up",
    "millrace.cli.requests.publish",
    "millrace.cli.requests.result",
    "millrace.cli.offline.generate",
    "millrace.cli.offline.embed",
    "millrace.cli.bench.arguments",
    "millrace.cli.simulate.arguments",
    "millrace.cli.keys.command",
    "millrace.cli.analytics.sql",
    "millrace.cli.analytics.usage",
    "millrace.cli.top.command",
    "millrace.cli.analytics.migrate",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="millrace", description="Event-driven LLM serving on a message bus."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name in _COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    return parser


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
