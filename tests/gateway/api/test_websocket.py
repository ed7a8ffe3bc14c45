"""Many generations on one socket, and what can go wrong on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from millrace.gateway.errors import NotFoundError, refusal_of
from millrace.gateway.transport.http import refuse_handshake
from millrace.schemas.config import GatewayConfig
from millrace.schemas.frames import Failed, Queued, Shed
from millrace.schemas.openai import ChatCompletionRequest
from millrace.schemas.websocket import SUBPROTOCOL, Generate, ServerMessage
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

_DECODER = msgspec.json.Decoder(ServerMessage)
_TIMEOUT_S = 5.0


class Socket:
    """A client that sends and receives JSON."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": kind} | fields))

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(_TIMEOUT_S):
            raw = await self.connection.recv()
        _DECODER.decode(raw)
        message: dict[str, Any] = json.loads(raw)
        return message

    async def until(self, kind: str, generation: str) -> list[dict[str, Any]]:
        """Messages up to the first of this kind for this generation."""
        messages = []
        while True:
            messages.append(await self.receive())
            if messages[-1]["type"] == kind and messages[-1].get("id") == generation:
                return messages


@asynccontextmanager
async def opened(front: RunningGateway, **options: Any) -> AsyncIterator[Socket]:
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL], **options) as connection:  # type: ignore[list-item]
        yield Socket(connection)


@pytest.fixture
async def socket(front: RunningGateway) -> AsyncIterator[Socket]:
    async with opened(front) as made:
        yield made


def text_of(messages: list[dict[str, Any]], generation: str) -> str:
    """The generation's text; its indices must join up."""
    deltas = [m for m in messages if m["type"] == "delta" and m["id"] == generation]
    index = 0
    for delta in deltas:
        assert delta["index"] == index
        index += delta["num_tokens"]
    return "".join(delta["text"] for delta in deltas)


async def test_a_generation_from_its_start_to_its_end(socket: Socket) -> None:
    assert socket.connection.subprotocol == SUBPROTOCOL
    await socket.send(
        "generate", id="a", model=MODEL, messages=[{"role": "user", "content": "Grüße"}]
    )
    messages = await socket.until("done", "a")
    assert [m["type"] for m in messages[:2]] == ["accepted", "started"]
    assert text_of(messages, "a") == "Grüße"
    done = messages[-1]
    assert done["finish_reason"] == "stop"
    assert (done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]) == (7, 5)
    assert {m["request_id"] for m in messages} == {messages[0]["request_id"]}


async def test_a_stop_string_within_a_call(front: RunningGateway, socket: Socket) -> None:
    front.worker.script = lambda _job: '<tool_call>{"name": "f", "arguments": {"a": 1'
    front.worker.stop_reason = "}"
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": [{"role": "user", "content": "Call."}], "tools": [tool], "stop": ["}"]}
    await socket.send("generate", id="a", model=MODEL, **asked)
    messages = await socket.until("done", "a")
    assert (messages[-1]["finish_reason"], messages[-1]["stop_reason"]) == ("stop", "}")
    arguments = "".join(m["text"] for m in messages if m["type"] == "tool_arguments")
    assert arguments == '{"a": 1'


async def test_two_generations_share_a_socket(front: RunningGateway, socket: Socket) -> None:
    front.worker.gate.clear()
    await socket.send("generate", id="a", model=MODEL, prompt="first " * 20)
    await socket.send("generate", id="b", model=MODEL, prompt="second " * 20)
    messages = await socket.until("started", "b")
    front.worker.gate.set()
    while sum(m["type"] == "done" for m in messages) < 2:
        messages.append(await socket.receive())
    assert text_of(messages, "a") == "first " * 20
    assert text_of(messages, "b") == "second " * 20
    order = [m["id"] for m in messages if m["type"] == "delta"]
    assert order.index("b") < len(order) - 1 - order[::-1].index("a")


async def test_a_cancel_ends_in_done(front: RunningGateway, socket: Socket) -> None:
    front.worker.stop_before = 3
    await socket.send("generate", id="a", model=MODEL, prompt="for ever")
    messages = await socket.until("delta", "a")
    await socket.send("cancel", id="a")
    messages += await socket.until("done", "a")
    assert messages[-1]["finish_reason"] == "cancelled"
    assert len(front.worker.cancelled) == 1
    assert len(front.gateway.streams) == 0
    front.worker.stop_before = None
    await socket.send("generate", id="a", model=MODEL, prompt="again")
    assert text_of(await socket.until("done", "a"), "a") == "again"


