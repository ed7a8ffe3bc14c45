"""Silent NATS server: a lost host is noticed in time at any publishing rate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import uvloop

from millrace.bus.nats.connection import Connection
from millrace.runtime.binaries import nats_server_path
from millrace.schemas.config import NatsConfig
from tests.support.certificates import Authority
from tests.support.links.network import made_network
from tests.support.links.relay import Relay
from tests.support.servers import NatsServer, free_port
from tests.support.waiting import eventually

NOTICED_WITHIN_S = 3.0
# Until the connection is made to the other address.
BACK_WITHIN_S = 1.0


class Reached:
    """Connection with two ways to the server; ``silence`` cuts the way in use."""

    def __init__(self, connection: Connection, relays: list[Relay]) -> None:
        self.connection = connection
        self.losses_s: list[float] = []
        self._relays = relays
        connection.on_loss(lambda: self.losses_s.append(time.monotonic()))

    def silence(self) -> None:
        (used,) = (relay for relay in self._relays if relay.num_accepted)
        used.fall_silent()


@contextlib.asynccontextmanager
async def reached(port: int, scheme: str = "nats", ca_file: str = "") -> AsyncIterator[Reached]:
    async with Relay(port) as one, Relay(port) as two:
        url = f"{scheme}://127.0.0.1:{one.port},{scheme}://127.0.0.1:{two.port}"
        connection = Connection(NatsConfig(url=url, ca_file=ca_file), "test")
        await connection.open()
        try:
            yield Reached(connection, [one, two])
        finally:
            await connection.close()


async def publish_on(
    connection: Connection, pause_s: float, payload: bytes, has_begun: asyncio.Event
) -> None:
    while True:
        await connection.publish("somewhere", payload)
        has_begun.set()
        await asyncio.sleep(pause_s)


@contextlib.asynccontextmanager
async def publishing(connection: Connection, pause_s: float, payload: bytes) -> AsyncIterator[None]:
    """Publish ``payload`` every ``pause_s`` seconds, from before the body on."""
    has_begun = asyncio.Event()
    task = asyncio.create_task(publish_on(connection, pause_s, payload, has_begun))
    try:
        await has_begun.wait()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_silent_server_is_noticed_at_every_publishing_rate(nats_server: NatsServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        all_reached = []
        for pause_s, payload in ((3_600.0, b""), (0.2, b"x" * 100), (0.002, b"x" * 100_000)):
            one = await stack.enter_async_context(reached(nats_server.port))
            await stack.enter_async_context(publishing(one.connection, pause_s, payload))
            all_reached.append(one)
        began_s = time.monotonic()
        for one in all_reached:
            one.silence()
        for one in all_reached:
            await eventually(lambda one=one: bool(one.losses_s))
        await asyncio.gather(*(one.connection.wait_connected(10.0) for one in all_reached))
        back_s = time.monotonic()
        assert max(one.losses_s[0] for one in all_reached) - began_s < NOTICED_WITHIN_S
        assert back_s - began_s < NOTICED_WITHIN_S + BACK_WITHIN_S
        for one in all_reached:
            answer = await heard_again(one.connection)
            assert answer == b"here"


@pytest.mark.parametrize("scheme", ["tls", "ws"])
def test_a_silent_server_is_noticed_over_tls_and_websockets(scheme: str, tmp_path: Path) -> None:
    """The connection notices the silence on uvloop, the event loop of a system's parts."""
    authority = Authority(tmp_path / "ca")
    pair = authority.sign("server")
    ws_port = free_port()
    files = f'cert_file: "{pair.certificate}", key_file: "{pair.key}"'
    options, ca_file = f"tls {{ {files} }}", str(authority.certificate)
    if scheme == "ws":
        options = f'websocket {{ listen: "127.0.0.1:{ws_port}", no_tls: true }}'
        ca_file = ""

    async def notice(server: NatsServer) -> None:
        port = ws_port if scheme == "ws" else server.port
        async with (
            reached(port, scheme, ca_file) as one,
            publishing(one.connection, 0.002, b"x" * 100_000),
        ):
            began_s = time.monotonic()
            one.silence()
            await eventually(lambda: bool(one.losses_s))
            assert one.losses_s[0] - began_s < NOTICED_WITHIN_S
            assert await one.connection.wait_connected(BACK_WITHIN_S)
            assert await heard_again(one.connection) == b"here"

    with NatsServer(tmp_path / "server", options) as server:
        uvloop.run(notice(server))


@pytest.mark.network
async def test_a_host_whose_link_is_down(tmp_path: Path) -> None:
    """The host acknowledges nothing, and the connection is never reported as closed."""
    with made_network(1) as network:
        address = network.address(1)
        network.start(1, [str(nats_server_path()), "-a", address], tmp_path / "server.log")
        losses_s: dict[float, float] = {}

        def note_loss(of: float) -> None:
            losses_s.setdefault(of, time.monotonic())

        async with contextlib.AsyncExitStack() as stack:
            connections = []
            for pause_s in (3_600.0, 0.2, 0.02, 0.002):
                connection = Connection(NatsConfig(url=f"nats://{address}:4222"), "test")
                await connection.open()
                stack.push_async_callback(connection.close)
                await stack.enter_async_context(publishing(connection, pause_s, b"x" * 2_000))
                connection.on_loss(partial(note_loss, pause_s))
                connections.append(connection)
            network.set_link(1, up=False)
            began_s = time.monotonic()
            await eventually(lambda: len(losses_s) == len(connections))
            assert max(losses_s.values()) - began_s < NOTICED_WITHIN_S
            network.set_link(1, up=True)
            for connection in connections:
                assert await connection.wait_connected(5.0)


async def heard_again(connection: Connection) -> bytes:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    subscription = await connection.subscribe("echo", lambda message: heard.set_result(message[1]))
    await connection.publish("echo", b"here")
    payload = await asyncio.wait_for(heard, 5.0)
    await subscription.close()
    return payload


async def test_a_connection_to_a_silent_server_closes_in_time(nats_server: NatsServer) -> None:
    """The client does not wait for unsent data when it closes."""
    async with reached(nats_server.port) as one, publishing(one.connection, 0.001, b"x" * 100_000):
        one.silence()
        await eventually(lambda: one.connection._client.pending_data_size > 1_000_000)
        began_s = time.monotonic()
        await one.connection.close()
        assert time.monotonic() - began_s < NOTICED_WITHIN_S
        assert not one.connection.connected


async def test_a_pause_of_this_process_is_not_the_servers_silence(nats_server: NatsServer) -> None:
    async with reached(nats_server.port) as one:
        await asyncio.sleep(0.4)
        time.sleep(2.6)  # noqa: ASYNC251 (this is the pause)
        await asyncio.sleep(1.0)
        assert one.losses_s == []
        assert one.connection.connected
