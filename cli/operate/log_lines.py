"""Log lines of a system with their times: Millrace's are JSON, the servers have their own
formats."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from millrace.cli.local.log_files import OLDER

_BLOCK_BYTES = 1 << 16
_NATS = re.compile(rb"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) ")
_REDIS = re.compile(rb"\d+:\w (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d+) ")
_OURS = re.compile(rb'\{"time":"([^"]+)"')
_NEVER_S = 0.0


class LogLine(NamedTuple):
    """Line of a log. ``time_s`` is Unix time; a line without a time has that of the line before
    it."""

    time_s: float
    part: str
    text: str


def time_of(line: bytes) -> float | None:
    """Return the time of a line, if it contains one."""
    try:
        if (found := _OURS.match(line)) is not None:
            return datetime.fromisoformat(found[1].decode()).timestamp()
        # The servers write times in the machine's time zone.
        if (found := _NATS.match(line)) is not None:
            return datetime.strptime(found[1].decode(), "%Y/%m/%d %H:%M:%S.%f").timestamp()  # noqa: DTZ007
        if (found := _REDIS.match(line)) is not None:
            return datetime.strptime(found[1].decode(), "%d %b %Y %H:%M:%S.%f").timestamp()  # noqa: DTZ007
    except ValueError:
        return None
    return None


def last_lines(file: Path, count: int | None, since_s: float) -> list[LogLine]:
    """Return the last ``count`` lines (None: all) not older than ``since_s``, oldest first, from
    the file and its older file."""
    found: list[LogLine] = []
    pending: list[bytes] = []  # lines without a time, which belong to an earlier one
    for line in _backwards(file):
        pending.append(line)
        time_s = time_of(line)
        if time_s is None:
            continue
        if time_s < since_s:
            pending.clear()
            break
        found += (LogLine(time_s, file.stem, one.decode(errors="replace")) for one in pending)
        pending.clear()
        if count is not None and len(found) >= count:
            break
    if since_s == _NEVER_S:  # what stands before the first time
        found += (LogLine(_NEVER_S, file.stem, one.decode(errors="replace")) for one in pending)
    return found[:count][::-1]


def merged(logs: Iterable[list[LogLine]]) -> list[LogLine]:
    """Merge the lines of several logs by time; each log keeps its order."""
    return list(heapq.merge(*logs, key=lambda line: line.time_s))


class Follower:
    """Reader of lines appended to a log, also after the log was moved to the older file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = _size_of(file)
        self._rest = b""
        self._time_s = _NEVER_S

    def new_lines(self) -> list[LogLine]:
        """Return the complete lines since the last call."""
        size = _size_of(self._file)
        if size < self._at:
            self._at, self._rest = 0, b""
        if size == self._at:
            return []
        with self._file.open("rb") as opened:
            opened.seek(self._at)
            added = opened.read(size - self._at)
        self._at += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        found = []
        for line in lines:
            self._time_s = time_of(line) or self._time_s
            found.append(LogLine(self._time_s, self._file.stem, line.decode(errors="replace")))
        return found


def readable(line: LogLine, width: int) -> str:
    """Format a line for a person; ``width`` is the width of the part's name column."""
    text = line.text
    if text.startswith("{"):
        try:
            told = json.loads(text)
        except ValueError:
            told = None
        if isinstance(told, dict) and "message" in told:
            text = _told(told)
    when = "" if line.time_s == _NEVER_S else f"{datetime.fromtimestamp(line.time_s):%H:%M:%S.%f}"  # noqa: DTZ006
    return f"{when[:12]:<12} {line.part:<{width}}  {text}"


def _told(told: dict[str, object]) -> str:
    usual = ("time", "level", "component", "logger", "message", "exception")
    level = str(told.get("level", "info"))
    rest = " ".join(
        f"{name}={value if isinstance(value, str | int | float) else json.dumps(value)}"
        for name, value in told.items()
        if name not in usual
    )
    text = f"{'' if level == 'info' else level.upper() + ' '}{told['message']}"
    trace = told.get("exception")
    return f"{text}  {rest}".rstrip() + (f"\n{trace}" if trace else "")


def _backwards(file: Path) -> Iterator[bytes]:
    for path in (file, file.with_name(file.name + OLDER)):
        try:
            with path.open("rb") as opened:
                yield from _lines_backwards(opened.fileno())
        except FileNotFoundError:
            continue


def _lines_backwards(handle: int) -> Iterator[bytes]:
    end = os.fstat(handle).st_size
    rest, is_first = b"", True
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        block = os.pread(handle, end - begin, begin) + rest
        end = begin
        lines = block.split(b"\n")
        rest = lines.pop(0)
        if is_first and lines and not lines[-1]:
            lines.pop()
        is_first = False
        yield from reversed(lines)
    if rest:
        yield rest


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
