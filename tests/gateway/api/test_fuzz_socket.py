"""Sequences of good, nearly good and senseless messages on a socket: each is answered, the socket
lives or closes for a stated reason, and nothing is left of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.websocket import (
    SUBPROTOCOL,
    Authenticate,
    CancelGeneration,
    ClientMessage,
    Generate,
    Ping,
    Resume,
    ServerMessage,
)
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 64 * 1024
_POLICY_VIOLATION, _INVALID_TEXT, _TOO_BIG = 1008, 1007, 1009
_FROM_CLIENT = msgspec.json.Decoder(ClientMessage)
_FROM_SERVER = msgspec.json.Decoder(ServerMessage)
_EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

Json = dict[str, Any]

_NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([10**30, -(10**30), 2**63, 1e308, -0.0, 1.5, float("nan"), float("inf")]),
)
_TEXTS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["", "a", "b", "hi", MODEL, "\x00", "é" * 300, "\ud800"]),
    st.text(max_size=8),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
_IDS = st.sampled_from(["a", "b", "c"])
_KNOWN_FIELDS = [*Generate.__struct_fields__, *Resume.__struct_fields__, "token", "type", "colour"]
_TYPES = ["generate", "resume", "cancel", "ping", "authenticate"]

_good: st.SearchStrategy[Json] = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("generate"),
            "id": _IDS,
            "model": st.just(MODEL),
            "prompt": st.sampled_from(["hello", "h" * 200, [104, 105]]),
        },
        optional={
            "n": st.integers(1, 3),
            "max_tokens": st.integers(1, 200),
            "logprobs": st.booleans(),
            "idempotency_key": st.sampled_from(["k1", "k2"]),
        },
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("resume"),
            "id": _IDS,
            "request_id": st.sampled_from(["HELD", "absent", "chatcmpl-" + "0" * 24]),
            "next_index": st.one_of(st.integers(-1, 9), st.lists(st.integers(0, 3), max_size=3)),
        }
    ),
    st.fixed_dictionaries({"type": st.just("cancel"), "id": _IDS}),
    st.just({"type": "ping"}),
    st.fixed_dictionaries(
        {"type": st.just("authenticate"), "token": st.sampled_from(["", "other", "é"])}
    ),
)


@st.composite
def _nearly_good(draw: st.DrawFn) -> Json:
    """A good message with a few fields changed, added or gone."""
    message = dict(draw(_good))
    for name in draw(st.lists(st.sampled_from(_KNOWN_FIELDS), min_size=1, max_size=3)):
        message[name] = draw(_VALUES)
    if draw(st.booleans()):
        message.pop(draw(st.sampled_from(sorted(message))))
    return message


_SENSELESS = [
    "[" * 20_000,
    '{"type":' * 5_000,
    '{"type":"generate","id":"a","model":"echo","metadata":' + "[" * 5_000 + "]" * 5_000 + "}",
    '{"type":"generate","id":"a","model":"echo","guided_json":' + "[" * 5_000 + "]" * 5_000 + "}",
    '{"type":"generate","id":"a","model":"echo","prompt":"x","temperature":1e400}',
    '{"type":"generate","id":"a","model":"echo","prompt":"x","temperature":NaN}',
    '{"type":"generate","id":"a","model":"echo","prompt":[' + "9" * 400 + "]}",
    '{"type":"generate","id":"a","id":"b","model":"echo","prompt":"x"}',
    '{"type":"ping","type":"cancel"}',
    '{"type":"cancel","id":"\\ud800"}',
    "\ufeff{}",
    "",
    "null",
    '"ping"',
]
_payloads: st.SearchStrategy[str | bytes] = st.one_of(
    _good.map(json.dumps),
    _nearly_good().map(json.dumps),
    _VALUES.map(json.dumps),
    st.sampled_from(_SENSELESS),
    st.text(max_size=20),
    _good.map(lambda message: json.dumps(message).encode()),
    st.binary(max_size=20),
)


class Conversation:
    """Sends messages one after the other and checks that each gets what it is owed."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.begun: set[str] = set()  # ids that must end
        self.ended: set[str] = set()

    async def send(self, payload: str | bytes) -> None:
        """Send, and read up to the answer of a ping that follows."""
        await self._socket.send(payload)
        await self._socket.send('{"type":"ping"}')
        before = await self._until_pong()
        try:
            message = _FROM_CLIENT.decode(payload)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            assert any(answer["type"] == "error" for answer in before), "not answered"
            return
        if isinstance(message, Ping):
            await self._until_pong()
        elif isinstance(message, Authenticate):
            assert any(answer["type"] == "authenticated" for answer in before), "not answered"
        elif isinstance(message, CancelGeneration):
            is_refused = any(
                answer["type"] == "error" and answer.get("id") == message.id for answer in before
            )
            assert is_refused or message.id in self.begun, "not answered"
        elif not any(answer["type"] == "error" and "id" not in answer for answer in before):
            assert isinstance(message, Generate | Resume)
            self.begun.add(message.id)

    async def finish(self) -> None:
        """Read until everything that was begun has ended."""
        while not self.begun <= self.ended:
            await self._receive()

    async def _until_pong(self) -> list[Json]:
        answers: list[Json] = []
        while not answers or answers[-1]["type"] != "pong":
            answers.append(await self._receive())
        return answers

    async def _receive(self) -> Json:
        async with asyncio.timeout(_TIMEOUT_S):
            raw = await self._socket.recv()
        _FROM_SERVER.decode(raw)
        answer: Json = json.loads(raw)
        if answer["type"] in ("done", "error") and "id" in answer:
            self.ended.add(answer["id"])
        return answer


