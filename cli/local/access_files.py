"""Files by which other programs on this machine find the servers of ``millrace up``, with the names
and passwords that these demand. Only the user who ran it may read them."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millrace.cli.endpoints import Endpoints, without_user
from millrace.cli.local.private_files import write_private

# An address with name and password in it, and the same as variables of the environment, for the
# many clients that read neither from an address.
NATS_URL_FILE, NATS_ENV_FILE = "nats.url", "nats.env"
CLICKHOUSE_URL_FILE, CLICKHOUSE_ENV_FILE = "clickhouse.url", "clickhouse.env"
_NAMES = (NATS_URL_FILE, NATS_ENV_FILE, CLICKHOUSE_URL_FILE, CLICKHOUSE_ENV_FILE)


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
