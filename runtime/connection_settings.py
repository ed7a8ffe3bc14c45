"""What of the settings of connections does not go together, said before anything starts."""

from __future__ import annotations

import ipaddress
import re

from millrace.runtime.tls import TlsFiles, has_tls_files
from millrace.schemas.config import (
    ClickHouseConfig,
    Config,
    GatewayConfig,
    KafkaConfig,
    NatsConfig,
    RedisConfig,
)
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import redact_urls, split_urls

_MAX_PORT = 65_535
# Parsers of addresses remove the last three.
_ENDS_USER_DATA = re.compile(r"[/?#\[\]\t\r\n]")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def check_connections(config: Config) -> None:
    """Raises ConfigError that names the settings. Opens no file: those are read by the parts that
    use them."""
    _check_nats(config.nats)
    _check_redis(config.redis)
    _check_kafka(config.kafka)
    _check_clickhouse(config.clickhouse)
    check_user_data("tracing.endpoint", config.tracing.endpoint)
    check_user_data("worker.engine.url", config.worker.engine.url)
    _check_pair("gateway", config.gateway)
    parse_networks("gateway.trusted_proxies", config.gateway.trusted_proxies)


def parse_networks(setting: str, values: tuple[str, ...]) -> tuple[Network, ...]:
    """Addresses and networks (``10.0.0.0/8``). Raises ConfigError for what is neither."""
    networks = []
    for value in values:
        try:
            networks.append(ipaddress.ip_network(value, strict=False))
        except ValueError as error:
            raise ConfigError(
                f"{setting}: {value!r} is no address and no network such as 10.0.0.0/8."
            ) from error
    return tuple(networks)


def check_user_data(setting: str, url: str) -> None:
    """Raises ConfigError, without the address, if its user name or password has a character that
    ends them. All before the last ``@`` is taken for them."""
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
    if nats.password and not nats.user:
        raise ConfigError("nats.password needs nats.user beside it.")
    if nats.user and not nats.password:
        raise ConfigError("nats.user needs nats.password beside it.")
    ways = {
        "user data in nats.url": "@" in nats.url,
        "nats.user": bool(nats.user),
        "nats.token": bool(nats.token),
        "nats.nkey_seed": bool(nats.nkey_seed),
        "nats.creds_file": bool(nats.creds_file),
    }
    _at_most_one(ways)


def _check_redis(redis: RedisConfig) -> None:
    check_user_data("redis.url", redis.url)
    _check_pair("redis", redis)
    if redis.user and not redis.password:
        raise ConfigError("redis.user needs redis.password beside it.")
    if redis.sentinel_user and not redis.sentinel_password:
        raise ConfigError("redis.sentinel_user needs redis.sentinel_password beside it.")
    if redis.sentinels and not redis.sentinel_master:
        raise ConfigError("redis.sentinels needs redis.sentinel_master, the name of a master.")
    for name in ("sentinel_master", "sentinel_user", "sentinel_password"):
        if getattr(redis, name) and not redis.sentinels:
            raise ConfigError(f"redis.{name} needs redis.sentinels beside it.")
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
    _at_most_one(
        {
            "user data in redis.url": "@" in redis.url,
            "redis.password": bool(redis.password),
        }
    )


def _check_kafka(kafka: KafkaConfig) -> None:
    if "@" in kafka.bootstrap_servers:
        raise ConfigError(
            "kafka.bootstrap_servers takes host:port without user data; set kafka.user and "
            "kafka.password."
        )
    check_user_data("kafka.maven_url", kafka.maven_url)
    if not kafka.maven_url.lower().startswith(("http://", "https://")):
        raise ConfigError(
            f"kafka.maven_url: {redact_urls(kafka.maven_url)!r} is no URL that begins with "
            "https:// or http://."
        )
    _check_pair("kafka", kafka)
    for name in ("user", "password"):
        if kafka.sasl_mechanism and not getattr(kafka, name):
            raise ConfigError(f"kafka.sasl_mechanism needs kafka.{name} beside it.")
        if getattr(kafka, name) and not kafka.sasl_mechanism:
            raise ConfigError(f"kafka.{name} needs kafka.sasl_mechanism beside it.")


def _check_clickhouse(clickhouse: ClickHouseConfig) -> None:
    _check_pair("clickhouse", clickhouse)
    if "@" in clickhouse.url:
        raise ConfigError(
            "clickhouse.url must have no user data; set clickhouse.username and "
            "clickhouse.password."
        )
    if has_tls_files(clickhouse) and clickhouse.url and not _is_https(clickhouse.url):
        raise ConfigError("clickhouse.url must begin with https:// for its *_file settings.")


def _is_https(url: str) -> bool:
    return url.lower().startswith("https://")


def _at_most_one(ways: dict[str, bool]) -> None:
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both set; one says who we are.")


def _check_pair(section: str, files: TlsFiles | GatewayConfig) -> None:
    if files.certificate_file and not files.key_file:
        raise ConfigError(f"{section}.certificate_file needs {section}.key_file beside it.")
    if files.key_file and not files.certificate_file:
        raise ConfigError(f"{section}.key_file needs {section}.certificate_file beside it.")
