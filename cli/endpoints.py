"""Where a running system is: what ``millrace up`` wrote down, or what the configuration says."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.config import Config

DEFAULT_DATA = Path("data")


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
    """The configuration with the addresses to use: ``nats_url`` if given, else those of the system
    that runs on ``data``, else ``MILLRACE_*`` variables and defaults."""
    from bus.settings import load_config

    config = load_config(None, os.environ)
    endpoints = read_endpoints(data)
    if endpoints is not None:
        config = msgspec.structs.replace(
            config,
            nats=msgspec.structs.replace(config.nats, url=endpoints.nats),
            redis=msgspec.structs.replace(config.redis, url=endpoints.redis),
            kafka=msgspec.structs.replace(config.kafka, bootstrap_servers=endpoints.kafka),
            clickhouse=msgspec.structs.replace(config.clickhouse, url=endpoints.clickhouse),
        )
    if nats_url is not None:
        config = msgspec.structs.replace(
            config, nats=msgspec.structs.replace(config.nats, url=nats_url)
        )
    return config