async def test_a_cancel_right_behind_its_generation(front: RunningGateway, socket: Socket) -> None:
    front.worker.stop_before = 0
    await socket.send("generate", id="a", model=MODEL, prompt="never")
    await socket.send("cancel", id="a")
    messages = await socket.until("done", "a")
    assert messages[-1]["finish_reason"] == "cancelled"


async def test_a_closed_socket_cancels_everything_on_it(front: RunningGateway) -> None:
    front.worker.stop_before = 2
    async with opened(front) as socket:
        for name in ("a", "b", "c"):
            await socket.send("generate", id=name, model=MODEL, prompt="for ever")
        await eventually(lambda: front.worker.num_running == 3)
        assert len(front.gateway.streams) == 3
    await eventually(lambda: len(front.worker.cancelled) == 3)
    await eventually(lambda: len(front.gateway.streams) == 0)


async def test_ping(socket: Socket) -> None:
    await socket.send("ping")
    assert await socket.receive() == {"type": "pong"}


@pytest.mark.parametrize("is_binary", [False, True])
async def test_a_byte_order_mark_is_no_part_of_a_message(socket: Socket, is_binary: bool) -> None:
    message = '\ufeff{"type":"ping"}'
    await socket.connection.send(message.encode() if is_binary else message)
    assert await socket.receive() == {"type": "pong"}


@pytest.mark.parametrize(
    ("payload", "code", "generation"),
    [
        ("{", "invalid_json", None),
        ('{"type":"ping"', "invalid_json", None),
        ('"text"', "unknown_message_type", None),
        ('{"type":"frobnicate","id":"a"}', "unknown_message_type", "a"),
        ('{"id":"a"}', "unknown_message_type", "a"),
        ('{"type":"generate","id":"a"}', "invalid_parameter", "a"),
        ('{"type":"generate","id":"a","model":"echo"}', "invalid_parameter", "a"),
        (
            '{"type":"generate","id":"a","model":"echo","prompt":"x","n":17}',
            "invalid_parameter",
            "a",
        ),
        ('{"type":"generate","id":"","model":"echo","prompt":"x"}', "invalid_parameter", None),
        ('{"type":"generate","id":"a","model":"absent","prompt":"x"}', "model_not_found", "a"),
        (
            '{"type":"generate","id":"a","model":"echo","prompt":"x","max_tokens":5000}',
            "context_length_exceeded",
            "a",
        ),
        ('{"type":"cancel","id":"absent"}', "unknown_id", "absent"),
        ('{"type":"cancel"}', "invalid_parameter", None),
        (b"\xff\xfe", "invalid_json", None),
    ],
)
async def test_a_bad_message_is_answered_and_the_socket_lives(
    socket: Socket, payload: str | bytes, code: str, generation: str | None
) -> None:
    await socket.connection.send(payload)
    error = await socket.receive()
    assert (error["type"], error["code"], error.get("id")) == ("error", code, generation)
    await socket.send("generate", id="a", model=MODEL, prompt="alive")
    assert text_of(await socket.until("done", "a"), "a") == "alive"


async def test_an_id_that_runs_is_refused(front: RunningGateway, socket: Socket) -> None:
    front.worker.gate.clear()
    await socket.send("generate", id="a", model=MODEL, prompt="one")
    await socket.until("started", "a")
    await socket.send("generate", id="a", model=MODEL, prompt="two")
    error = await socket.receive()
    assert (error["code"], error["param"]) == ("duplicate_id", "id")
    assert "id" not in error, "an error with its id would end the running generation"
    await socket.send("cancel", id="a", colour=1)
    error = await socket.receive()
    assert (error["code"], error["param"]) == ("invalid_parameter", "colour")
    assert "id" not in error
    front.worker.gate.set()
    assert text_of(await socket.until("done", "a"), "a") == "one"


async def test_too_many_generations_are_refused() -> None:
    async with (
        running_gateway(GatewayConfig(max_generations_per_socket=2)) as front,
        opened(front) as socket,
    ):
        front.worker.gate.clear()
        for name in ("a", "b", "c"):
            await socket.send("generate", id=name, model=MODEL, prompt="x")
        assert (await socket.until("error", "c"))[-1]["code"] == "too_many_generations"
        front.worker.gate.set()
        await socket.until("done", "b")


_MIB = 1024 * 1024


