"""Logs as one JSON object a line on stderr. Prompts and completions never go in."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from schemas.errors import ConfigError

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """Time, level, component, logger, message, then whatever ``extra`` gave."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return self._encoder.encode(line).decode()


def configure_logging(component: str, level: str = "info") -> None:
    """Send every logger's lines to stderr as JSON. Raises ConfigError for an unknown level."""
    if level.lower() not in _LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(_LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
