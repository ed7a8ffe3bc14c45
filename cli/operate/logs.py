"""``millrace logs``: messages of a system's parts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.arguments import seconds, whole_number
from millrace.cli.endpoints import add_data_argument
from millrace.cli.running import supervising
from millrace.schemas.errors import ConfigError, MillraceError, ParameterError

if TYPE_CHECKING:
    from millrace.cli.operate.log_lines import LogLine

_USUAL_LINES = 100
_LOOK_EVERY_S = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace logs``."""
    parser = subparsers.add_parser(
        "logs",
        help="show the logs of the parts",
        description="Show the logs of the system that runs or ran on DIR: of all parts in the "
        "order of time, or of the named parts (worker: all workers; up: millrace up itself). The "
        "files are in DIR/logs: for each part a current and an older one of at most 64 MiB.",
    )
    parser.add_argument("parts", metavar="PART", nargs="*", help="such as gateway-1, worker, up")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow new lines until all parts have ended"
    )
    parser.add_argument(
        "--since", metavar="TIME", help="10m, 2h, or a moment such as 2026-11-25T10:00:00+00:00"
    )
    parser.add_argument(
        "-n",
        "--lines",
        metavar="N",
        type=whole_number,
        help=f"the last N lines in all (default: {_USUAL_LINES}, or all with --since)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="print the lines unchanged, as in the files"
    )
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the logs; return 0. Raises MillraceError if there are no logs, or none of a named
    part."""
    from millrace.cli.operate.log_lines import Follower, last_lines, merged

    since_s = _since_s(arguments.since)
    count = arguments.lines
    if count is None and arguments.since is None:
        count = _USUAL_LINES
    if count is not None and count < 0:
        raise ParameterError("lines", "-n must not be negative")
    files = _files(arguments.data, arguments.parts)
    followers = {file: Follower(file) for file in files} if arguments.follow else {}
    shown = merged(last_lines(file, count, since_s) for file in files) if count != 0 else []
    _show(shown if count is None else shown[-count:], files, arguments.raw)
    is_over = not arguments.follow
    while not is_over:
        # Check before the last read, so that final messages are not missed.
        is_over = supervising(arguments.data) is None
        for file in _files(arguments.data, arguments.parts):
            if file not in followers:
                followers[file] = Follower(file)
        _show(
            merged(follower.new_lines() for follower in followers.values()),
            followers,
            arguments.raw,
        )
        if not is_over:
            time.sleep(_LOOK_EVERY_S)
    return 0


def _show(lines: Iterable[LogLine], files: Iterable[Path], is_raw: bool) -> None:
    from millrace.cli.operate.log_lines import readable
    from millrace.runtime.text_table import one_line

    width = max(len(file.stem) for file in files)
    for line in lines:
        text = line.text if is_raw else readable(line, width)
        print("\n".join(map(one_line, text.split("\n"))), flush=True)


def _files(data: Path, wanted: list[str]) -> list[Path]:
    """Return the log files of the wanted parts. Raises MillraceError."""
    files = {file.stem: file for file in sorted((data / "logs").glob("*.log"))}
    if not files:
        raise MillraceError(f"there are no logs in {data / 'logs'}; has millrace up run there?")
    if not wanted:
        return list(files.values())
    chosen: dict[str, Path] = {}
    for name in wanted:
        found = {
            part: file
            for part, file in files.items()
            if part == name or part.rpartition("-")[0] == name
        }
        if not found:
            raise ParameterError(
                "part", f"there is no part {name!r}; there are logs of: {', '.join(files)}"
            )
        chosen |= found
    return list(chosen.values())


def _since_s(text: str | None) -> float:
    """Return the start of the time range as Unix time. Raises ConfigError."""
    if text is None:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()  # without a zone: of this machine's
    except (ValueError, OverflowError):
        try:
            return time.time() - seconds("--since", text)
        except ConfigError as error:
            raise ConfigError(
                f"--since: {text!r} is neither a time such as 10m or 2h nor a moment such as "
                "2026-11-25T10:00:00+00:00"
            ) from error
