"""Logs as one JSON object a line on stderr, without prompts and completions.

An exception is logged with its types and traceback but without its message: libraries quote their
input in messages, which may be a prompt.
"""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import traceback
from datetime import UTC, datetime

import msgspec

from millrace.runtime.json.lines import on_one_line
from millrace.schemas.errors import ConfigError

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """JSON formatter: time, level, component, logger, message, then the fields of ``extra``."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "asyncio":
            # The lines after the first describe objects with their contents.
            message = message.partition("\n")[0]
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": message,
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = stack_of(record.exc_info[1])
        return on_one_line(self._encoder.encode(line)).decode()


def stack_of(error: BaseException) -> str:
    """Return an error's traceback behind those of its causes, without messages.

    Errors of the operating system keep the system's description.
    """
    parts: list[str] = []
    link: BaseException | None = error
    shown: set[int] = set()
    while link is not None and id(link) not in shown:
        shown.add(id(link))
        parts.append(_link(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nwhich led to\n".join(reversed(parts))


def _link(error: BaseException) -> str:
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    frames = "".join(traceback.format_tb(error.__traceback__))
    text = f"Traceback (most recent call last):\n{frames}{name}"
    if isinstance(error, OSError) and error.errno is not None:
        text += f": {os.strerror(error.errno)}"
    if isinstance(error, BaseExceptionGroup):
        members = "\n".join(stack_of(member) for member in error.exceptions)
        text += ", of\n" + textwrap.indent(members, "  ")
    return text


def configure_logging(component: str, level: str = "info") -> None:
    """Send all logs to stderr as JSON. Raises ConfigError for an unknown level."""
    if level.lower() not in _LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(_LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
