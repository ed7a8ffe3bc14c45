"""Connections to a real nats-server with authentication and TLS."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.bus.nats import connect
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import (
    BusUnavailableError,
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
    UntrustedServerError,
)
from tests.support.certificates import Authority, Pair, encrypt_key
from tests.support.nats.accounts import Operator, make_keys
from tests.support.servers import NatsServer, free_port
from tests.support.waiting import eventually

PASSWORD = "correct horse"


@contextmanager
def serving(directory: Path, options: str) -> Iterator[NatsServer]:
    server = NatsServer(directory / "server", options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def tls_options(pair: Pair, verify: Authority | None = None) -> str:
    lines = [f'cert_file: "{pair.certificate}"', f'key_file: "{pair.key}"']
    if verify is not None:
        lines += [f'ca_file: "{verify.certificate}"', "verify: true"]
    return "tls {\n  " + "\n  ".join(lines) + "\n}\n"


async def works(config: NatsConfig) -> None:
    """Assert that a scheduler connects with this configuration."""
    bus = await connect(config, "test", part=Part.SCHEDULER)
    try:
        assert bus.connected
    finally:
        await bus.close()


async def refused(config: NatsConfig, kind: type[MillraceError], *messages: str) -> None:
    with pytest.raises(kind) as raised:
        await works(config)
    for word in messages:
        assert word in raised.value.message, raised.value.message
    for secret in (config.password, config.token, config.nkey_seed):
        assert not secret or secret not in raised.value.message


async def test_user_and_password(tmp_path: Path) -> None:
    options = f'authorization {{ user: millrace, password: "{PASSWORD}" }}\n'
    with serving(tmp_path, options) as server:
        right = NatsConfig(url=server.url, user="millrace", password=PASSWORD)
        await works(right)
        await works(NatsConfig(url=f"nats://millrace:correct%20horse@127.0.0.1:{server.port}"))
        wrong = NatsConfig(url=server.url, user="millrace", password="wrong")
        await refused(wrong, CredentialsRefusedError, "nats.password", "millrace")
        in_url = NatsConfig(url=f"nats://millrace:wrong@127.0.0.1:{server.port}")
        await refused(in_url, CredentialsRefusedError, "user data in nats.url")
        await refused(NatsConfig(url=server.url), CredentialsRefusedError, "nats.user")


async def test_token(tmp_path: Path) -> None:
    with serving(tmp_path, 'authorization { token: "s3cret" }\n') as server:
        await works(NatsConfig(url=server.url, token="s3cret"))
        await refused(
            NatsConfig(url=server.url, token="other"), CredentialsRefusedError, "nats.token"
        )


async def test_nkey(tmp_path: Path) -> None:
    ours, strange = make_keys(), make_keys()
    options = f"authorization {{ users: [ {{ nkey: {ours.public} }} ] }}\n"
    with serving(tmp_path, options) as server:
        await works(NatsConfig(url=server.url, nkey_seed=ours.seed))
        await refused(
            NatsConfig(url=server.url, nkey_seed=strange.seed),
            CredentialsRefusedError,
            "nats.nkey_seed",
        )


async def test_creds_of_an_operator(tmp_path: Path) -> None:
    operator, stranger = Operator(), Operator()
    ours, strange, expired = (tmp_path / name for name in ("our.creds", "no.creds", "old.creds"))
    operator.write_creds(ours)
    stranger.write_creds(strange)
    operator.write_creds(expired, ttl_s=-60)
    with serving(tmp_path, operator.options) as server:
        await works(NatsConfig(url=server.url, creds_file=str(ours)))
        for path in (strange, expired):
            await refused(
                NatsConfig(url=server.url, creds_file=str(path)),
                CredentialsRefusedError,
                "nats.creds_file",
                path.name,
            )


async def test_creds_that_expire_are_replaced_while_connected(tmp_path: Path) -> None:
    operator = Operator()
    creds = tmp_path / "our.creds"
    operator.write_creds(creds, ttl_s=3)
    with serving(tmp_path, operator.options) as server:
        config = NatsConfig(url=server.url, creds_file=str(creds))
        connection = Connection(config, "test")
        losses = 0

        def on_loss() -> None:
            nonlocal losses
            losses += 1

        await connection.open()
        try:
            connection.on_loss(on_loss)
            operator.write_creds(creds)
            await eventually(lambda: losses > 0, 30.0, "the old credentials expire")
            assert await connection.wait_connected(20.0)
            answer = await connection.request("$JS.API.INFO", b"", 5.0)
            assert answer is not None
        finally:
            await connection.close()


async def test_tls_with_our_authority(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other", "Another")
    pair = ours.sign("nats")
    with serving(tmp_path, tls_options(pair)) as server:
        await works(NatsConfig(url=server.url, ca_file=str(ours.certificate)))
        by_scheme = f"tls://127.0.0.1:{server.port}"
        await works(NatsConfig(url=by_scheme, ca_file=str(ours.certificate)))
        for config in (
            NatsConfig(url=server.url, ca_file=str(other.certificate)),
            NatsConfig(url=by_scheme),
            NatsConfig(url=server.url),
        ):
            await refused(config, UntrustedServerError, "no trusted authority", "nats.ca_file")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ca: ca.sign("old", expired=True), "has expired"),
        (lambda ca: ca.sign("elsewhere", ("nats.example",)), "for another name"),
    ],
    ids=["expired", "another host's"],
)
async def test_certificates_that_are_not_good(
    tmp_path: Path, make: Callable[[Authority], Pair], message: str
) -> None:
    authority = Authority(tmp_path / "ca")
    with serving(tmp_path, tls_options(make(authority))) as server:
        config = NatsConfig(url=server.url, ca_file=str(authority.certificate))
        await refused(config, UntrustedServerError, message)


async def test_certificates_of_both_sides(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "Another")
    mine, strange = authority.sign("gateway"), other.sign("stranger")
    with serving(tmp_path, tls_options(authority.sign("nats"), verify=authority)) as server:

        def config(pair: Pair | None) -> NatsConfig:
            return NatsConfig(
                url=server.url,
                ca_file=str(authority.certificate),
                certificate_file="" if pair is None else str(pair.certificate),
                key_file="" if pair is None else str(pair.key),
            )

        await works(config(mine))
        await refused(config(None), CredentialsRefusedError, "without a certificate")
        await refused(config(strange), CredentialsRefusedError, "our certificate")


async def test_nothing_is_told_without_tls_where_tls_is_demanded(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    options = f'authorization {{ user: millrace, password: "{PASSWORD}" }}\n'
    with serving(tmp_path, f"debug: true\ntrace: true\n{options}") as server:
        for url, ca_file in (
            (server.url, str(authority.certificate)),
            (f"tls://127.0.0.1:{server.port}", ""),
        ):
            config = NatsConfig(url=url, ca_file=ca_file, user="millrace", password=PASSWORD)
            await refused(config, UntrustedServerError, "has no TLS")
        assert "CONNECT {" not in server.log_path.read_text()


async def test_the_client_skips_absent_and_untrusted_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other", "Another")
    # In the given order; otherwise by chance.
    monkeypatch.setattr("nats.aio.client.shuffle", lambda servers: None)
    with (
        serving(tmp_path / "a", tls_options(other.sign("a"))) as strange,
        serving(tmp_path / "b", tls_options(ours.sign("b"))) as good,
    ):
        absent = f"nats://127.0.0.1:{free_port()}"
        url = f"{absent}, {strange.url}, {good.url}"
        await works(NatsConfig(url=url, ca_file=str(ours.certificate)))
        await refused(
            NatsConfig(url=strange.url, ca_file=str(ours.certificate)), UntrustedServerError
        )
    nobody = NatsConfig(url=absent, ca_file=str(ours.certificate), connect_timeout_s=0.5)
    await refused(nobody, BusUnavailableError, "No NATS server answers")


async def test_a_password_that_is_changed_in_the_server_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = 'authorization {{ user: millrace, password: "{}" }}\n'
    server = NatsServer(tmp_path / "server", options.format("first"))
    server.start()
    connection = Connection(NatsConfig(url=server.url, user="millrace", password="first"), "test")
    try:
        await connection.open()
        server.stop()
        text = (tmp_path / "server" / "nats.conf").read_text()
        (tmp_path / "server" / "nats.conf").write_text(text.replace("first", "second"))
        server.start()

        def said() -> list[str]:
            return [
                str(vars(record)["cause"])
                for record in caplog.records
                if record.message == "a NATS server cannot be used"
            ]

        await eventually(lambda: bool(said()), 20.0, "the refusal is logged")
        (tmp_path / "server" / "nats.conf").write_text(text)
        server.stop()
        server.start()
        assert await connection.wait_connected(20.0)
        assert len(said()) == 1
        assert "nats.password" in said()[0]
        assert "first" not in caplog.text
    finally:
        await connection.close()
        server.stop()


def test_bad_key_and_certificate_files_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair, another = authority.sign("mine"), authority.sign("another")
    locked = authority.sign("locked")
    encrypt_key(locked.key, "sesame")
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("this is no PEM file\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    missing = tmp_path / "missing"
    operator = make_keys(prefix=14 << 3)
    cases: list[tuple[dict[str, object], str]] = [
        ({"ca_file": missing}, "nats.ca_file"),
        ({"ca_file": rubbish}, "nats.ca_file"),
        ({"ca_file": binary}, "nats.ca_file"),
        ({"ca_file": pair.key}, "nats.ca_file"),
        ({"certificate_file": missing, "key_file": pair.key}, "nats.certificate_file"),
        ({"certificate_file": rubbish, "key_file": pair.key}, "nats.certificate_file"),
        ({"certificate_file": pair.certificate, "key_file": missing}, "nats.key_file"),
        ({"certificate_file": pair.certificate, "key_file": rubbish}, "nats.key_file"),
        ({"certificate_file": pair.certificate, "key_file": another.key}, "is not the key of"),
        ({"certificate_file": locked.certificate, "key_file": locked.key}, "encrypted"),
        ({"certificate_file": pair.certificate}, "needs nats.key_file"),
        ({"key_file": pair.key}, "needs nats.certificate_file"),
        ({"creds_file": missing}, "nats.creds_file"),
        ({"creds_file": rubbish}, "nats.creds_file"),
        ({"nkey_seed": "SUAAA"}, "nats.nkey_seed"),
        ({"nkey_seed": "S"}, "nats.nkey_seed"),
        ({"nkey_seed": "no seed at all, é"}, "nats.nkey_seed"),
        ({"url": ""}, "nats.url"),
        ({"url": "http://somewhere"}, "nats.url"),
        ({"url": "nats://one:port"}, "nats.url"),
        ({"url": "nats://a:b@one,nats://c:d@two"}, "different user data"),
        ({"nkey_seed": operator.seed}, "nats.nkey_seed"),
    ]
    for fields, setting in cases:
        config = NatsConfig(**{name: str(value) for name, value in fields.items()})  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as raised:
            Connection(config, "test")
        assert setting in raised.value.message, raised.value.message
        assert operator.seed not in raised.value.message


def test_tls_needs_version_1_2_and_a_verified_host(tmp_path: Path) -> None:
    from millrace.runtime.tls import client_context

    context = client_context("nats", NatsConfig(ca_file=str(Authority(tmp_path).certificate)))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
