"""Clients of several servers: each goes back to its own after a restart; a move loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from millrace.bus.nats.connection import Connection
from millrace.bus.nats.servers import home
from millrace.schemas.config import NatsConfig
from tests.support.servers import NatsServer
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    """Two of them; what their routes would pass on does not matter here."""
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("servers")
        yield [stack.enter_context(NatsServer(folder / name)) for name in ("a", "b")]


def config_of(servers: list[NatsServer]) -> NatsConfig:
    return NatsConfig(url=",".join(server.url for server in servers))


@contextlib.asynccontextmanager
async def connected(config: NatsConfig, num: int) -> AsyncIterator[list[Connection]]:
    connections = [Connection(config, f"test-{number}") for number in range(num)]
    try:
        for connection in connections:
            await connection.open()
        yield connections
    finally:
        for connection in connections:
            await connection.close()


def servers_of(connections: list[Connection]) -> list[int | None]:
    """Return the server port of each connection, or None for a broken connection."""
    return [
        None if not one.connected or one._client.server is None else one._client.server.uri.port
        for one in connections
    ]


async def test_a_rolling_restart_leaves_clients_where_they_were(
    servers: list[NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "_PAUSES_S", (0.1, 0.3))
    async with connected(config_of(servers), 8) as connections:
        before = servers_of(connections)
        for server in servers:
            server.kill()
            await eventually(lambda s=server: s.port not in servers_of(connections))
            await eventually(lambda: None not in servers_of(connections))
            server.start()
        await eventually(lambda: servers_of(connections) == before)


async def test_what_is_published_by_a_client_that_moves_arrives(servers: list[NatsServer]) -> None:
    seen: Counter[bytes] = Counter()
    taken: list[bytes] = []
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            (reader,) = await stack.enter_async_context(connected(config_of([server]), 1))
            await reader.subscribe("numbers", lambda message: seen.update([message.payload]))
        (mover,) = await stack.enter_async_context(connected(config_of(servers), 1))
        is_moving = True

        async def publish() -> None:
            while is_moving:
                for _ in range(20):
                    payload = b"%d" % len(taken)
                    if await mover.send("numbers", payload):
                        taken.append(payload)
                await asyncio.sleep(0.001)

        publishing = asyncio.create_task(publish())
        for _ in range(4):
            await asyncio.sleep(0.02)
            (other,) = mover.other_servers
            await mover.move_to(other)
            await eventually(lambda place=other: mover.connected and mover._client.server is place)
        is_moving = False
        await publishing
        await eventually(lambda: len(seen) == len(taken))
        assert seen == Counter(taken)


async def test_a_collected_listener_is_not_called_on_reconnect(servers: list[NatsServer]) -> None:
    class Listener:
        def __init__(self, name: str) -> None:
            self._name = name

        def note(self) -> None:
            heard.append(self._name)

    heard: list[str] = []
    over, stays = Listener("over"), Listener("stays")
    async with connected(config_of(servers), 1) as [connection]:
        connection.on_reconnect(over.note)
        connection.on_reconnect(stays.note)
        connection.on_reconnect(lambda: heard.append("function"))
        del over
        [other] = connection.other_servers
        await connection.move_to(other)
        await eventually(lambda: heard == ["stays", "function"])
