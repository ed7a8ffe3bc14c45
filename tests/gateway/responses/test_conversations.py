"""Conversations that answers are added to, with OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.conversations import ConversationItem

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.responses.conversations import ConversationStore
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.frames import Failed
from tests.gateway.responses.fronts import says, transcribing_models
from tests.gateway.resuming.clients import TAKES_EVENTS, Pair, slow
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually


@pytest.fixture
async def second(front: RunningGateway, redis: RedisConfig) -> AsyncIterator[RunningGateway]:
    """Another gateway of the same system."""
    async with running_gateway(
        models=transcribing_models(), gateway_id="gw-2", broker=front.broker, redis=redis
    ) as running:
        yield running


def client_of(front: RunningGateway, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0, timeout=10)


def message(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def text_of(item: ConversationItem) -> str:
    content: Any = item.to_dict()["content"]
    return "".join(part["text"] for part in content)


async def texts(client: openai.AsyncOpenAI, conversation_id: str) -> list[str]:
    """Return the texts of all items of a conversation, oldest first."""
    page = await client.conversations.items.list(conversation_id, order="asc", limit=100)
    return [text_of(item) for item in page.data]


async def test_a_conversation_is_made_changed_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create(items=[message("one")], metadata={"a": "b"})
    assert made.id.startswith("conv-")
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "b"}
    changed = await client.conversations.update(made.id, metadata={"c": "d"})
    assert (changed.metadata, changed.created_at) == ({"c": "d"}, made.created_at)
    added = await client.conversations.items.create(
        made.id, items=[message("two"), message("three")]
    )
    assert [text_of(item) for item in added.data] == ["two", "three"]
    assert await texts(client, made.id) == ["one", "two", "three"]
    newest = await client.conversations.items.list(made.id, limit=2)
    assert ([text_of(item) for item in newest.data], newest.has_more) == (["three", "two"], True)
    rest = [text_of(item) async for item in newest]
    assert rest == ["three", "two", "one"]
    one = added.data[0]
    item_id = str(one.id)
    assert await client.conversations.items.retrieve(item_id, conversation_id=made.id) == one
    left = await client.conversations.items.delete(item_id, conversation_id=made.id)
    assert left.id == made.id
    assert await texts(client, made.id) == ["one", "three"]
    with pytest.raises(openai.NotFoundError) as gone:
        await client.conversations.items.retrieve(item_id, conversation_id=made.id)
    assert gone.value.code == "item_not_found"
    deleted = await client.conversations.delete(made.id)
    assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")
    for call in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            await call(made.id)
        assert missing.value.code == "conversation_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_added_to_it(
    front: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    says(front, "Blue.", "Grey.")
    made = await client.conversations.create(items=[message("The sky.")])
    for asked in ("Today?", "And now?"):
        answer: Any = await client.responses.create(
            model=MODEL, conversation=made.id, input=asked, stream=stream, store=False
        )
        if stream:
            *_, end = [event async for event in answer]
            answer = end.response
        assert answer.conversation.id == made.id
    assert await texts(client, made.id) == ["The sky.", "Today?", "Blue.", "And now?", "Grey."]
    prompts = [bytes(job.prompt_token_ids or ()).decode() for job in front.worker.jobs]
    assert prompts[1] == "user:The sky.|user:Today?|assistant:Blue.|user:And now?"


async def test_a_conversation_is_named_by_its_id_or_by_an_object(
    client: openai.AsyncOpenAI,
) -> None:
    made = await client.conversations.create()
    answer = await client.responses.create(model=MODEL, conversation={"id": made.id}, input="Hi")
    item = {"type": "item_reference", "id": answer.output[0].id}
    again = await client.responses.create(model=MODEL, conversation=made.id, input=[item])  # type: ignore[list-item]
    assert again.conversation is not None
    assert len(await texts(client, made.id)) == 4


async def test_an_answer_is_added_once_whoever_tells_of_its_end(
    front: RunningGateway, second: RunningGateway
) -> None:
    """Asked again with its key, here and at another gateway, also at the same time."""
    one, other = client_of(front), client_of(second)
    made = await one.conversations.create()
    options: Any = {
        "model": MODEL,
        "conversation": made.id,
        "input": "Hi",
        "extra_headers": {"Idempotency-Key": "k-conversation"},
    }
    answers = await asyncio.gather(
        *(client.responses.create(**options) for client in (one, other, one))
    )
    answers.append(await other.responses.create(**options))
    assert len({answer.id for answer in answers}) == 1
    assert await texts(one, made.id) == ["Hi", "user:Hi"]
    before = await other.responses.input_items.list(answers[0].id)
    assert [text_of(item) for item in before.data] == ["Hi"]  # type: ignore[arg-type]
    for client in (one, other):
        await client.close()


async def test_a_stream_that_goes_on_after_its_gateway_died_is_added_once(
    front: RunningGateway, second: RunningGateway
) -> None:
    client = client_of(second)
    made = await client.conversations.create()
    body = {"model": MODEL, "conversation": made.id, "input": "Hi there", "stream": True}
    dripping = await slow(front.worker)
    last_id = ""
    async with httpx.AsyncClient(timeout=10) as http:
        async with http.stream(
            "POST", f"{front.url}/v1/responses", json=body, headers=TAKES_EVENTS
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                    break
            await Pair(front, second).kill_first()
        dripping.cancel()
        front.worker.gate.set()
        headers = {"Last-Event-ID": last_id}
        for _again in range(2):
            answer = await http.post(f"{second.url}/v1/responses", json=body, headers=headers)
            assert "response.completed" in answer.text
    assert await texts(client, made.id) == ["Hi there", "user:Hi there"]
    assert len(front.worker.jobs) == 1
    await client.close()


@pytest.mark.parametrize("dies", [False, True])
async def test_an_answer_in_the_background_is_added_once(
    front: RunningGateway, second: RunningGateway, dies: bool
) -> None:
    one, other = client_of(front), client_of(second)
    front.worker.gate.clear()
    made = await one.conversations.create(items=[message("Before.")])
    begun = await one.responses.create(
        model=MODEL, conversation=made.id, input="Hi", background=True
    )
    if dies:
        await Pair(front, second).kill_first()
    front.worker.gate.set()

    async def has_ended() -> bool:
        return (await other.responses.retrieve(begun.id)).status == "completed"

    await eventually(has_ended)
    ended = await other.responses.retrieve(begun.id)
    assert ended.conversation is not None
    assert ended.conversation.id == made.id
    assert await texts(other, made.id) == ["Before.", "Hi", "user:Before.|user:Hi"]
    for client in (one, other):
        await client.close()


async def test_an_answer_that_failed_is_not_added(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    made = await client.conversations.create()
    front.worker.end_with = Failed(code="engine_failed", message="It broke.", retryable=False)
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model=MODEL, conversation=made.id, input="Hi")
    assert await texts(client, made.id) == []


async def test_a_conversation_that_is_deleted_meanwhile(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    made = await client.conversations.create()
    front.worker.gate.clear()
    asking = asyncio.create_task(
        client.responses.create(model=MODEL, conversation=made.id, input="Hi")
    )
    await eventually(lambda: front.worker.num_running == 1)
    await client.conversations.delete(made.id)
    front.worker.gate.set()
    answer = await asking
    assert (answer.conversation, answer.output_text) == (None, "user:Hi")


async def test_an_answer_that_cannot_be_added_says_so(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await client.conversations.create()

    async def unreachable(*_arguments: Any) -> None:
        raise RedisUnreachableError

    with monkeypatch.context() as patched:
        patched.setattr(ConversationStore, "append", unreachable)
        answer = await client.responses.create(model=MODEL, conversation=made.id, input="Hi")
    assert (answer.conversation, answer.output_text) == (None, "user:Hi")
    assert await texts(client, made.id) == []


async def test_a_conversation_is_kept_for_a_while_only(
    client: openai.AsyncOpenAI, redis: RedisConfig
) -> None:
    """A changed conversation expires, and so does a conversation stored in several pieces."""
    made = await client.conversations.create(items=[message("x" * 100_000)])
    await client.conversations.update(made.id, metadata={"a": "b"})
    link = RedisLink(redis)
    (key,) = await link.call("KEYS", "conv:*")
    ttl_s = await link.call("TTL", key)
    await link.close()
    assert 0 < ttl_s <= GatewayConfig().conversation_ttl_s
    assert await texts(client, made.id) == ["x" * 100_000]


async def test_turns_at_the_same_time_are_added_whole(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create()
    await asyncio.gather(
        *(
            client.responses.create(model=MODEL, conversation=made.id, input=f"no {i}")
            for i in range(8)
        )
    )
    turns = await texts(client, made.id)
    assert sorted(turns[::2]) == [f"no {i}" for i in range(8)]
    assert all(
        answer.endswith(f"user:{asked}")
        for asked, answer in zip(turns[::2], turns[1::2], strict=True)
    )


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("", {"items": [message("x")] * 21}, "items", 400),
        ("", {"items": [{"type": "wizard"}]}, "items[0].type", 400),
        ("", {"metadata": {str(i): "" for i in range(17)}}, "metadata", 400),
        ("", {"items": [{"type": "item_reference", "id": "msg_x"}]}, "items[0].id", 404),
        ("", {"wat": 1}, "wat", 400),
        ("/{id}", {}, "metadata", 400),
        ("/{id}/items", {"items": []}, "items", 400),
        ("/{id}/items", {"items": [message("x" * 2_000)]}, None, 413),
        ("/conv-none", {"metadata": {}}, "conversation", 404),
        ("/conv-none/items", {"items": [message("x")]}, "conversation", 404),
    ],
)
async def test_bad_conversation_requests_are_refused(
    redis: RedisConfig, path: str, body: Any, param: str | None, status: int
) -> None:
    config = GatewayConfig(response_max_bytes=1_000)
    async with (
        running_gateway(config, models=transcribing_models(), redis=redis) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        made = (await http.post("/v1/conversations", json={})).json()
        refused = await http.post(f"/v1/conversations{path.format(id=made['id'])}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


async def test_a_conversation_that_is_full_takes_no_more(redis: RedisConfig) -> None:
    config = GatewayConfig(response_max_bytes=1_000)
    async with running_gateway(config, models=transcribing_models(), redis=redis) as front:
        client = client_of(front)
        made = await client.conversations.create()
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(model=MODEL, conversation=made.id, input="x" * 2_000)
        assert refused.value.status_code == 413
        await client.close()


async def test_a_conversation_is_there_or_named_in_the_refusal(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model=MODEL, conversation="conv-none", input="Hi")
    assert (missing.value.code, missing.value.param) == ("conversation_not_found", "conversation")


async def test_each_tenant_has_its_own(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    store = TenantStore(link)
    keys = [(await store.create_key(tenant, 0))[1] for tenant in ("acme", "other")]
    await link.close()
    async with running_gateway(GatewayConfig(auth="required"), redis=redis) as front:
        acme, other = (client_of(front, key) for key in keys)
        made = await acme.conversations.create(items=[message("x")])
        with pytest.raises(openai.NotFoundError):
            await other.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.conversations.items.list(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, conversation=made.id, input="y")
        with pytest.raises(openai.NotFoundError):
            await other.conversations.delete(made.id)
        assert await texts(acme, made.id) == ["x"]
        for client in (acme, other):
            await client.close()


async def test_without_redis_there_are_none() -> None:
    async with running_gateway() as front, httpx.AsyncClient(base_url=front.url) as http:
        refused = await http.post("/v1/conversations", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
