"""Answers that can be continued, on a real Redis."""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from millrace.bus import redis_keys
from millrace.gateway.responses.store import ResponseStore, conversation_of
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import PayloadTooLargeError
from millrace.schemas.openai import TextFormat
from millrace.schemas.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ResponseAnswer,
    TextConfig,
)
from tests.support.servers import RedisServer

_ITEMS: tuple[Item, ...] = (
    MessageItem(id="msg_1", role="user", content=(InputText("hé"),)),
    FunctionCallItem(id="fc_1", call_id="c", name="f", arguments="{}"),
    FunctionCallOutputItem(id="fco_1", call_id="c", output="1"),
)


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    made = RedisLink(RedisConfig(url=redis_server.url))
    yield made
    await made.close()


def response(response_id: str, text: str = "ok") -> ResponseAnswer:
    output = MessageItem(id="msg_2", role="assistant", content=(OutputText(text),))
    return ResponseAnswer(
        id=response_id,
        created_at=1,
        status="completed",
        model="echo",
        output=(output,),
        instructions=None,
        max_output_tokens=None,
        metadata={},
        parallel_tool_calls=True,
        previous_response_id=None,
        service_tier="auto",
        store=True,
        temperature=1.0,
        text=TextConfig(format=TextFormat()),
        tool_choice="auto",
        tools=(),
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
    )


async def test_an_answer_is_kept_with_what_went_before(link: RedisLink) -> None:
    store = ResponseStore(link, GatewayConfig(response_ttl_s=60))
    kept = response("resp-1")
    await store.put("acme", kept, _ITEMS)
    stored = await store.get("acme", "resp-1")
    assert stored is not None
    assert stored.input == _ITEMS
    assert conversation_of(stored) == (*_ITEMS, *kept.output)
    assert bytes(stored.response) == msgspec.json.encode(kept)
    left_ms = await link.call("PTTL", redis_keys.response_key("acme", "resp-1"))
    assert 50_000 < left_ms <= 60_000


async def test_each_tenant_has_its_own(link: RedisLink) -> None:
    store = ResponseStore(link, GatewayConfig())
    await store.put("a", response("b:resp-2"), _ITEMS)
    assert await store.get("a:b", "resp-2") is None
    assert await store.get("b", "b:resp-2") is None
    assert not await store.delete("b", "b:resp-2")
    assert await store.delete("a", "b:resp-2")
    assert not await store.delete("a", "b:resp-2")
    assert await store.get("a", "b:resp-2") is None


async def test_long_conversations_are_packed_out_of_the_way(link: RedisLink) -> None:
    store = ResponseStore(link, GatewayConfig())
    text = "".join(random.Random(3).choices(string.printable, k=400_000))
    await store.put("a", response("resp-3", text), _ITEMS)
    stored = await store.get("a", "resp-3")
    assert stored is not None
    (message,) = conversation_of(stored)[3:]
    assert isinstance(message, MessageItem)
    assert message.content[0].text == text


async def test_what_is_too_large_or_nowhere_is_told(link: RedisLink) -> None:
    small = ResponseStore(link, GatewayConfig(response_max_bytes=100))
    with pytest.raises(PayloadTooLargeError, match="100 bytes"):
        await small.check(_ITEMS)
    await ResponseStore(link, GatewayConfig()).check(_ITEMS)
    nowhere = ResponseStore(None, GatewayConfig())
    with pytest.raises(RedisUnreachableError):
        await nowhere.check(_ITEMS)
    with pytest.raises(RedisUnreachableError):
        await nowhere.get("a", "x")


@pytest.mark.parametrize("kept", [b"x", zlib.compress(b"{}"), zlib.compress(b'{"response":1}')])
async def test_an_unreadable_answer_counts_as_absent(link: RedisLink, kept: bytes) -> None:
    await link.call("SET", redis_keys.response_key("a", "resp-4"), kept)
    assert await ResponseStore(link, GatewayConfig()).get("a", "resp-4") is None


@pytest.mark.parametrize("response_id", ["", "x" * 129, "x" * 1_000_000, "\ud800"])
async def test_unknown_response_ids_are_not_found(link: RedisLink, response_id: str) -> None:
    store = ResponseStore(link, GatewayConfig())
    assert await store.get("a", response_id) is None
    assert not await store.delete("a", response_id)
