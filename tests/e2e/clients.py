"""The three ways in, each as its users go: SSE over HTTP, WebSocket, and jobs on NATS."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import websockets

from millrace.bus.api import Bus
from millrace.schemas.frames import TERMINAL_FRAMES, Delta, Done, Frame, Usage
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.sampling import SamplingParams
from tests.support.waiting import eventually


@dataclass
class Answer:
    """Answer read by a client: text, usage and finish reason."""

    request_id: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def chat_body(question: str, **options: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        **options,
    }


async def ask_sse(http: httpx.AsyncClient, question: str, **options: Any) -> Answer:
    """Stream one chat completion over server-sent events."""
    body = chat_body(question, stream=True, stream_options={"include_usage": True}, **options)
    pieces: list[str] = []
    usage: dict[str, int] = {}
    finish, ended = "", False
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise AssertionError((await response.aread()).decode())
        request_id = response.headers["x-request-id"]
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                pieces.append(choice["delta"].get("content") or "")
                finish = choice["finish_reason"] or finish
    assert ended, "the stream ended without [DONE]"
    return Answer(
        request_id, "".join(pieces), finish, usage["prompt_tokens"], usage["completion_tokens"]
    )


async def ask_websocket(url: str, question: str, **options: Any) -> Answer:
    """Run one generation on a separate WebSocket and check that token indices are exact."""
    async with websockets.connect(
        url, subprotocols=[websockets.Subprotocol("millrace.v1")]
    ) as socket:
        await socket.send(
            json.dumps({"type": "generate", "id": "1", **chat_body(question, **options)})
        )
        text, next_index = "", 0
        async for raw in socket:
            message = json.loads(raw)
            match message["type"]:
                case "delta":
                    assert message["index"] == next_index, "a token is missing or repeated"
                    next_index += message["num_tokens"]
                    text += message["text"]
                case "done":
                    usage = message["usage"]
                    assert next_index == usage["completion_tokens"]
                    return Answer(
                        message["request_id"],
                        text,
                        message["finish_reason"],
                        usage["prompt_tokens"],
                        usage["completion_tokens"],
                    )
                case "error":
                    raise AssertionError(message)
    raise AssertionError("the socket closed before the answer was done")


async def ask_many(
    http: httpx.AsyncClient, websocket: str, question: str, count: int, **options: Any
) -> list[asyncio.Task[Answer]]:
    """So many questions, each its own, by either door in turn; once all of their streams are
    open."""
    tasks = [
        asyncio.create_task(
            ask_websocket(websocket, f"{question} {number}", **options)
            if number % 2
            else ask_sse(http, f"{question} {number}", **options)
        )
        for number in range(count)
    ]

    async def all_run() -> bool:
        return bool((await http.get("/healthz")).json()["open_streams"] >= count)

    await eventually(all_run)
    return tasks


async def ask_nats(bus: Bus, request_id: str, question: str, **sampling: Any) -> Answer:
    """Publish one job on the bus and read its frames from a separate stream."""
    reply = f"svc-{request_id}"
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    subscription = await bus.frames.subscribe(
        reply, lambda _request, frame: frames.put_nowait(frame)
    )
    await bus.jobs.publish(
        Job(
            request_id=request_id,
            model="demo",
            messages=(ChatMessage("user", question),),
            sampling=SamplingParams(temperature=0.0, **sampling),
            reply=reply,
            store_result=True,
        )
    )
    text, next_index, usage = "", 0, Usage()
    while True:
        frame = await asyncio.wait_for(frames.get(), timeout=60.0)
        match frame:
            case Delta():
                assert frame.index == next_index, "a token is missing or repeated"
                next_index += len(frame.token_ids)
                text += frame.text
            case Usage():
                usage = frame
            case Done():
                await subscription.close()
                return Answer(
                    request_id,
                    text,
                    str(frame.finish_reason),
                    usage.prompt_tokens,
                    usage.completion_tokens,
                )
            case _ if isinstance(frame, TERMINAL_FRAMES):
                raise AssertionError(frame)
            case _:
                continue
