"""``millrace down``: stop the system on a data folder in order."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from millrace.cli.arguments import seconds
from millrace.cli.endpoints import add_data_argument
from millrace.cli.operate.status import rests
from millrace.cli.running import lasting, supervising
from millrace.schemas.errors import MillraceError

_STOPPED, _STILL_RUNS = 0, 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace down``."""
    parser = subparsers.add_parser(
        "down",
        help="stop the system that millrace up started",
        description="Stop the system that runs on DIR as Ctrl-C at its terminal does: open "
        "streams may end, and accepted requests are kept and continue at the next start. The exit "
        "code is 0 if no system runs there any more or none did, and 1 if it still runs after the "
        "wait.",
    )
    parser.add_argument(
        "--wait",
        default="30s",
        metavar="TIME",
        help="time to wait for its end (default: %(default)s)",
    )
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop the system; return 0, or 1 if it still runs. Raises ConfigError for an invalid time."""
    within_s = seconds("--wait", arguments.wait)
    data: Path = arguments.data
    running = supervising(data)
    if running is None:
        print(rests(data))
        return _STOPPED
    print(f"Stopping Millrace on {data} (pid {running.pid}, up for {lasting(running.up_s)}) …")
    began_s = time.monotonic()
    try:
        has_ended = running.terminate(within_s)
    except PermissionError as error:
        raise MillraceError(
            f"process {running.pid} is another user's; stop it as that user, or as root"
        ) from error
    took_s = time.monotonic() - began_s
    if has_ended:
        print(f"Stopped in {took_s:.1f} s. Its data is kept in {data}.")
        return _STOPPED
    print(
        f"It still runs after {took_s:.0f} s; it was told to stop. See millrace logs up --data "
        f"{data}, and run millrace down again with a longer --wait."
    )
    return _STILL_RUNS
