"""Connection errors of one type, and links to Redis after an undocumented error of its library."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvloop
from redis.asyncio.connection import ConnectionPool

from millrace.runtime.faults.connections import (
    BrokenConnectionError,
    ConnectionErrors,
    bound_silence,
)
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.runtime.redis.wire import RedisWire
from millrace.schemas.config import RedisConfig
from tests.support.links.broken_connects import each_broken, raising
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer

PAUSE_S = 1.1


class DocumentedError(Exception):
    """Error that a library documents."""


@each_broken
async def test_what_a_library_does_not_document_is_one_error(broken: BaseException) -> None:
    with pytest.raises(BrokenConnectionError) as caught, ConnectionErrors(DocumentedError):
        raise broken
    assert caught.value.__cause__ is broken


@pytest.mark.parametrize("error", [DocumentedError("x"), OSError("x"), TimeoutError("x")])
async def test_what_it_documents_stays(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, ConnectionErrors(DocumentedError):
        raise error
    assert caught.value is error


async def test_a_task_that_is_cancelled_ends() -> None:
    async def connect() -> None:
        with ConnectionErrors():
            await asyncio.sleep(60)

    task = asyncio.create_task(connect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_limit_around_it_stays_a_time_limit() -> None:
    async def connect() -> None:
        async with asyncio.timeout(0.01):
            with ConnectionErrors():
                await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await connect()


def test_a_socket_notices_a_peer_that_is_gone() -> None:
    with socket.socket() as one:
        bound_silence(one, 2.5)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2_500
    local, other = socket.socketpair()
    with local, other:
        bound_silence(local, 2.5)  # it has no such options


@each_broken
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (ConnectionPool, "get_connection"),
        (ConnectionPool, "ensure_connection"),
        (asyncio, "open_connection"),
        (RedisWire, "__init__"),
    ],
    ids=["pool", "again", "socket", "wire"],
)
async def test_a_connect_to_redis_that_breaks_is_waited_out(
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    broken: BaseException,
    owner: Any,
    method: str,
) -> None:
    clock = ManualClock()
    link = RedisLink(RedisConfig(url=f"{redis_server.url}/0"), clock)
    if method == "ensure_connection":
        # It is asked for a second connection.
        assert await link.call("PING")
        assert link._wire is not None
        link._wire.close()
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, raising(broken))
        for _ in range(3):
            with pytest.raises(RedisUnreachableError):
                async with asyncio.timeout(2.0):
                    await link.call("PING")
            await clock.advance(PAUSE_S)
    assert await link.call("PING")
    await link.close()


def test_a_write_to_a_transport_that_uvloop_closed_is_a_loss(redis_server: RedisServer) -> None:
    async def write() -> None:
        link = RedisLink(RedisConfig(url=f"{redis_server.url}/0"))
        assert await link.call("PING")
        wire = link._wire
        assert wire is not None
        wire._transport.abort()
        await asyncio.sleep(0.01)
        lost: list[Exception] = []
        wire._is_lost = False  # as in the moment before it hears of the end
        wire._on_lost = lambda _unanswered, error: lost.append(error)
        wire.send(b"x", [])
        assert len(lost) == 1
        await link.close()

    uvloop.run(write())