async def _send_and_read_on(socket: Socket, message: str | bytes | list[str]) -> None:
    await socket.connection.send(message)
    while True:
        await socket.receive()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("x" * (_MIB + 1), id="one-byte-more"),
        pytest.param("\u00e9" * (_MIB // 2) + "x", id="in-utf-8"),
        pytest.param(b"x" * (_MIB + 1), id="binary"),
        pytest.param(["x" * (_MIB // 2)] * 2 + ["x"], id="in-fragments"),
        pytest.param("x" * (20 * _MIB), id="much-more"),
    ],
)
async def test_an_oversized_message_closes_with_1009(
    front: RunningGateway, message: str | bytes | list[str]
) -> None:
    """Requests of the socket continue, and a client resumes them on another socket."""
    async with opened(front) as socket:
        front.worker.gate.clear()
        await socket.send("generate", id="a", model=MODEL, prompt="a mill")
        request_id = (await socket.until("accepted", "a"))[-1]["request_id"]
        with pytest.raises(ConnectionClosed) as caught:
            await _send_and_read_on(socket, message)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009
        assert f"exceeds limit of {_MIB} bytes" in caught.value.rcvd.reason
    async with opened(front) as socket:
        await socket.send("resume", id="b", request_id=request_id, next_index=0)
        await socket.until("accepted", "b")
        front.worker.gate.set()
        messages = await socket.until("done", "b")
    assert "".join(one["text"] for one in messages if one["type"] == "delta") == "a mill"


@pytest.mark.parametrize("num_fragments", [1, 2])
async def test_a_message_of_just_the_limit_is_read(
    front: RunningGateway, num_fragments: int
) -> None:
    head = '{"type":"ping","padding":"'
    text = head + "x" * (_MIB - len(head) - 2) + '"}'
    size = _MIB // num_fragments
    fragments = [text[start : start + size] for start in range(0, _MIB, size)]
    async with opened(front) as socket:
        await socket.connection.send(fragments)
        error = await socket.receive()
    assert (error["type"], error["param"]) == ("error", "padding")


async def test_the_bound_of_a_message_is_a_setting() -> None:
    async with (
        running_gateway(GatewayConfig(max_ws_message_bytes=1_000)) as front,
        opened(front) as socket,
    ):
        await socket.send("ping", padding="x" * 2_000)
        with pytest.raises(ConnectionClosed) as caught:
            await socket.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


_ELSEWHERE = {
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
_CHAT_BODIES: dict[str, dict[str, Any]] = {
    "openai": {"stream": True, "stream_options": {"include_usage": True}, "store": True, "n": 1},
    "whole": {"stream": False, "store": False, "service_tier": "auto"},
    "nulls": {"stream": None, "stream_options": None, "return_token_ids": None, "tools": None},
    "vllm": {
        "stream_options": {"include_usage": False, "include_obfuscation": False},
        "return_token_ids": False,
        "use_beam_search": False,
        "min_tokens": 0,
    },
}


def test_every_field_of_a_chat_completion_is_known() -> None:
    assert set(ChatCompletionRequest.__struct_fields__) <= set(Generate.__struct_fields__)


@pytest.mark.parametrize("body", _CHAT_BODIES.values(), ids=_CHAT_BODIES)
async def test_a_chat_body_is_taken_as_it_is(front: RunningGateway, body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "mill"}]
    async with opened(front) as socket:
        await socket.send("generate", id="a", model=MODEL, messages=messages, **body)
        done = (await socket.until("done", "a"))[-1]
    assert done["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("field", _ELSEWHERE)
async def test_fields_that_no_message_can_answer_are_named(
    front: RunningGateway, field: str
) -> None:
    messages = [{"role": "user", "content": "mill"}]
    async with opened(front) as socket:
        fields = {field: _ELSEWHERE[field]}
        await socket.send("generate", id="a", model=MODEL, messages=messages, **fields)
        error = await socket.receive()
    assert (error["type"], error["code"], error["id"]) == ("error", "invalid_parameter", "a")
    assert error["param"].startswith(field)
    assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"include_usage": "yes"}, "stream_options.include_usage"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"usage": True}, "stream_options.usage"),
        ("include_usage", "stream_options"),
    ],
)
async def test_bad_stream_options_are_named(
    front: RunningGateway, options: object, param: str
) -> None:
    messages = [{"role": "user", "content": "mill"}]
    async with opened(front) as socket:
        await socket.send(
            "generate", id="a", model=MODEL, messages=messages, stream_options=options
        )
        error = await socket.receive()
    assert (error["type"], error["param"], error["id"]) == ("error", param, "a")


async def test_a_socket_where_there_is_none_is_refused_in_words(front: RunningGateway) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(front.ws_url.replace("/v1/ws", "/v1/socket")):
            pass
    response = caught.value.response
    assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
    error = json.loads(response.body or b"")["error"]
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    assert "/v1/socket" in error["message"]


