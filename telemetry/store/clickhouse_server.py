"""ClickHouse server: connection, and reasons why it cannot be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import clickhouse_connect
from clickhouse_connect.driver import httputil
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError

from millrace.runtime.faults.connections import ConnectionErrors, silence_options
from millrace.runtime.tls import client_context, handshake_error, handshake_refusal, has_tls_files
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError, CredentialsRefusedError
from millrace.schemas.redaction import redact_urls

if TYPE_CHECKING:
    from urllib3 import PoolManager

# ClickHouse's codes for an unknown user, a wrong or missing password, and both.
_TLS_PORT = 8443
_NOT_US = frozenset({192, 193, 194, 516})
# A query may run long without an answer; the machine still acknowledges keepalive probes.
_SILENCE_S = 10.0
_ERRORS = ConnectionErrors(ClickHouseError)


def server_address(config: ClickHouseConfig) -> SplitResult:
    """Parse ``clickhouse.url``. Raises ConfigError for an invalid address."""
    try:
        parts = urlsplit(config.url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"clickhouse.url must look like http://host:8123, got {redact_urls(config.url)!r}"
        )
    return parts


def server_connect(config: ClickHouseConfig) -> Callable[..., Client]:
    """Return a function that connects to the server at ``config.url``. Raises ConfigError that
    names the wrong setting."""
    parts = server_address(config)
    return functools.partial(
        _get_client,
        host=parts.hostname,
        port=parts.port or (_TLS_PORT if parts.scheme == "https" else 8123),
        secure=parts.scheme == "https",
        username=config.username,
        password=config.password,
        # Without a session, calls of several threads do not block each other.
        autogenerate_session_id=False,
        # With its own pool, the client does not look for a proxy in the environment.
        pool_mgr=_pool(config.ca_file, config.certificate_file, config.key_file),
        **_tls_options(config),
    )


def _get_client(**options: Any) -> Client:
    with _ERRORS:
        return clickhouse_connect.get_client(**options)


@functools.cache
def _pool(ca_file: str, certificate_file: str, key_file: str) -> PoolManager:
    """Return a connection pool that verifies servers and presents the client certificate by these
    files."""
    pool: PoolManager = httputil.get_pool_manager(
        socket_options=[*httputil.core_socket_options, *silence_options(_SILENCE_S)],
        ca_cert=ca_file or None,
        client_cert=certificate_file or None,
        client_cert_key=key_file or None,
    )
    return pool


def _tls_options(config: ClickHouseConfig) -> dict[str, Any]:
    if not has_tls_files(config):
        return {}
    client_context("clickhouse", config)  # for what it checks
    options: dict[str, Any] = {"verify": True}
    if config.ca_file:
        options["ca_cert"] = config.ca_file
    if config.certificate_file:
        options |= {
            "client_cert": config.certificate_file,
            "client_cert_key": config.key_file,
            # Without a password, the certificate authenticates us at ClickHouse itself.
            "tls_mode": "strict" if config.password else "mutual",
        }
    return options


def raise_refusal(error: BaseException, config: ClickHouseConfig) -> None:
    """Raise UntrustedServerError or CredentialsRefusedError if ``error``, or one more handshake,
    shows that cause. May block for seconds."""
    who = f"ClickHouse at {redact_urls(config.url)}"
    parts = urlsplit(config.url)
    if parts.scheme == "https" and parts.hostname and getattr(error, "code", None) is None:
        context = client_context("clickhouse", config)
        error = handshake_error(parts.hostname, parts.port or _TLS_PORT, context) or error
    refusal = handshake_refusal(error, who, "clickhouse", config)
    if refusal is not None:
        raise refusal from error
    if getattr(error, "code", None) in _NOT_US:
        raise CredentialsRefusedError(
            f"{who} does not take clickhouse.password of clickhouse.username {config.username}."
        ) from error
