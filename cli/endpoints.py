"""Where a running system is: what the environment says, or what ``millrace up`` wrote down."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.config import Config, NatsConfig

DEFAULT_DATA = Path("data")
_NAMES_NATS = {"MILLRACE_NATS__URL", "MILLRACE_CONFIG"}
_S = TypeVar("_S", bound=msgspec.Struct)


class Endpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses of a system's parts: URLs, but ``kafka``, which is host:port."""

    http: str
    nats: str
    redis: str
    kafka: str
    clickhouse: str


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--data``."""
    parser.add_argument(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        metavar="DIR",
        help="the folder that millrace up runs on (default: %(default)s)",
    )


def read_endpoints(data: Path) -> Endpoints | None:
    """What runs on ``data``; None if nothing does. ConfigError for a file that is not ours."""
    file = data / "run" / "endpoints.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Endpoints)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is malformed: {error}.") from error


def locate(data: Path, nats_url: str | None = None) -> Config:
    """The configuration with the addresses to use: ``nats_url`` if given, else those that
    ``MILLRACE_*`` variables name, else those of the system that runs on ``data``, else the
    defaults."""
    from bus.settings import load_config

    config = load_config(None, os.environ)
    endpoints = read_endpoints(data)
    if endpoints is not None:
        config = msgspec.structs.replace(
            config,
            nats=_at(config.nats, "nats", "url", endpoints.nats),
            redis=_at(config.redis, "redis", "url", endpoints.redis),
            kafka=_at(config.kafka, "kafka", "bootstrap_servers", endpoints.kafka),
            clickhouse=_at(config.clickhouse, "clickhouse", "url", endpoints.clickhouse),
        )
    if nats_url is not None:
        config = msgspec.structs.replace(
            config, nats=msgspec.structs.replace(config.nats, url=nats_url)
        )
    return config


def locate_nats(data: Path, nats_url: str | None) -> NatsConfig:
    """Where to send a job. Raises ConfigError if nothing says where: a guess could reach another
    system than the one that is meant."""
    named = nats_url is not None or not _NAMES_NATS.isdisjoint(os.environ)
    if not named and read_endpoints(data) is None:
        raise ConfigError(
            f"Nothing runs on {data}. Start it with millrace up --data {data}, or give --nats URL."
        )
    return locate(data, nats_url).nats


def _at(section: _S, section_name: str, key: str, address: str) -> _S:
    """The section with ``address`` as its ``key``, unless a variable names another."""
    if f"MILLRACE_{section_name}__{key}".upper() in os.environ:
        return section
    return msgspec.structs.replace(section, **{key: address})
