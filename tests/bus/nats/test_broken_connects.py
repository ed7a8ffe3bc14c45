"""Errors that nats-py does not document: each is waited out, at the start and later."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from millrace.bus.nats.connection import Connection
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusUnavailableError
from tests.support.links.broken_connects import each_broken, raising
from tests.support.servers import NatsServer
from tests.support.waiting import eventually

each_place = pytest.mark.parametrize(
    ("owner", "method"),
    [
        (asyncio, "open_connection"),
        (TcpTransport, "readline"),
        (TcpTransport, "drain"),
        (Client, "_connect_command"),
        (Client, "_process_info"),
    ],
    ids=["socket", "greeting", "flush", "command", "info"],
)


@each_broken
@each_place
async def test_opening_survives_broken_connects(
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    broken: BaseException,
    owner: Any,
    method: str,
) -> None:
    connection = Connection(NatsConfig(url=nats_server.url, connect_timeout_s=0.15), "test")
    monkeypatch.setattr(owner, method, raising(broken))
    with pytest.raises(BusUnavailableError):
        await connection.open()


@each_broken
@each_place
async def test_a_lost_connection_survives_broken_connects(
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    broken: BaseException,
    owner: Any,
    method: str,
) -> None:
    connection = Connection(NatsConfig(url=nats_server.url), "test")
    await connection.open()
    lost: list[bool] = []
    connection.on_loss(lambda: lost.append(True))
    with monkeypatch.context() as patched:
        failing = Mock(side_effect=broken)
        patched.setattr(owner, method, failing)
        connection._client.abort()
        await eventually(lambda: bool(lost) and not connection.connected)
        assert await connection.request("nobody", b"", 0.05) is None
        await eventually(lambda: failing.call_count >= 2)
        assert not connection.connected
    assert await connection.wait_connected(5.0)
    assert await answered(connection)
    await connection.close()
    await eventually(lambda: not any("_reconnect" in repr(task) for task in asyncio.all_tasks()))


async def answered(connection: Connection) -> bool:
    heard = asyncio.Event()
    subscription = await connection.subscribe("echo", lambda _message: heard.set())
    await connection.publish("echo", b"")
    await asyncio.wait_for(heard.wait(), 5.0)
    await subscription.close()
    return True


@each_broken
async def test_a_connection_survives_a_broken_read(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, broken: BaseException
) -> None:
    """nats-py's reader would end without a word."""
    connection = Connection(NatsConfig(url=nats_server.url), "test")
    await connection.open()
    lost: list[bool] = []
    connection.on_loss(lambda: lost.append(True))
    with monkeypatch.context() as patched:
        patched.setattr(TcpTransport, "read", raising(broken))
        await connection.request("nobody", b"", 0.05)
        await eventually(lambda: bool(lost))
    assert await connection.wait_connected(5.0)
    assert await answered(connection)
    await connection.close()
