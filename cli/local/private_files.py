"""Files and folders that only their owner may read: passwords, and the configuration of the servers
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
# An address with name and password in it, and the same as variables of the environment, for the
# many clients that read neither from an address.
NATS_URL_FILE, NATS_ENV_FILE = "nats.url", "nats.env"
CLICKHOUSE_URL_FILE, CLICKHOUSE_ENV_FILE = "clickhouse.url", "clickhouse.env"
_NAMES = (NATS_URL_FILE, NATS_ENV_FILE, CLICKHOUSE_URL_FILE, CLICKHOUSE_ENV_FILE)


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


def write_access_files(folder: Path, endpoints: Endpoints) -> None:
    """Write the files of a system's run folder."""
    write_private(folder / NATS_URL_FILE, f"{endpoints.nats}\n")
    write_private(folder / NATS_ENV_FILE, environment("NATS", endpoints.nats))
    write_private(folder / CLICKHOUSE_URL_FILE, f"{endpoints.clickhouse}\n")
    write_private(folder / CLICKHOUSE_ENV_FILE, environment("CLICKHOUSE", endpoints.clickhouse))


def remove_access_files(folder: Path) -> None:
    """Remove the files of a run that is over."""
    for name in _NAMES:
        (folder / name).unlink(missing_ok=True)


def environment(prefix: str, url: str) -> str:
    """The address, user and password of a URL as lines ``PREFIX_URL=…``, which a shell can read,
    and ``--env-file`` of Docker and Node."""
    parts = urlsplit(url)
    values = {
        "URL": without_user(url),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
    }
    return "".join(f"{prefix}_{name}={shlex.quote(value)}\n" for name, value in values.items())


def nats_config(url: str, store: Path) -> str:
    """For nats-server to listen at ``url``, for whoever has the name and password in it."""
    place = urlsplit(url)
    # A JSON string is a string of NATS's configuration too, but for the escapes of letters.
    user, password = json.dumps(place.username), json.dumps(place.password)
    folder = json.dumps(str(store), ensure_ascii=False)
    return "\n".join(
        [
            f"listen: {place.hostname}:{place.port}",
            "server_name: millrace",
            f"authorization {{ user: {user}, password: {password} }}",
            "max_payload: 8MB",
            # An accepted job is on the disk before its publisher hears so.
            # How full the disk may be is for ``storage.min_free_bytes`` to say.
            f"jetstream {{ store_dir: {folder}, sync_interval: always",
            "max_file_store: 1PB }",
            "",
        ]
    )


def redis_config(url: str, store: Path) -> str:
    """For redis-server to listen at ``url``, for whoever has the password in it. It is not on the
    command line, which every user of the machine can read."""
    place = urlsplit(url)
    # Redis reads bytes as they are, and JSON's escapes of what it must.
    folder = json.dumps(str(store), ensure_ascii=False)
    return "\n".join(
        [
            f"bind {place.hostname}",
            f"port {place.port}",
            f"requirepass {place.password}",
            f"dir {folder}",
            "appendonly yes",
            'save ""',
            # It looks after what expires once a second: what is asked for is looked at then, too.
            "hz 1",
            "",
        ]
    )
