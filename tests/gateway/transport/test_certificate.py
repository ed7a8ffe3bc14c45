"""TLS of the gateway: a certificate is replaced while streams run."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from millrace.gateway.transport.certificate import Certificate
from millrace.runtime.settings import load_config
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ConfigError
from tests.support.certificates import Authority, Pair
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.servers import NatsServer, free_port
from tests.support.waiting import eventually

_CHAT = {"model": "echo", "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def config_of(pair: Pair) -> GatewayConfig:
    return GatewayConfig(certificate_file=str(pair.certificate), key_file=str(pair.key))


def replace_files(shown: Pair, new: Pair) -> None:
    """Replace files by renaming, as certificate managers do."""
    for old, fresh in zip(shown, new, strict=True):
        fresh.rename(old)


def context_of(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


async def shown_name(port: int, authority: Authority) -> str:
    """The name in the certificate that a new handshake gets."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context_of(authority))
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(certificate["subject"][0][0][1])


@asynccontextmanager
async def secure_client(
    front: RunningGateway, authority: Authority
) -> AsyncIterator[httpx.AsyncClient]:
    url = front.url.replace("http://", "https://")
    async with httpx.AsyncClient(base_url=url, verify=context_of(authority), timeout=20) as made:
        yield made


async def test_chats_and_sockets_over_tls(authority: Authority) -> None:
    pair = authority.sign("front")
    async with (
        running_gateway(config_of(pair)) as front,
        secure_client(front, authority) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=_CHAT)
        assert answer.status_code == 200, answer.text
        async with http.stream(
            "POST", "/v1/chat/completions", json={**_CHAT, "stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        url = front.ws_url.replace("ws://", "wss://")
        async with connect(url, ssl=context_of(authority)) as socket:
            await socket.send('{"type": "ping"}')
            assert "pong" in str(await socket.recv())
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(base_url=front.url) as plain:
                await plain.get("/healthz")


async def test_new_handshakes_get_the_new_certificate_and_open_streams_stay(
    authority: Authority,
) -> None:
    pair = authority.sign("first")
    async with running_gateway(config_of(pair)) as front:
        port = int(front.url.rpartition(":")[2])
        url = front.ws_url.replace("ws://", "wss://")
        async with connect(url, ssl=context_of(authority)) as socket:
            assert await shown_name(port, authority) == "first"
            replace_files(pair, authority.sign("second"))

            async def is_new() -> bool:
                return await shown_name(port, authority) == "second"

            await eventually(is_new, 30.0, "the new certificate is shown")
            await socket.send('{"type": "ping"}')
            assert "pong" in str(await socket.recv())


def test_a_pair_that_cannot_be_used_leaves_the_old_one(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, other = authority.sign("first"), authority.sign("second")
    certificate = Certificate(config_of(pair))
    before = _handshake(certificate.context, authority)
    pair.certificate.write_bytes(other.certificate.read_bytes())  # and not yet its key
    assert not certificate.reload()
    assert "is not the key of" in caplog.text or "is not the key of" in str(
        [vars(record).get("cause") for record in caplog.records]
    )
    assert _handshake(certificate.context, authority) == before == "first"
    pair.key.write_bytes(other.key.read_bytes())
    assert certificate.reload()
    assert _handshake(certificate.context, authority) == "second"


def _handshake(context: ssl.SSLContext, authority: Authority) -> str:
    """Return the certificate's name that a client of ``context`` sees; it needs no socket."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = context_of(authority).wrap_bio(to_client, to_server, server_hostname="localhost")
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    subject = (client.getpeercert() or {})["subject"]
    return str(subject[0][0][1])


def test_sighup_has_the_process_read_it_again(authority: Authority, tmp_path: Path) -> None:
    pair = authority.sign("first")
    nats = NatsServer(tmp_path / "nats")
    nats.start()
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace.gateway"],
        env={
            **os.environ,
            "MILLRACE_NATS__URL": nats.url,
            "MILLRACE_REDIS__URL": f"redis://127.0.0.1:{free_port()}/0",
            "MILLRACE_GATEWAY__PORT": str(port),
            "MILLRACE_GATEWAY__CERTIFICATE_FILE": str(pair.certificate),
            "MILLRACE_GATEWAY__KEY_FILE": str(pair.key),
        },
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )

    async def shows(name: str) -> bool:
        try:
            return await shown_name(port, authority) == name
        except OSError:
            return False

    async def look() -> None:
        await eventually(lambda: shows("first"), 60.0, "the gateway is up")
        replace_files(pair, authority.sign("second"))
        process.send_signal(signal.SIGHUP)
        await eventually(lambda: shows("second"), 30.0, "the new certificate is shown")

    try:
        asyncio.run(look())
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=30)
        nats.stop()


def test_files_that_cannot_be_used_are_named_before_anything_starts(
    authority: Authority, tmp_path: Path
) -> None:
    pair = authority.sign("front")
    missing = str(tmp_path / "missing.pem")
    process = subprocess.run(
        [sys.executable, "-m", "millrace.gateway"],
        env={
            **os.environ,
            "MILLRACE_GATEWAY__CERTIFICATE_FILE": str(pair.certificate),
            "MILLRACE_GATEWAY__KEY_FILE": missing,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.strip().splitlines()[-1] == (
        f"gateway: gateway.key_file: {missing} cannot be read: No such file or directory."
    )
    with pytest.raises(
        ConfigError, match=r"gateway\.certificate_file also needs gateway\.key_file"
    ):
        load_config(None, {"MILLRACE_GATEWAY__CERTIFICATE_FILE": "x"})
