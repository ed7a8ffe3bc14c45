"""Connections to a real Redis with TLS, users and sentinels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.config import RedisConfig
from millrace.schemas.errors import (
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
    UntrustedServerError,
)
from tests.support.certificates import Authority, Pair
from tests.support.servers import RedisServer, TlsRedisServer, free_port, tls_redis_path
from tests.support.waiting import eventually

with_tls_redis = pytest.mark.skipif(
    tls_redis_path() is None, reason="no redis-server with TLS is on this machine"
)

USERS = """\
user default off
user millrace on >correct-horse ~* &* +@all
user guest on >guest ~* &* +ping
"""


@contextmanager
def serving(server: RedisServer) -> Iterator[RedisServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def tls_redis(
    directory: Path, authority: Authority, pair: Pair, *, verify: str = "no", options: str = ""
) -> Iterator[RedisServer]:
    files = (authority.certificate, *pair)
    with serving(TlsRedisServer(directory / "redis", files, verify=verify, options=options)) as it:
        yield it


async def works(config: RedisConfig) -> None:
    link = RedisLink(config)
    try:
        # A loaded machine may need more than one try within the link's short patience.
        await eventually(lambda: _answers(link), 20.0, "Redis answers")
    finally:
        await link.close()


async def _answers(link: RedisLink) -> bool:
    await link.check()
    try:
        await link.call("SET", "a", "b")
    except RedisUnreachableError:
        return False
    return bool(await link.call("GET", "a") == b"b")


async def refused(config: RedisConfig, kind: type[MillraceError], *said: str) -> None:
    with pytest.raises(kind) as raised:
        await works(config)
    for word in said:
        assert word in raised.value.message, raised.value.message
    assert not config.password or config.password not in raised.value.message


@with_tls_redis
async def test_tls_with_our_authority(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other", "Another")
    with tls_redis(tmp_path, ours, ours.sign("redis")) as server:
        await works(RedisConfig(url=f"{server.url}/0", ca_file=str(ours.certificate)))
        # The file alone demands TLS.
        plain = f"redis://127.0.0.1:{server.port}/0"
        await works(RedisConfig(url=plain, ca_file=str(ours.certificate)))
        for config in (
            RedisConfig(url=server.url, ca_file=str(other.certificate)),
            RedisConfig(url=server.url),
        ):
            await refused(config, UntrustedServerError, "no trusted authority", "redis.ca_file")


@with_tls_redis
@pytest.mark.parametrize(("expired", "said"), [(True, "has expired"), (False, "another name")])
async def test_certificates_that_are_not_good(tmp_path: Path, expired: bool, said: str) -> None:
    authority = Authority(tmp_path / "ca")
    hosts = ("127.0.0.1",) if expired else ("redis.example",)
    with tls_redis(tmp_path, authority, authority.sign("it", hosts, expired=expired)) as server:
        config = RedisConfig(url=server.url, ca_file=str(authority.certificate))
        await refused(config, UntrustedServerError, said)


@with_tls_redis
async def test_certificates_of_both_sides_and_users(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "Another")
    mine, strange = authority.sign("gateway"), other.sign("stranger")
    with tls_redis(
        tmp_path, authority, authority.sign("it"), verify="yes", options=USERS
    ) as server:

        def config(pair: Pair | None, user: str = "millrace", password: str = "correct-horse"):  # type: ignore[no-untyped-def]
            return RedisConfig(
                url=server.url,
                ca_file=str(authority.certificate),
                certificate_file="" if pair is None else str(pair.certificate),
                key_file="" if pair is None else str(pair.key),
                user=user,
                password=password,
            )

        await works(config(mine))
        await refused(config(None), CredentialsRefusedError, "without a certificate")
        await refused(config(strange), CredentialsRefusedError, "our certificate")
        await refused(
            config(mine, password="wrong-horse"), CredentialsRefusedError, "redis.user millrace"
        )


async def test_users_passwords_and_what_a_user_may_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class WithUsers(RedisServer):
        def command(self) -> list[str]:
            lists = self.directory / "users.acl"
            lists.write_text(USERS)
            return [*super().command(), "--aclfile", str(lists)]

        def greets(self, connection: object) -> bool:
            return True

    with serving(WithUsers(tmp_path / "redis")) as server:
        await works(RedisConfig(url=server.url, user="millrace", password="correct-horse"))
        await works(RedisConfig(url=f"redis://millrace:correct%2Dhorse@127.0.0.1:{server.port}/0"))
        wrong = RedisConfig(url=server.url, user="millrace", password="wrong-horse")
        await refused(wrong, CredentialsRefusedError, "redis.password of redis.user millrace")
        in_url = RedisConfig(url=f"redis://millrace:wrong-horse@127.0.0.1:{server.port}/0")
        await refused(in_url, CredentialsRefusedError, "user data in redis.url", "***@127.0.0.1")
        await refused(RedisConfig(url=server.url), CredentialsRefusedError, "redis.password")
        caplog.clear()
        guest = RedisLink(RedisConfig(url=server.url, user="guest", password="guest"))
        await guest.check()
        with pytest.raises(RedisUnreachableError):
            await guest.call("SET", "a", "b")
        await guest.close()
        assert [vars(record).get("command") for record in caplog.records] == ["SET"]
    logged = "".join(str(vars(record)) for record in caplog.records)
    assert "wrong-horse" not in logged


@with_tls_redis
async def test_sentinels_name_the_master_and_the_next_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = (authority.certificate, *authority.sign("it"))
    users = "user default off\nuser millrace on >pw ~* &* +@all\n"
    ours = f"masteruser millrace\nmasterauth pw\n{users}"
    first = TlsRedisServer(tmp_path / "first", files, options=ours)
    second = TlsRedisServer(
        tmp_path / "second", files, options=f"{ours}replicaof 127.0.0.1 {first.port}\n"
    )
    watcher = TlsRedisServer(
        tmp_path / "sentinel",
        files,
        options=(
            f"sentinel monitor queue 127.0.0.1 {first.port} 1\n"
            "sentinel auth-user queue millrace\nsentinel auth-pass queue pw\n"
            "sentinel down-after-milliseconds queue 500\n"
            "sentinel failover-timeout queue 2000\n"
            "user default off\nuser watcher on >spw ~* &* +@all\n"
        ),
        sentinel=True,
    )
    with serving(first), serving(second), serving(watcher):
        config = RedisConfig(
            url="rediss://of.no.use/0",
            user="millrace",
            password="pw",
            ca_file=str(authority.certificate),
            sentinels=(f"127.0.0.1:{free_port()}", f"127.0.0.1:{watcher.port}"),
            sentinel_master="queue",
            sentinel_user="watcher",
            sentinel_password="spw",
        )
        link = RedisLink(config)
        try:

            async def writes_to(port: int) -> bool:
                try:
                    await link.call("SET", "to", str(port))
                    info = await link.call("INFO", "server")
                except RedisUnreachableError:
                    return False
                return bool(info["tcp_port"] == port)

            await eventually(lambda: writes_to(first.port), 30.0, "the first is used")
            direct = RedisLink(
                RedisConfig(url=second.url, user="millrace", password="pw", ca_file=config.ca_file)
            )

            async def is_copied() -> bool:
                try:
                    return bool(await direct.call("GET", "to") == str(first.port).encode())
                except RedisUnreachableError:
                    return False

            await eventually(is_copied, 60.0, "the second has what the first has")
            await direct.close()
            first.kill()
            await eventually(lambda: writes_to(second.port), 60.0, "the second is used")
        finally:
            await link.close()


async def test_unreachable_redis_prevents_no_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    link = RedisLink(RedisConfig(url=f"redis://user:pw@127.0.0.1:{free_port()}/0"))
    async with asyncio.timeout(10.0):
        await link.check()
    await link.close()
    assert [record.message for record in caplog.records] == ["Redis is unreachable"]
    assert "pw" not in str(vars(caplog.records[0]))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RedisConfig(url="http://host"), "redis.url"),
        (RedisConfig(url="redis://host:port"), "redis.url"),
        (RedisConfig(ca_file="/nowhere/ca.pem"), "redis.ca_file"),
        (RedisConfig(certificate_file="/nowhere/c.pem"), "redis.key_file"),
        (RedisConfig(url="unix:///run/redis.sock", ca_file="/nowhere"), "local socket"),
    ],
)
async def test_settings_that_cannot_be(config: RedisConfig, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RedisLink(config)
    assert said in raised.value.message
