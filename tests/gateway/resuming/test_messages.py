"""Streams of the Messages API that outlive their gateway, block by block."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.gateway.resuming.clients import TAKES_EVENTS, Pair, slow
from tests.support.running_gateway import MODEL

PATH = "/v1/messages"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky above the mill"}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [{"name": "look", "input_schema": {"type": "object"}}]


class Read:
    """Messages stream as a client reads it, on one or several connections."""

    def __init__(self) -> None:
        self.last_id = ""
        self.kinds: list[str] = []
        self.blocks: dict[int, list[str]] = {}
        self.stop_reason = ""

    @property
    def num_characters(self) -> int:
        return sum(len(piece) for pieces in self.blocks.values() for piece in pieces)

    def take(self, line: str) -> None:
        name, _, value = line.partition(": ")
        if name == "id":
            self.last_id = value
        if name != "data":
            return
        event = json.loads(value)
        self.kinds.append(event["type"])
        if event["type"] == "content_block_start":
            assert event["index"] == len(self.blocks), "blocks are numbered through"
            self.blocks[event["index"]] = []
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            self.blocks[event["index"]].append(delta.get("text") or delta.get("partial_json"))
        elif event["type"] == "message_delta":
            self.stop_reason = event["delta"]["stop_reason"]


@pytest.mark.parametrize(
    ("num_read", "with_call"), [(3, False), (30, False), (30, True), (50, True)]
)
async def test_a_messages_stream_continues_in_its_last_block(
    pair: Pair, num_read: int, with_call: bool
) -> None:
    text = "I shall look at it now, and then say more."
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "stream": True,
        "messages": [{"role": "user", "content": f"{text}\n{CALL}" if with_call else text}],
    } | ({"tools": TOOLS} if with_call else {})
    dripping = await slow(pair.worker)
    read = Read()
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        http.stream("POST", PATH, json=body, headers=TAKES_EVENTS) as response,
    ):
        async for line in response.aiter_lines():
            read.take(line)
            if read.num_characters >= num_read:
                break
        await pair.kill_first()
    dripping.cancel()
    pair.worker.gate.set()
    async with (
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as http,
        http.stream("POST", PATH, json=body, headers={"Last-Event-ID": read.last_id}) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            read.take(line)
    texts = ["".join(pieces) for pieces in read.blocks.values()]
    assert texts[0] == text
    assert read.kinds.count("message_start") == 1
    assert read.kinds.count("content_block_stop") == len(texts)
    assert read.stop_reason == ("tool_use" if with_call else "end_turn")
    if with_call:
        assert json.loads(texts[1]) == {"at": "the sky above the mill"}
    assert len(pair.worker.jobs) == 1
