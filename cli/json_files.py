"""Files in JSON that commands and ``millrace up`` leave for one another in a data folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from millrace.schemas.errors import ConfigError

T = TypeVar("T")


def read_json(file: Path, kind: type[T], advice: str = "") -> T | None:
    """What a file holds; None if it is not there. Raises ConfigError, with the ``advice``, for a
    file that is not ours."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is malformed: {error}.{advice and ' '}{advice}") from error


def formatted_json(value: object) -> str:
    """A value as such a file holds it: indented, with a line's end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
