"""An operator, an account and its users for a nats-server in JWT mode, as ``nsc`` makes them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import nkeys


class Keys(NamedTuple):
    """``seed`` is secret; ``public`` names its owner."""

    seed: str
    public: str


def make_keys(prefix: int = nkeys.PREFIX_BYTE_USER) -> Keys:
    """Make keys of a user, or of the kind ``prefix``."""
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    return Keys(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


class Operator:
    """A server with ``options`` knows one account, which may use JetStream."""

    def __init__(self) -> None:
        self._operator = make_keys(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = make_keys(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = make_keys(nkeys.PREFIX_BYTE_ACCOUNT)

    @property
    def options(self) -> str:
        """Lines of a nats-server's configuration."""
        unlimited = {
            "subs": -1,
            "data": -1,
            "payload": -1,
            "imports": -1,
            "exports": -1,
            "wildcards": True,
            "conn": -1,
            "leaf": -1,
        }
        storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
        operator = self._sign(
            self._operator, self._operator.public, {"type": "operator", "version": 2}
        )
        account = self._sign(
            self._operator,
            self._account.public,
            {"type": "account", "version": 2, "limits": unlimited | storage},
        )
        system = self._sign(
            self._operator,
            self._system.public,
            {"type": "account", "version": 2, "limits": unlimited},
        )
        return (
            f"operator: {operator}\n"
            f"system_account: {self._system.public}\n"
            "resolver: MEMORY\n"
            "resolver_preload: {\n"
            f"  {self._account.public}: {account}\n  {self._system.public}: {system}\n}}\n"
        )

    def write_creds(self, path: Path, *, ttl_s: float | None = None) -> None:
        """Write the credentials of a new user; they expire after ``ttl_s``, if given."""
        user = make_keys()
        claims = {
            "type": "user",
            "version": 2,
            "subs": -1,
            "data": -1,
            "payload": -1,
            "pub": {},
            "sub": {},
        }
        jwt = self._sign(self._account, user.public, claims, ttl_s=ttl_s)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )

    def _sign(
        self, issuer: Keys, subject: str, claims: dict[str, Any], ttl_s: float | None = None
    ) -> str:
        now_s = int(time.time())
        body: dict[str, Any] = {
            "iat": now_s,
            "iss": issuer.public,
            "name": claims["type"],
            "sub": subject,
            "nats": claims,
        }
        if ttl_s is not None:
            body["exp"] = int(now_s + ttl_s)
        digest = hashlib.new("sha512_256", json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        head = _encode({"typ": "JWT", "alg": "ed25519-nkey"})
        signed = f"{head}.{_encode(body)}"
        signature = nkeys.from_seed(bytearray(issuer.seed.encode())).sign(signed.encode())
        return f"{signed}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def _encode(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
