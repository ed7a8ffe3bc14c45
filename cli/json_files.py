"""JSON files through which commands and ``millrace up`` exchange data in a data folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from millrace.schemas.errors import ConfigError

T = TypeVar("T")


def read_json(file: Path, kind: type[T], advice: str = "") -> T | None:
    """Read a file; None if it does not exist.

    Raises ConfigError, with the ``advice``, for a file in another format.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is malformed: {error}.{advice and ' '}{advice}") from error


def formatted_json(value: object) -> str:
    """Return a value as such a file holds it: indented, with a line break at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
