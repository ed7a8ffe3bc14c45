"""Access check of the store's HTTP interface: requests need its name and password, and must not
come from web pages.

A foreign page may make a browser send requests here, or point its own name here after loading (DNS
rebinding). Both are refused before the password is checked.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.types import Scope

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError
from millrace.telemetry.store.reading import User

_AUTHENTICATION_FAILED = 516
_ACCESS_DENIED = 497
_DEFAULT_USER = "default"


class AccessRefusal(NamedTuple):
    """Refusal of a request. ``number`` is ClickHouse's code."""

    status: int
    number: int
    message: str


class AccessCheck:
    """Check of a request before any work is done for it."""

    def __init__(self, config: ClickHouseConfig) -> None:
        """Read the users. Raises ConfigError if no password is set."""
        if not config.password:
            raise ConfigError(
                "clickhouse.password is empty, and the embedded store is served with a password "
                "only. Set it, and have clients send it with clickhouse.username."
            )
        self._host = config.serve_host
        self._users: dict[User, tuple[bytes, bytes]] = {
            "full": (config.username.encode(), config.password.encode())
        }
        if config.analyst_password:
            if config.analyst_username == config.username:
                raise ConfigError(
                    "clickhouse.analyst_username is clickhouse.username: give the analyst another "
                    "name."
                )
            analyst = config.analyst_username.encode(), config.analyst_password.encode()
            self._users["analyst"] = analyst

    def refusal_of_origin(self, scope: Scope) -> AccessRefusal | None:
        """Return the refusal of a request from a web page or under an untrusted host name; None if
        it may pass."""
        host, origin = header_of(scope, b"host"), header_of(scope, b"origin")
        if host and not self._is_here(host):
            return _refusal(
                403,
                _ACCESS_DENIED,
                f"This store is not {host:.200}: ask for its address, or for localhost. "
                "(ACCESS_DENIED)",
            )
        if origin:
            return _refusal(
                403,
                _ACCESS_DENIED,
                f"Pages of {origin:.200} may not read this store. (ACCESS_DENIED)",
            )
        return None

    def user_of(self, scope: Scope, arguments: Mapping[str, str]) -> User | AccessRefusal:
        """Return the user whose name and password the request has, or a refusal.

        Both are compared in constant time.
        """
        given = _credentials(scope, arguments)
        if given is None:
            return _refusal(
                401,
                _AUTHENTICATION_FAILED,
                "Authentication failed: send a name and a password, by HTTP basic authentication, "
                "X-ClickHouse-User and X-ClickHouse-Key, or user and password in the address. "
                "(AUTHENTICATION_FAILED)",
            )
        name, password = given
        found: User | None = None
        for user, (right_name, right_password) in self._users.items():
            has_name = hmac.compare_digest(name.encode(), right_name)
            has_password = hmac.compare_digest(password.encode(), right_password)
            if has_name and has_password:
                found = user
        if found is not None:
            return found
        return _refusal(
            403,
            _AUTHENTICATION_FAILED,
            "Authentication failed: password is incorrect, or there is no user with such name. "
            "(AUTHENTICATION_FAILED)",
        )

    def _is_here(self, host: str) -> bool:
        """Return whether the ``Host`` header is safe from DNS rebinding.

        Safe are any IP address, the configured host, and a name without a dot, which only this
        machine or its network can define.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return "." not in name or name == self._host or _is_address(name)


def header_of(scope: Scope, name: bytes) -> str:
    """Return the value of a header; empty if the request has none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


def _credentials(scope: Scope, arguments: Mapping[str, str]) -> tuple[str, str] | None:
    """Return name and password in the first of ClickHouse's forms that is present."""
    user = _utf8(header_of(scope, b"x-clickhouse-user"))
    key = _utf8(header_of(scope, b"x-clickhouse-key"))
    if user or key:
        return user or _DEFAULT_USER, key
    kind, _, encoded = header_of(scope, b"authorization").partition(" ")
    if kind.lower() == "basic":
        try:
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            # Invalid base64 or UTF-8.
            return "", ""
        return name, password
    if "user" in arguments or "password" in arguments:
        return arguments.get("user", _DEFAULT_USER), arguments.get("password", "")
    return None


def _utf8(header: str) -> str:
    return header.encode("latin-1").decode(errors="replace")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(status: int, number: int, why: str) -> AccessRefusal:
    return AccessRefusal(status, number, f"Code: {number}. DB::Exception: {why}")
