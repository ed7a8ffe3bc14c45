"""Addresses of a running system, from the environment or from the files of ``millrace up``."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from millrace.cli.arguments import as_path
from millrace.cli.json_files import read_json
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import shown

if TYPE_CHECKING:
    from millrace.bus.api import Bus
    from millrace.schemas.config import ClickHouseConfig, Config, NatsConfig

LOOPBACK = "127.0.0.1"
DEFAULT_DATA = Path("data")
CONFIG_FILE = "config.yaml"
ENDPOINTS_FILE = "endpoints.json"
_NAMES_NATS = {"MILLRACE_NATS__URL", "MILLRACE_NATS__URL_FILE", "MILLRACE_CONFIG"}
_S = TypeVar("_S", bound=msgspec.Struct)


class Endpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses of a system's parts: URLs, except ``kafka``, which is host:port. URLs of servers
    with a password contain it."""

    http: str
    nats: str
    redis: str
    kafka: str
    clickhouse: str

    def __repr__(self) -> str:
        return shown(self)

    def shown(self) -> dict[str, str]:
        """Return the addresses by name, without passwords."""
        return {
            name: without_user(address) if "://" in address else address
            for name, address in msgspec.structs.asdict(self).items()
        }


def add_data_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--data``."""
    parser.add_argument(
        "--data",
        type=as_path,
        default=DEFAULT_DATA,
        metavar="DIR",
        help="the folder that millrace up runs on (default: %(default)s)",
    )


def read_endpoints(data: Path) -> Endpoints | None:
    """Read the addresses of the system on ``data``; None if no system runs there.

    Raises ConfigError for a file in another format.
    """
    return read_json(data / "run" / ENDPOINTS_FILE, Endpoints)


def running_config(data: Path) -> Config | None:
    """Read the configuration of the system on ``data``; None if no system runs there.

    Raises ConfigError for a file in another format.
    """
    from millrace.runtime.settings import load_config

    file = data / "run" / CONFIG_FILE
    if read_endpoints(data) is None or not file.exists():
        return None
    return load_config(str(file), {})


def locate(data: Path, nats_url: str | None = None) -> Config:
    """Return the configuration with the addresses to use.

    Sources, in order: ``nats_url``, ``MILLRACE_*`` variables, the system that runs on ``data``, the
    defaults. Raises ConfigError.
    """
    from millrace.runtime.connection_settings import check_connections
    from millrace.runtime.settings import load_config

    config = load_config(None, os.environ)
    endpoints = read_endpoints(data)
    if endpoints is not None:
        config = msgspec.structs.replace(
            config,
            nats=_at(config.nats, "nats", "url", endpoints.nats),
            redis=_at(config.redis, "redis", "url", endpoints.redis),
            kafka=_at(config.kafka, "kafka", "bootstrap_servers", endpoints.kafka),
            clickhouse=_with_clickhouse(config.clickhouse, endpoints.clickhouse),
        )
    if nats_url is not None:
        config = msgspec.structs.replace(
            config, nats=msgspec.structs.replace(config.nats, url=nats_url)
        )
        check_connections(config)
    return config


def locate_nats(data: Path, nats_url: str | None) -> NatsConfig:
    """Return the bus to which jobs are sent.

    Raises ConfigError if no source names an address: a default could reach another system.
    """
    named = nats_url is not None or not _NAMES_NATS.isdisjoint(os.environ)
    if not named and read_endpoints(data) is None:
        raise ConfigError(
            f"Nothing runs on {data}. Start it with millrace up --data {data}, or give --nats URL."
        )
    return locate(data, nats_url).nats


@asynccontextmanager
async def bus_of(arguments: argparse.Namespace, name: str) -> AsyncIterator[Bus]:
    """Connect to the system of ``--data`` or ``--nats``. Raises ConfigError and
    BusUnavailableError."""
    from millrace.bus import nats

    bus = await nats.connect(locate_nats(arguments.data, arguments.nats), name)
    try:
        yield bus
    finally:
        await bus.close()


def _at(section: _S, section_name: str, key: str, address: str) -> _S:
    """Return the section with ``address`` as its ``key``, unless a variable sets another
    address."""
    from millrace.runtime.settings import names_setting

    if names_setting(f"{section_name}.{key}", os.environ):
        return section
    return msgspec.structs.replace(section, **{key: address})


def without_user(url: str) -> str:
    """Return an address without its user name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def url(host: str, port: int) -> str:
    """Return the URL for a local client, also if the server listens on all addresses."""
    everywhere = ipaddress.ip_address(host).is_unspecified if _is_ip(host) else False
    shown = LOOPBACK if everywhere else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _with_clickhouse(section: ClickHouseConfig, url: str) -> ClickHouseConfig:
    """Return the section with address, name and password of ``url``, unless variables set
    others."""
    located = _at(section, "clickhouse", "url", without_user(url))
    if located is section:
        return section
    user = urlsplit(url)
    located = _at(located, "clickhouse", "username", unquote(user.username or section.username))
    return _at(located, "clickhouse", "password", unquote(user.password or section.password))
