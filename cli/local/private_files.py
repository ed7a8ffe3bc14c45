"""Files and folders readable by their owner only: passwords, and the configuration of the servers
that ``millrace up`` starts."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from millrace.cli.endpoints import Endpoints, without_user
from millrace.cli.json_files import formatted_json, read_json
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import Secret, shown

FILE_NAME = "credentials.json"
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
# An address with name and password, and the same as environment variables for clients that do not
# read them from an address.
NATS_URL_FILE, NATS_ENV_FILE = "nats.url", "nats.env"
CLICKHOUSE_URL_FILE, CLICKHOUSE_ENV_FILE = "clickhouse.url", "clickhouse.env"
_NAMES = (NATS_URL_FILE, NATS_ENV_FILE, CLICKHOUSE_URL_FILE, CLICKHOUSE_ENV_FILE)


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Passwords of a system's own servers: drawn once for each data folder and kept, so that
    clients can store them."""

    nats: Secret
    redis: Secret
    clickhouse: Secret

    def __repr__(self) -> str:
        return shown(self)


def credentials_of(data: Path) -> Credentials:
    """Read the passwords of the folder; draw them if there are none.

    Raises ConfigError for a file in another format.
    """
    file = data / FILE_NAME
    try:
        file.chmod(_FILE_MODE)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be kept private: {error.strerror or error}.") from error
    kept = read_json(file, Credentials, "Remove it, and other passwords are drawn.")
    if kept is not None:
        return kept
    drawn = Credentials(**{name: secrets.token_hex(24) for name in Credentials.__struct_fields__})
    write_private(file, formatted_json(drawn))
    return drawn


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, since others may read it at any moment, and readable by its owner
    only."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", encoding="utf-8", opener=_open_private) as file:
        file.write(text)
    fresh.replace(path)


def make_private(folder: Path) -> None:
    """Create the folder if needed and close it to other users, which also protects older files in
    it."""
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    folder.chmod(_FOLDER_MODE)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


def write_access_files(folder: Path, endpoints: Endpoints) -> None:
    """Write the access files of a system's run folder."""
    write_private(folder / NATS_URL_FILE, f"{endpoints.nats}\n")
    write_private(folder / NATS_ENV_FILE, environment("NATS", endpoints.nats))
    write_private(folder / CLICKHOUSE_URL_FILE, f"{endpoints.clickhouse}\n")
    write_private(folder / CLICKHOUSE_ENV_FILE, environment("CLICKHOUSE", endpoints.clickhouse))


def remove_access_files(folder: Path) -> None:
    """Remove the access files after a run."""
    for name in _NAMES:
        (folder / name).unlink(missing_ok=True)


def environment(prefix: str, url: str) -> str:
    """Return address, user and password of a URL as lines ``PREFIX_URL=…`` for a shell, and for
    ``--env-file`` of Docker and Node."""
    parts = urlsplit(url)
    values = {
        "URL": without_user(url),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
    }
    return "".join(f"{prefix}_{name}={shlex.quote(value)}\n" for name, value in values.items())


def nats_config(url: str, store: Path) -> str:
    """Return the configuration of a nats-server that listens at ``url`` and requires its name and
    password."""
    place = urlsplit(url)
    # A JSON string is also a string of NATS's configuration, except for the escapes of letters.
    user, password = json.dumps(place.username), json.dumps(place.password)
    folder = json.dumps(str(store), ensure_ascii=False)
    return "\n".join(
        [
            f"listen: {place.hostname}:{place.port}",
            "server_name: millrace",
            f"authorization {{ user: {user}, password: {password} }}",
            "max_payload: 8MB",
            # An accepted job is on the disk before its publisher is told. The limit of the disk is
            # ``storage.min_free_bytes``.
            f"jetstream {{ store_dir: {folder}, sync_interval: always",
            "max_file_store: 1PB }",
            "",
        ]
    )


def redis_config(url: str, store: Path) -> str:
    """Return the configuration of a redis-server that listens at ``url`` and requires its password.

    A password on the command line would be readable by every user of the machine.
    """
    place = urlsplit(url)
    # Redis reads bytes unchanged, and understands JSON's escapes.
    folder = json.dumps(str(store), ensure_ascii=False)
    return "\n".join(
        [
            f"bind {place.hostname}",
            f"port {place.port}",
            f"requirepass {place.password}",
            f"dir {folder}",
            "appendonly yes",
            'save ""',
            # Check for expired keys once a second; a key that is accessed is also checked then.
            "hz 1",
            "",
        ]
    )
