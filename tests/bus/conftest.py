"""The same tests run on the in-memory broker and on a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.js.api import RawStreamMsg

from millrace.bus.api import Bus
from millrace.bus.codec import CONTENT_TYPE, Codec, is_json
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.memory.jobs import MemoryJobQueue
from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.bus.transport import Message
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import DeadJob
from tests.support.nats.streams import delete_streams
from tests.support.servers import NatsServer
from tests.support.waiting import eventually

ACK_WAIT_S = 0.4
MAX_DELIVER = 3


class Broker(Protocol):
    """Message server of a test: the in-memory broker or a real nats-server."""

    config: NatsConfig

    async def connect(self, name: str = "test") -> Bus: ...

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish raw bytes, as a service without our library does."""

    async def request(self, subject: str, content_type: str = "") -> tuple[bytes, str | None]:
        """The answer to an empty request, and its Content-Type."""

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """The same, to a stream, waiting for the acknowledgement."""

    async def dead_jobs(self) -> list[DeadJob]: ...

    async def close(self) -> None: ...


class OnMemory:
    def __init__(self, config: NatsConfig) -> None:
        self.config = config
        self._broker = MemoryBroker(config=config)
        self._buses: list[MemoryBus] = []

    async def connect(self, name: str = "test") -> Bus:
        bus = MemoryBus(self._broker)
        self._buses.append(bus)
        return bus

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self._broker.publish(subject, payload, headers)

    async def request(self, subject: str, content_type: str = "") -> tuple[bytes, str | None]:
        answers: list[Message] = []
        inbox = self._broker.new_inbox()
        subscriber = self._broker.subscribe(inbox, answers.append)
        headers = {CONTENT_TYPE: content_type} if content_type else None
        self._broker.publish(subject, b"", headers, inbox)
        await eventually(lambda: bool(answers))
        await subscriber.close()
        (answer,) = answers
        return answer.payload, answer.content_type

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        headers = headers or {}
        queue = (await self.connect()).jobs
        assert isinstance(queue, MemoryJobQueue)
        message_id = headers.get("Nats-Msg-Id", "")
        queue.publish_raw(subject, payload, headers.get(CONTENT_TYPE), message_id)

    async def dead_jobs(self) -> list[DeadJob]:
        return list(self._broker.dead)

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


class OnNats:
    def __init__(self, config: NatsConfig) -> None:
        self.config = config
        self._buses: list[Bus] = []
        self._client: Client | None = None

    async def client(self) -> Client:
        if self._client is None:
            self._client = await nats.connect(self.config.url)
        return self._client

    async def connect(self, name: str = "test") -> Bus:
        bus = await connect(self.config, name, part=Part.SCHEDULER)
        self._buses.append(bus)
        return bus

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        await (await self.client()).publish(
            subject, payload, headers=dict(headers) if headers else None
        )

    async def request(self, subject: str, content_type: str = "") -> tuple[bytes, str | None]:
        headers = {CONTENT_TYPE: content_type} if content_type else None
        answer = await (await self.client()).request(subject, b"", 5.0, headers=headers)
        return answer.data, (answer.headers or {}).get(CONTENT_TYPE)

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        stream = (await self.client()).jetstream()
        await stream.publish(subject, payload, headers=dict(headers) if headers else None)

    async def dead_jobs(self) -> list[DeadJob]:
        manager = (await self.client()).jsm()
        state = (await manager.stream_info("DEAD")).state
        letters = [
            await manager.get_msg("DEAD", seq)
            for seq in range(state.first_seq, state.last_seq + 1)
            if state.messages
        ]
        return [_dead_job(letter) for letter in letters]

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        if self._client is not None:
            await self._client.close()


def _dead_job(letter: RawStreamMsg) -> DeadJob:
    """Written as its job was."""
    content_type = (letter.headers or {}).get(CONTENT_TYPE)
    dead = Codec(DeadJob).decode(letter.data or b"", content_type)
    assert is_json(content_type) == is_json(dead.content_type)
    return dead


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> NatsServer | None:
    """Return the nats-server, or None for the in-memory broker."""
    if request.param == "memory":
        return None
    started: NatsServer = request.getfixturevalue("nats_server")
    return started


@pytest.fixture
async def broker(server: NatsServer | None) -> AsyncIterator[Broker]:
    config = NatsConfig(ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER, max_stored_jobs=20)
    made: Broker
    if server is not None:
        await delete_streams(server)
        made = OnNats(msgspec.structs.replace(config, url=server.url))
    else:
        made = OnMemory(config)
    yield made
    await made.close()


@pytest.fixture
async def bus(broker: Broker) -> Bus:
    return await broker.connect()
