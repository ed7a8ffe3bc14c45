"""Files and folders that nobody but their owner may read, and the passwords that are in them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import Secret, shown

FILE_NAME = "credentials.json"
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The passwords of a system's own servers: drawn once for each data folder, and kept, so that
    clients which were told one stay right."""

    nats: Secret
    redis: Secret
    clickhouse: Secret

    def __repr__(self) -> str:
        return shown(self)


def credentials_of(data: Path) -> Credentials:
    """Those of the folder; drawn if it has none. Raises ConfigError for a file that is not ours."""
    file = data / FILE_NAME
    try:
        file.chmod(_FILE_MODE)
        return msgspec.json.decode(file.read_bytes(), type=Credentials)
    except FileNotFoundError:
        drawn = Credentials(
            **{name: secrets.token_hex(24) for name in Credentials.__struct_fields__}
        )
        encoded = msgspec.json.format(msgspec.json.encode(drawn), indent=2)
        write_private(file, encoded.decode() + "\n")
        return drawn
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{file} is malformed: {error}. Remove it, and other passwords are drawn."
        ) from error


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, since others may read it at any moment, and never readable by others."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", encoding="utf-8", opener=_open_private) as file:
        file.write(text)
    fresh.replace(path)


def make_private(folder: Path) -> None:
    """Make the folder if it is not there, and close it to other users. What is in it can be reached
    through it only, so that older files in it are closed, too."""
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    folder.chmod(_FOLDER_MODE)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)
