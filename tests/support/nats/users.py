"""NATS server whose users have the permissions of deploy/nats."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.bus.nats import accounts
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Tier
from tests.support.servers import NatsServer

ACME = accounts.TenantService("acme", (Tier.FREE, Tier.BATCH))
SHOP = accounts.TenantService("shop", (Tier.PRO,))


class NatsWithUsers(NatsServer):
    """NATS server with the accounts of ``python -m millrace.bus.nats.accounts``.

    The users' passwords are in its environment.
    """

    def __init__(self, directory: Path, services: tuple[accounts.TenantService, ...]) -> None:
        super().__init__(directory, "include ./accounts.conf")
        (directory / "accounts.conf").write_text(accounts.text(services))
        users = [*(part.value for part in Part), *(service.user for service in services)]
        self.passwords = {user: f"p{secrets.token_hex(12)}" for user in users}

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as environment:
            for user, password in self.passwords.items():
                environment.setenv(accounts.password_variable(user), password)
            super().start()

    def url_of(self, user: str) -> str:
        return self.url.replace("://", f"://{user}:{self.passwords[user]}@")

    def config_of(self, user: str) -> NatsConfig:
        return NatsConfig(url=self.url_of(user), connect_timeout_s=10.0)


@contextlib.contextmanager
def nats_with_users(directory: Path) -> Iterator[NatsWithUsers]:
    """The parts, and the services of two tenants."""
    server = NatsWithUsers(directory, (ACME, SHOP))
    server.start()
    try:
        yield server
    finally:
        server.stop()
