"""Credentials and trust of a connection to nats-server: options, and causes of refusals."""

from __future__ import annotations

import logging
import re
import ssl
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import nats.errors
import nkeys
from nats.aio.client import Client

from millrace.bus.nats.servers.client import ClosedAtOnceError, NoTlsError, is_refusal
from millrace.runtime.tls import (
    client_context,
    handshake_refusal,
    has_tls_files,
    read_setting_file,
)
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import (
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
    UntrustedServerError,
)
from millrace.schemas.redaction import redact_urls

logger = logging.getLogger(__name__)

_JWT = re.compile(r"-----BEGIN NATS USER JWT-----\s+(\S+)\s")
_SEED = re.compile(r"-----BEGIN USER NKEY SEED-----\s+(\S+)\s")


def servers_of(config: NatsConfig) -> list[str]:
    """Return the servers' addresses without user data.

    Raises ConfigError for an invalid address.
    """
    servers = []
    for url in _addresses(config):
        parts = _parse(url)
        servers.append(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    if not servers:
        raise ConfigError("nats.url names no server.")
    return servers


def connect_options(config: NatsConfig) -> dict[str, Any]:
    """Return nats-py's options for the configured credentials and files.

    Raises ConfigError, which names the invalid setting.
    """
    options = _user_data(config)
    if config.user:
        options = {"user": config.user, "password": config.password}
    if config.token:
        options["token"] = config.token
    if config.nkey_seed:
        _check_seed("nats.nkey_seed", config.nkey_seed)
        options["nkeys_seed_str"] = config.nkey_seed
    if config.creds_file:
        _check_creds(config.creds_file)
        options["user_credentials"] = config.creds_file
    if has_tls_files(config):
        options["tls"] = client_context("nats", config)
    return options


def _addresses(config: NatsConfig) -> list[str]:
    return [url.strip() for url in config.url.split(",") if url.strip()]


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        is_usable = parts.scheme in {"nats", "tls", "ws", "wss"} and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"nats.url must look like nats://host:4222 or tls://host:4222, got {redact_urls(url)}"
        )
    return parts


def _user_data(config: NatsConfig) -> dict[str, Any]:
    """Return the user data in the addresses: one user for all servers, also discovered ones."""
    users = {parts.netloc.rpartition("@")[0] for parts in map(_parse, _addresses(config))} - {""}
    if len(users) > 1:
        raise ConfigError("nats.url has different user data for its servers. Use the same for all.")
    if not users:
        return {}
    user, has_password, password = users.pop().partition(":")
    if has_password:
        return {"user": unquote(user), "password": unquote(password)}
    return {"token": unquote(user)}


def _check_seed(setting: str, seed: str) -> None:
    try:
        pair = nkeys.from_seed(bytearray(seed.strip().encode()))
        is_user = pair.public_key.startswith(b"U")
    except (nkeys.NkeysError, ValueError, IndexError):
        is_user = False
    if not is_user:
        # Without the cause, which could reveal the seed.
        raise ConfigError(f"{setting} is not the seed of a user (SU…).") from None


def _check_creds(path: str) -> None:
    text = read_setting_file("nats.creds_file", path)
    seed = _SEED.search(text)
    if _JWT.search(text) is None or seed is None:
        raise ConfigError(
            f"nats.creds_file: {path} has no user's JWT and seed, as nsc writes them."
        )
    _check_seed(f"nats.creds_file: the seed in {path}", seed.group(1))


def why_refused(error: Exception, client: Client, config: NatsConfig) -> MillraceError | None:
    """Return the error if a retry does not help: an untrusted server, or refused credentials.

    None for all other errors.
    """
    server = client._current_server
    where = redact_urls(config.url if server is None else server.uri.geturl())
    who = f"The NATS server at {where}"
    is_missed = _misses_certificate(error, client, config)
    refusal = handshake_refusal(error, who, "nats", config, wants_certificate=is_missed)
    if refusal is not None:
        return refusal
    if isinstance(error, NoTlsError):
        return UntrustedServerError(
            f"{who} has no TLS, which nats.url or a file of nats.* demands."
        )
    if isinstance(error, nats.errors.Error) and is_refusal(str(error)):
        return CredentialsRefusedError(f"{who} does not take {_credentials(config)}.")
    return None


def _misses_certificate(error: Exception, client: Client, config: NatsConfig) -> bool:
    """Return whether the server hung up as it demands a certificate that the client lacks."""
    hung_up = isinstance(error, ClosedAtOnceError | ConnectionError | ssl.SSLError)
    return hung_up and bool(client._server_info.get("tls_verify")) and not config.certificate_file


def _credentials(config: NatsConfig) -> str:
    if config.creds_file:
        return f"the credentials in {config.creds_file} (nats.creds_file); they may have expired"
    if config.nkey_seed:
        return "the key of nats.nkey_seed"
    if config.token:
        return "nats.token"
    if config.user:
        return f"nats.password of nats.user {config.user}"
    if "@" in config.url:
        return "the user data in nats.url"
    return "clients without credentials; set nats.user and nats.password, or others of nats.*"


class ConnectionRefusals:
    """Refusals of servers that a retry does not help against."""

    def __init__(self, config: NatsConfig) -> None:
        self._config = config
        self._was_connected = False
        self._by_server: dict[str, MillraceError] = {}
        self._logged: set[str] = set()

    @property
    def last(self) -> MillraceError | None:
        return next(reversed(self._by_server.values()), None)

    def on_connected(self) -> None:
        self._was_connected = True
        self._logged.clear()

    def note(self, error: Exception, client: Client) -> None:
        """Record a refusal.

        Before the first connection, raises once no server is left to try. Later it logs each reason
        once: the cause may be corrected while this process retries.
        """
        refusal = why_refused(error, client, self._config)
        if refusal is None:
            return
        if self._was_connected:
            if refusal.message not in self._logged:
                self._logged.add(refusal.message)
                logger.error("a NATS server cannot be used", extra={"cause": refusal.message})
            return
        server = client._current_server
        self._by_server[server.uri.netloc if server is not None else ""] = refusal
        if len(self._by_server) >= len(servers_of(self._config)):
            raise refusal