@pytest.fixture
async def front(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    url = f"{redis_server.url}/0"
    with Redis.from_url(url) as redis:
        redis.flushall()  # its requests belong to the bus of another test
    config = GatewayConfig(
        max_ws_message_bytes=_MAX_MESSAGE_BYTES, max_generations_per_socket=4, resume_grace_s=0.2
    )
    async with running_gateway(config, redis=RedisConfig(url=url)) as running:
        yield running


def opened(front: RunningGateway) -> connect:
    return connect(front.ws_url, subprotocols=[SUBPROTOCOL], max_size=None)  # type: ignore[list-item]


async def assert_well(front: RunningGateway) -> None:
    """A good generation works, and then nothing is left of any."""
    async with opened(front) as socket:
        conversation = Conversation(socket)
        await conversation.send(json.dumps(_GOOD))
        await conversation.finish()
    gateway = front.gateway
    await eventually(
        lambda: not (list(gateway.streams) or gateway.responses.all() or gateway.sockets),
        what="nothing left",
    )


_GOOD = {"type": "generate", "id": "good", "model": MODEL, "prompt": "well?"}


async def held_request(front: RunningGateway) -> str:
    """A request whose socket was lost."""
    async with opened(front) as socket:
        await socket.send(json.dumps(_GOOD | {"prompt": "held" * 20}))
        async with asyncio.timeout(_TIMEOUT_S):
            accepted: Json = json.loads(await socket.recv())
        socket.transport.abort()
    request_id: str = accepted["request_id"]
    return request_id


async def read_to_the_end(socket: ClientConnection) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            await socket.recv()


@pytest.mark.parametrize("number", range(len(_SENSELESS)))
async def test_senseless_messages_are_answered(front: RunningGateway, number: int) -> None:
    async with opened(front) as socket:
        conversation = Conversation(socket)
        await conversation.send(_SENSELESS[number])
        await conversation.finish()
        await conversation.send(json.dumps(_GOOD))
        await conversation.finish()


@_EXAMPLES
@given(payloads=st.lists(_payloads, min_size=1, max_size=6))
async def test_every_message_is_answered(
    front: RunningGateway, payloads: list[str | bytes]
) -> None:
    held = ""
    async with opened(front) as socket:
        conversation = Conversation(socket)
        for payload in payloads:
            if isinstance(payload, str) and "HELD" in payload:
                held = held or await held_request(front)
                payload = payload.replace("HELD", held)
            await conversation.send(payload)
        await conversation.finish()
    await assert_well(front)


@_EXAMPLES
@given(payloads=st.lists(_payloads, min_size=1, max_size=12))
async def test_messages_all_at_once_from_a_client_that_leaves(
    front: RunningGateway, payloads: list[str | bytes]
) -> None:
    async with opened(front) as socket:
        for payload in payloads:
            await socket.send(payload)
        socket.transport.abort()
    await assert_well(front)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x81\x82\x00\x00\x00\x00\xff\xff", _INVALID_TEXT),  # text that is no UTF-8
        (b"\x80\x81\x00\x00\x00\x00x", 1002),  # a continuation of nothing
        (b"\x83\x80\x00\x00\x00\x00", 1002),  # an opcode that there is not
        (b"\xf1\x81\x00\x00\x00\x00x", 1002),  # reserved bits
        (b"\x81\x01x", 1002),  # not masked
        (b"\x89\xfe\x01\x00\x00\x00\x00\x00" + b"x" * 256, 1002),  # a ping that is too long
        (b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x00", _TOO_BIG),
    ],
)
async def test_frames_that_break_the_protocol_close_with_a_code(
    front: RunningGateway, frame: bytes, code: int
) -> None:
    async with opened(front) as socket:
        await socket.send(json.dumps(_GOOD))
        socket.transport.write(frame)
        with pytest.raises(ConnectionClosed) as closed:
            await read_to_the_end(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == code
    await assert_well(front)


async def test_a_key_that_is_not_good_closes_with_a_code(front: RunningGateway) -> None:
    async with opened(front) as socket:
        await socket.send(json.dumps({"type": "authenticate", "token": "mr-nobody"}))
        async with asyncio.timeout(_TIMEOUT_S):
            assert json.loads(await socket.recv())["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == _POLICY_VIOLATION
    await assert_well(front)