async def test_other_protocols_are_refused(front: RunningGateway) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(front.ws_url, subprotocols=["graphql-ws"]):  # type: ignore[list-item]
            pass
    assert caught.value.response.status_code == 400
    assert b"millrace.v1" in caught.value.response.body
    async with connect(front.ws_url) as plain:
        assert plain.subprotocol is None
        await plain.send('{"type":"ping"}')
        assert json.loads(await plain.recv()) == {"type": "pong"}


async def test_news_of_the_queue_are_passed_on(front: RunningGateway, socket: Socket) -> None:
    front.worker.end_with = Queued(position=4, eta_s=1.5)
    await socket.send("generate", id="a", model=MODEL, prompt="x")
    queued = (await socket.until("queued", "a"))[-1]
    assert (queued["position"], queued["eta_s"]) == (4, 1.5)


@pytest.mark.parametrize(
    ("frame", "code", "retry_after_s"),
    [
        (Shed(retry_after_s=4), "overloaded", 4),
        (Failed(code="worker_failed", message="it broke"), "worker_failed", None),
    ],
)
async def test_an_end_in_failure_is_an_error(
    front: RunningGateway, socket: Socket, frame: Failed, code: str, retry_after_s: float | None
) -> None:
    front.worker.end_with = frame
    await socket.send("generate", id="a", model=MODEL, prompt="x")
    error = (await socket.until("error", "a"))[-1]
    assert (error["code"], error.get("retry_after_s")) == (code, retry_after_s)
    assert error["request_id"]
    assert len(front.gateway.streams) == 0


async def test_a_client_that_does_not_read_is_closed_with_1013() -> None:
    async with running_gateway(
        GatewayConfig(client_buffer_bytes=50_000, resume_grace_s=0.0)
    ) as front:
        front.worker.script = lambda _job: ["x" * 20_000] * 400
        front.worker.stop_before = 399
        async with opened(front, max_queue=1) as socket:
            await socket.send("generate", id="a", model=MODEL, prompt="x")
            await eventually(lambda: len(front.worker.cancelled) == 1)
            with pytest.raises(ConnectionClosed) as caught:
                await socket.until("done", "a")
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1013, "slow_client")
        await eventually(lambda: len(front.gateway.streams) == 0)


async def test_a_slow_client_that_keeps_up_in_the_end_misses_nothing(
    front: RunningGateway,
) -> None:
    """Text that is not read yet is joined to larger messages, never dropped."""
    front.worker.script = lambda _job: [f"{index:05}" for index in range(3_000)]
    async with opened(front) as socket:
        await socket.send("generate", id="a", model=MODEL, prompt="x", max_tokens=3_000)
        await eventually(lambda: front.worker.num_running == 0 and bool(front.worker.jobs))
        messages = await socket.until("done", "a")
    assert text_of(messages, "a") == "".join(f"{index:05}" for index in range(3_000))


async def test_a_gateway_that_goes_down_closes_with_1012() -> None:
    async with running_gateway() as front:
        front.worker.gate.clear()
        async with opened(front) as socket:
            await socket.send("generate", id="a", model=MODEL, prompt="drained")
            await socket.until("started", "a")
            stopping = asyncio.create_task(front.server.stop(drain_timeout_s=5))
            await eventually(lambda: front.gateway.draining)
            await socket.send("generate", id="b", model=MODEL, prompt="late")
            assert (await socket.until("error", "b"))[-1]["code"] == "draining"
            front.worker.gate.set()
            assert text_of(await socket.until("done", "a"), "a") == "drained"
            await stopping
            with pytest.raises(ConnectionClosed) as caught:
                await socket.receive()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1012


async def test_connections_are_closed_while_a_client_closes_one() -> None:
    """The client's close frame was answered in the turn in which all are told to close."""
    async with running_gateway() as front, opened(front) as one, opened(front) as two:
        front.connections[0].data_received(b"\x88\x82\0\0\0\0\x03\xe8")
        front.close_connections()
        for socket in (one, two):
            async with asyncio.timeout(_TIMEOUT_S):
                await socket.connection.wait_closed()
        assert {one.connection.close_code, two.connection.close_code} == {1000, 1012}


async def test_a_server_that_cannot_say_why_refuses_all_the_same() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(event: MutableMapping[str, Any]) -> None:
        sent.append(event)

    refusal = refusal_of(NotFoundError("Nothing is here."))
    await refuse_handshake({"type": "websocket"}, send, refusal)
    assert sent == [{"type": "websocket.close"}]
