"""Connections to Kafka: credentials, trust, reasons for refusals, and timeouts of dead brokers."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from aiokafka import client
from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from millrace.runtime.faults.connections import ConnectionErrors, bound_silence
from millrace.runtime.tls import client_context, handshake_error, handshake_refusal, has_tls_files
from millrace.schemas.config import KafkaConfig
from millrace.schemas.errors import CredentialsRefusedError, MillraceError, UntrustedServerError

_TRY_TIMEOUT_MS = 5_000


def connection_options(config: KafkaConfig) -> dict[str, Any]:
    """Return the connection options of aiokafka's clients. Raises ConfigError that names the
    setting at fault."""
    has_tls = config.tls or has_tls_files(config)
    options: dict[str, Any] = {
        "security_protocol": ("SASL_" if config.sasl_mechanism else "")
        + ("SSL" if has_tls else "PLAINTEXT")
    }
    if has_tls:
        options["ssl_context"] = client_context("kafka", config)
    if config.sasl_mechanism:
        options |= {
            "sasl_mechanism": config.sasl_mechanism,
            "sasl_plain_username": config.user,
            "sasl_plain_password": config.password,
        }
    return options


async def why_refused(config: KafkaConfig) -> MillraceError | None:
    """Return why no bootstrap server can be used, if a retry would not help; else None.

    The clients do not report this, so each server is asked once more.
    """
    options = connection_options(config)
    refusal: MillraceError | None = None
    for host, port, _ in collect_hosts(config.bootstrap_servers):
        error = await _error_at(host, port, options)
        if error is None:
            return None
        refusal = _refusal_of(error, f"{host}:{port}", config) or refusal
    return refusal


async def _error_at(host: str, port: int, options: dict[str, Any]) -> Exception | None:
    context = options.get("ssl_context")
    if context is not None:
        error = await asyncio.to_thread(handshake_error, host, port, context)
        if error is not None:
            return error
    try:
        connection = await connect(host, port, request_timeout_ms=_TRY_TIMEOUT_MS, **options)
    except (OSError, KafkaError, TimeoutError) as error:
        return error
    connection.close()
    return None


def _refusal_of(error: Exception, where: str, config: KafkaConfig) -> MillraceError | None:
    refusal = handshake_refusal(error, f"Kafka at {where}", "kafka", config)
    if refusal is not None:
        return refusal
    if isinstance(error, SaslAuthenticationFailed):
        return CredentialsRefusedError(
            f"Kafka at {where} does not take kafka.password of kafka.user {config.user}."
        )
    if isinstance(error, UnsupportedSaslMechanismError | IllegalSaslStateError):
        return CredentialsRefusedError(
            f"Kafka at {where} does not offer kafka.sasl_mechanism {config.sasl_mechanism} there."
        )
    has_tls = config.tls or has_tls_files(config)
    if isinstance(error, ssl.SSLError) or (has_tls and isinstance(error, ConnectionResetError)):
        return UntrustedServerError(
            f"Kafka at {where} closes the connection in the TLS handshake, so it has no TLS at "
            "that port; kafka.tls or a file of kafka.* requires it."
        )
    return None


# A broker may answer late; its machine still acknowledges keepalive probes.
_SILENCE_S = 10.0
_ERRORS = ConnectionErrors(KafkaError)


async def connect(*arguments: Any, **options: Any) -> AIOKafkaConnection:
    """Call ``aiokafka.conn.create_conn``; raise KafkaError or OSError only."""
    with _ERRORS:
        connection = await create_conn(*arguments, **options)
        bound_silence(connection._writer.get_extra_info("socket"), _SILENCE_S)
    return connection


def install() -> None:
    """Replace aiokafka's connect function in this process: aiokafka has no option for it."""
    client.create_conn = connect
