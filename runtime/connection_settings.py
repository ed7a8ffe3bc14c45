"""Checks for conflicts among connection settings, before anything starts."""

from __future__ import annotations

import ipaddress
import re

from millrace.runtime.tls import has_tls_files
from millrace.schemas.config import (
    ClickHouseConfig,
    Config,
    GatewayConfig,
    KafkaConfig,
    NatsConfig,
    RedisConfig,
)
from millrace.schemas.config.section import TlsSettings
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import redact_urls, split_urls

_MAX_PORT = 65_535
# Parsers of addresses remove the last three.
_ENDS_USER_DATA = re.compile(r"[/?#\[\]\t\r\n]")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def check_connections(config: Config) -> None:
    """Check all connection settings. Raises ConfigError, which names the settings.

    Opens no file: the parts that use files read them.
    """
    _check_nats(config.nats)
    _check_redis(config.redis)
    _check_kafka(config.kafka)
    _check_clickhouse(config.clickhouse)
    check_user_data("tracing.endpoint", config.tracing.endpoint)
    check_user_data("worker.engine.url", config.worker.engine.url)
    _check_pair("gateway", config.gateway)
    parse_networks("gateway.trusted_proxies", config.gateway.trusted_proxies)


def parse_networks(setting: str, values: tuple[str, ...]) -> tuple[Network, ...]:
    """Parse addresses and networks (``10.0.0.0/8``). Raises ConfigError for an invalid one."""
    networks = []
    for value in values:
        try:
            networks.append(ipaddress.ip_network(value, strict=False))
        except ValueError as error:
            raise ConfigError(
                f"{setting}: {value!r} is not an address or a network such as 10.0.0.0/8."
            ) from error
    return tuple(networks)


def check_user_data(setting: str, url: str) -> None:
    """Raise ConfigError if an address's user name or password has a character that ends them.

    The error does not show the address. All text before the last ``@`` counts as user name and
    password.
    """
    _, has_scheme, rest = url.partition("://")
    user, at, _ = (rest if has_scheme else url).rpartition("@")
    found = _ENDS_USER_DATA.search(user) if at else None
    if found is not None:
        raise ConfigError(
            f"{setting} has {found[0]!r} before its '@'. Percent-encode the user name and the "
            "password in an address: '/' is %2F, '?' is %3F, '#' is %23. An '@' in another place "
            "is %40."
        )


def _check_nats(nats: NatsConfig) -> None:
    for url in split_urls(nats.url):
        check_user_data("nats.url", url)
        if "://" in url and "," in url.rpartition("@")[0]:
            raise ConfigError(
                "nats.url has a comma in a password, or an address with user data and without "
                "nats:// in a list. Encode the comma as %2C, or begin each address with nats://."
            )
    _check_pair("nats", nats)
    _check_beside("nats", nats, {"password": "user", "user": "password"})
    _at_most_one("nats", nats, "user", "token", "nkey_seed", "creds_file")


def _check_redis(redis: RedisConfig) -> None:
    check_user_data("redis.url", redis.url)
    _check_pair("redis", redis)
    _check_beside("redis", redis, {"user": "password", "sentinel_user": "sentinel_password"})
    if redis.sentinels and not redis.sentinel_master:
        raise ConfigError("redis.sentinels needs redis.sentinel_master, the name of a master.")
    for name in ("sentinel_master", "sentinel_user", "sentinel_password"):
        _check_beside("redis", redis, {name: "sentinels"})
    for sentinel in redis.sentinels:
        host, _, port = sentinel.rpartition(":")
        if (
            "@" in sentinel
            or not host
            or not port.isascii()
            or not port.isdecimal()
            or int(port) > _MAX_PORT
        ):
            raise ConfigError(f"redis.sentinels: {redact_urls(sentinel)} is not host:port.")
    _at_most_one("redis", redis, "password")


def _check_kafka(kafka: KafkaConfig) -> None:
    if "@" in kafka.bootstrap_servers:
        raise ConfigError(
            "kafka.bootstrap_servers takes host:port without user data; set kafka.user and "
            "kafka.password."
        )
    check_user_data("kafka.maven_url", kafka.maven_url)
    if not kafka.maven_url.lower().startswith(("http://", "https://")):
        raise ConfigError(
            f"kafka.maven_url: {redact_urls(kafka.maven_url)!r} is not a URL that begins with "
            "https:// or http://."
        )
    _check_pair("kafka", kafka)
    for name in ("user", "password"):
        _check_beside("kafka", kafka, {"sasl_mechanism": name, name: "sasl_mechanism"})


def _check_clickhouse(clickhouse: ClickHouseConfig) -> None:
    _check_pair("clickhouse", clickhouse)
    if "@" in clickhouse.url:
        raise ConfigError(
            "clickhouse.url must have no user data; set clickhouse.username and "
            "clickhouse.password."
        )
    if (
        has_tls_files(clickhouse)
        and clickhouse.url
        and not clickhouse.url.lower().startswith("https://")
    ):
        raise ConfigError("clickhouse.url must begin with https:// for its *_file settings.")


def _at_most_one(section: str, settings: NatsConfig | RedisConfig, *names: str) -> None:
    given = [f"user data in {section}.url"] if "@" in settings.url else []
    given += [f"{section}.{name}" for name in names if getattr(settings, name)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both set. Use one of them.")


def _check_pair(section: str, files: TlsSettings | GatewayConfig) -> None:
    pair = {"certificate_file": "key_file", "key_file": "certificate_file"}
    _check_beside(section, files, pair)


def _check_beside(section: str, settings: object, needed: dict[str, str]) -> None:
    """Raise ConfigError for a setting without the setting that it needs."""
    for name, other in needed.items():
        if getattr(settings, name) and not getattr(settings, other):
            raise ConfigError(f"{section}.{name} also needs {section}.{other}.")
