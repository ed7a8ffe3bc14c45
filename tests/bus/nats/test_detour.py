"""Two servers of a cluster that do not see each other, and a third that sees both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.bus.control import Control
from millrace.bus.frames import FrameStreams
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.servers.detour import Detours
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import Replay, WorkerCommand, WorkerReply
from millrace.schemas.frames import Accepted, Frame
from tests.support.links.relay import Relay
from tests.support.servers import NatsServer, free_port
from tests.support.waiting import eventually

_REPLAY = Replay(request_id="r1", from_index=0, reply="gw")


class Cluster:
    """Servers a, b and c. Each of a and b knows c; of each other they learn an address whose link
    ``part`` cuts."""

    def __init__(self, servers: list[NatsServer], links: list[Relay]) -> None:
        self.servers = servers
        self._links = links

    def part(self) -> None:
        for link in self._links:
            link.fall_silent()

    def config(self, *numbers: int) -> NatsConfig:
        return NatsConfig(url=",".join(self.servers[number].url for number in numbers))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    ports = [free_port() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(Relay(port)) for port in ports[:2]]
        servers = []
        for name, port, link in zip("abc", ports, [*links, None], strict=True):
            route = ports[0] if link is None else ports[2]
            seen_as = "" if link is None else f'advertise: "127.0.0.1:{link.port}", '
            options = (
                f"server_name: {name}\n"
                f'cluster {{ name: test, listen: "127.0.0.1:{port}", {seen_as}'
                f'routes: ["nats://127.0.0.1:{route}"] }}'
            )
            servers.append(NatsServer(tmp_path / name, options))
        for server in servers:
            stack.enter_context(server)
        yield Cluster(servers, links)


@contextlib.asynccontextmanager
async def connected(config: NatsConfig) -> AsyncIterator[Connection]:
    connection = Connection(config, "test")
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


async def test_a_worker_is_reached_over_the_server_that_sees_both(cluster: Cluster) -> None:
    seen: list[tuple[str, Frame]] = []
    async with (
        connected(cluster.config(0)) as gateway,
        connected(cluster.config(1)) as worker,
    ):
        frames = FrameStreams(worker)
        await FrameStreams(gateway).subscribe("gw", lambda *frame: seen.append(frame))

        async def answer(_command: WorkerCommand) -> WorkerReply:
            await frames.publish("gw", [("r1", Accepted())])
            return WorkerReply(ok=True)

        await Control(worker).serve_commands("w1", answer)
        control, detours = Control(gateway), Detours(gateway)

        async def hears() -> bool:
            return await control.command("w1", _REPLAY, 0.2) is not None

        await eventually(hears)
        await eventually(lambda: len(gateway.other_servers) == 2, what="word of the other servers")
        cluster.part()
        assert await control.command("w1", _REPLAY, 0.3) is None
        seen.clear()
        began_s = time.monotonic()
        assert await detours.reach("w1", _REPLAY, 0.3)
        assert await control.command("w1", _REPLAY, 1.0) is not None
        await eventually(lambda: seen == [("r1", Accepted())])
        assert time.monotonic() - began_s < 1.5
        assert gateway._client.server is not None
        assert gateway._client.server.uri.port != cluster.servers[0].port


async def test_the_server_over_which_most_workers_answer_is_taken(cluster: Cluster) -> None:
    async def answer(_command: WorkerCommand) -> WorkerReply:
        return WorkerReply(ok=True)

    async with (
        connected(cluster.config(0)) as gateway,
        connected(cluster.config(0)) as near,
        connected(cluster.config(1)) as far,
    ):
        await Control(near).serve_commands("near", answer)
        await Control(far).serve_commands("far", answer)

        async def hears() -> bool:
            return await Control(gateway).command("far", _REPLAY, 0.2) is not None

        await eventually(hears)
        await eventually(lambda: len(gateway.other_servers) == 2, what="word of the other servers")
        cluster.part()
        assert await Detours(gateway).reach("far", _REPLAY, 0.3, ["near"])
        assert gateway._client.server is not None
        assert gateway._client.server.uri.port == cluster.servers[2].port


async def test_a_dead_worker_causes_no_detour(cluster: Cluster) -> None:
    async with connected(cluster.config(0, 1, 2)) as gateway:
        server = gateway._client.server
        assert not await Detours(gateway).reach("dead", _REPLAY, 0.3)
        assert gateway._client.server is server


async def test_a_single_server_offers_no_detour(nats_server: NatsServer) -> None:
    async with connected(NatsConfig(url=nats_server.url)) as gateway:
        assert not await Detours(gateway).reach("w1", _REPLAY, 0.3)
        assert gateway.connected
