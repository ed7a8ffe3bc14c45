"""Redis client as configured: users, TLS and sentinels."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from millrace.runtime.faults.connections import silence_options
from millrace.runtime.tls import client_context, handshake_refusal, has_tls_files
from millrace.schemas.config import RedisConfig
from millrace.schemas.errors import (
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
)
from millrace.schemas.redaction import redact_urls

_SILENCE_S = 2.5

_ERRORS: dict[str, type[RedisError]] = {
    "LOADING": BusyLoadingError,
    "NOAUTH": AuthenticationError,
    "NOPERM": NoPermissionError,
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
    "WRONGPASS": AuthenticationError,
}


def open_redis(config: RedisConfig, timeout_s: float) -> tuple[Redis, Sentinel | None]:
    """Open a client that connects on first use, and its Sentinel if sentinels are configured.

    The caller closes both. Each step of a connection takes at most ``timeout_s`` and is not
    retried. Raises ConfigError, which names the invalid setting.
    """
    try:
        given: dict[str, Any] = dict(parse_url(config.url))
    except ValueError as error:
        raise ConfigError(
            "redis.url cannot be used: it must look like redis://host:6379/0 or "
            f"rediss://host:6379/0, not {redact_urls(config.url)}."
        ) from error
    connection_class = given.pop("connection_class", None)
    if config.password:
        given |= {"username": config.user or None, "password": config.password}
    given |= _tls_options(config, connection_class)
    given |= _bounds(timeout_s)
    if connection_class is UnixDomainSocketConnection:
        given["unix_socket_path"] = given.pop("path", None)
    else:
        given |= _silence()
    if not config.sentinels:
        return Redis(**given), None
    return _by_sentinels(config, given, timeout_s)


def _by_sentinels(
    config: RedisConfig, given: dict[str, Any], timeout_s: float
) -> tuple[Redis, Sentinel]:
    for name in ("host", "port"):
        given.pop(name, None)
    asking = {name: value for name, value in given.items() if name.startswith("ssl")}
    asking |= _bounds(timeout_s) | _silence()
    if config.sentinel_password:
        asking |= {
            "username": config.sentinel_user or None,
            "password": config.sentinel_password,
        }
    places = [place.rpartition(":") for place in config.sentinels]
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(host.strip("[]"), int(port)) for host, _, port in places], sentinel_kwargs=asking
    )
    client: Redis = sentinel.master_for(config.sentinel_master, **given)
    return client, sentinel


def _bounds(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


def _silence() -> dict[str, Any]:
    """Return socket options that also end an idle connection once its server's machine is gone."""
    options = silence_options(_SILENCE_S)
    return {
        "socket_keepalive": True,
        "socket_keepalive_options": {
            option: value for level, option, value in options if level == socket.IPPROTO_TCP
        },
    }


def _tls_options(config: RedisConfig, connection_class: type | None) -> dict[str, Any]:
    if connection_class is not SSLConnection and not has_tls_files(config):
        return {}
    if connection_class is UnixDomainSocketConnection:
        raise ConfigError("redis.url is a local socket, which has no TLS for redis.*_file.")
    client_context("redis", config)  # checks the files
    return {
        "ssl": True,
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        "ssl_ca_certs": config.ca_file or None,
        "ssl_certfile": config.certificate_file or None,
        "ssl_keyfile": config.key_file or None,
    }


def error_of(text: str) -> RedisError:
    """Return redis-py's error for a server's error reply.

    An error that is no ResponseError concerns the connection, not the command.
    """
    return _ERRORS.get(text.partition(" ")[0], ResponseError)(text)


def why_refused(error: BaseException, config: RedisConfig) -> MillraceError | None:
    """Return the error if a retry does not help: an untrusted server, or refused credentials.

    None for all other errors.
    """
    who = f"Redis at {redact_urls(', '.join(config.sentinels) or config.url)}"
    refusal = handshake_refusal(error, who, "redis", config)
    if refusal is None and isinstance(error, AuthenticationError | NoPermissionError):
        return CredentialsRefusedError(f"{who} does not take {_credentials(config)}.")
    return refusal


def _credentials(config: RedisConfig) -> str:
    if config.user:
        return f"redis.password of redis.user {config.user}"
    if config.password:
        return "redis.password"
    if "@" in config.url:
        return "the user data in redis.url"
    return "clients without a password; set redis.password, and redis.user for a user of its list"
