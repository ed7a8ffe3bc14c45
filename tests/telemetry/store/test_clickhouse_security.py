"""ClickHouse's protocol over TLS: the embedded engine's endpoint behind a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from millrace.cli.analytics.store import ask_server
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import (
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
    UntrustedServerError,
)
from millrace.telemetry.http.interface import HttpServer
from millrace.telemetry.store.clickhouse_server import raise_refusal, server_connect
from millrace.telemetry.store.store import Store
from tests.support.certificates import Authority, Pair
from tests.support.servers import free_port
from tests.support.system import DEAD_PROXIES
from tests.telemetry.stores import streaming
from tests.telemetry.tls_proxy import tls_proxy


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def plain_config(store: Store) -> AsyncIterator[ClickHouseConfig]:
    """Yield the configuration of a client of an endpoint without TLS."""
    port = free_port()
    config = ClickHouseConfig(
        url=f"http://127.0.0.1:{port}", serve_port=port, password="correct-horse"
    )
    server = HttpServer(streaming(store), config)
    running = asyncio.create_task(server.run())
    yield config
    server.stop()
    await running


def behind(plain_config: ClickHouseConfig, port: int, authority: Authority) -> ClickHouseConfig:
    """Return the configuration of the same endpoint behind a TLS proxy."""
    url = f"https://127.0.0.1:{port}"
    return replace(plain_config, url=url, ca_file=str(authority.certificate))


def with_pair(config: ClickHouseConfig, pair: Pair) -> ClickHouseConfig:
    return replace(config, certificate_file=str(pair.certificate), key_file=str(pair.key))


async def works(config: ClickHouseConfig) -> None:
    """Assert that the sink's client and ``millrace sql`` work with this configuration."""

    def ask() -> object:
        client = server_connect(config)()
        try:
            return client.query("SELECT 41 + 1").result_rows[0][0]
        finally:
            client.close()

    assert await asyncio.to_thread(ask) == 42
    assert b"42" in await asyncio.to_thread(ask_server, "SELECT 41 + 1", config, {})


async def refused(config: ClickHouseConfig, kind: type[MillraceError], *messages: str) -> None:
    """The same is said to the telemetry process and to ``millrace sql``."""

    async def ask() -> object:
        return await asyncio.to_thread(ask_server, "SELECT 1", config, {})

    ways: list[Callable[[], object]] = [lambda: Store.open(config), ask]
    for way in ways:
        with pytest.raises(kind) as raised:
            await way()  # type: ignore[misc]
        for word in messages:
            assert word in raised.value.message, raised.value.message


async def test_tls_with_our_authority(
    plain_config: ClickHouseConfig, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "Another")
    async with tls_proxy(plain_config.serve_port, authority.sign("it")) as port:
        config = behind(plain_config, port, authority)
        await works(config)
        untrusting = replace(config, ca_file=str(other.certificate))
        await refused(untrusting, UntrustedServerError, "no trusted", "clickhouse.ca_file")
        await refused(replace(config, ca_file=""), UntrustedServerError, "clickhouse.ca_file")


async def test_no_proxy_of_the_shell_stands_between(
    plain_config: ClickHouseConfig, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in DEAD_PROXIES.items():
        monkeypatch.setenv(name, value)
    await works(plain_config)
    async with tls_proxy(plain_config.serve_port, authority.sign("it")) as port:
        await works(behind(plain_config, port, authority))


@pytest.mark.parametrize(("expired", "message"), [(True, "has expired"), (False, "another name")])
async def test_certificates_that_are_not_good(
    plain_config: ClickHouseConfig, authority: Authority, expired: bool, message: str
) -> None:
    hosts = ("127.0.0.1",) if expired else ("clickhouse.example",)
    async with tls_proxy(
        plain_config.serve_port, authority.sign("it", hosts, expired=expired)
    ) as port:
        await refused(behind(plain_config, port, authority), UntrustedServerError, message)


async def test_certificates_of_both_sides(
    plain_config: ClickHouseConfig, authority: Authority, tmp_path: Path
) -> None:
    pair, strange = authority.sign("mine"), Authority(tmp_path / "o", "Another").sign("strange")
    async with tls_proxy(plain_config.serve_port, authority.sign("it"), clients=authority) as port:
        config = behind(plain_config, port, authority)
        await works(with_pair(config, pair))
        await refused(config, CredentialsRefusedError, "without a certificate")
        await refused(with_pair(config, strange), CredentialsRefusedError, "our certificate")


def test_a_wrong_password_is_told_from_an_absent_server() -> None:
    class RefusedError(Exception):
        code = 516

    config = ClickHouseConfig(url="http://host", username="sink", password="horse")
    with pytest.raises(CredentialsRefusedError, match=r"clickhouse\.username sink") as raised:
        raise_refusal(RefusedError(), config)
    assert "horse" not in raised.value.message
    raise_refusal(OSError("away"), config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClickHouseConfig(url="https://h", ca_file="/nowhere"), "clickhouse.ca_file"),
        (ClickHouseConfig(url="https://h", key_file="/nowhere"), "clickhouse.certificate_file"),
        (ClickHouseConfig(url="ftp://root:horse@h"), "clickhouse.url"),
    ],
)
def test_settings_that_cannot_be(config: ClickHouseConfig, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        server_connect(config)
    assert message in raised.value.message
    assert "horse" not in raised.value.message
