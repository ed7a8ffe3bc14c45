"""Stored answers, read with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.api.event_ids import parse_event_id
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.gateway.responses.fronts import says, transcribing_models
from tests.support.running_gateway import (
    MODEL,
    RunningGateway,
    running_gateway,
)
from tests.support.servers import RedisServer
from tests.support.waiting import eventually


async def test_an_answer_is_continued(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one", instructions="Count.")
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert second.output_text == f"user:one|assistant:{first.output_text}|user:two"
    assert second.previous_response_id == first.id
    third = await client.responses.create(
        model=MODEL, input="three", previous_response_id=second.id, store=False
    )
    assert third.output_text.endswith(f"|assistant:{second.output_text}|user:three")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="x", previous_response_id=third.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_answers_are_read_again_and_deleted(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    second = await client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "two"}, {"role": "user", "content": "three"}],
        previous_response_id=first.id,
    )
    again = await client.responses.retrieve(second.id)
    assert again.to_dict() == second.to_dict()

    texts = []
    async for item in client.responses.input_items.list(second.id, limit=1, order="asc"):
        assert item.type == "message"
        texts.append(item.content[0].to_dict()["text"])
    assert texts == ["one", first.output_text, "two", "three"]
    page = await client.responses.input_items.list(second.id, limit=3)
    assert page.has_more
    assert page.data[0].to_dict()["content"][0]["text"] == "three"  # type: ignore[index]

    await client.responses.delete(second.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(second.id)
        assert caught.value.code == "response_not_found"
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text


async def test_an_answer_that_still_runs_is_not_found(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.stop_before = 3
    stream = await client.responses.create(model=MODEL, input="slow", stream=True)
    event = await anext(stream)
    assert event.type == "response.created"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(event.response.id)
    await stream.close()
    await eventually(lambda: len(front.worker.cancelled) == 1)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "9" * 30}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "absent"}, "after"),
        ({"before": "x"}, "before"),
    ],
)
async def test_bad_pages_are_named(
    front: RunningGateway, client: openai.AsyncOpenAI, query: dict[str, Any], param: str
) -> None:
    response = await client.responses.create(model=MODEL, input="one")
    async with httpx.AsyncClient(base_url=front.url) as http:
        answer = await http.get(f"/v1/responses/{response.id}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = await http.get(f"/v1/responses/{response.id}", params={"stream": "true"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_each_tenant_continues_its_own(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    store = TenantStore(link)
    tokens = [(await store.create_key(tenant, 0))[1] for tenant in ("acme", "other")]
    await link.close()
    async with running_gateway(GatewayConfig(auth="required"), redis=redis) as front:
        clients = [
            openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=token, max_retries=0)
            for token in (*tokens, "none")
        ]
        acme, other, nobody = clients
        response = await acme.responses.create(model=MODEL, input="x")
        assert (await acme.responses.retrieve(response.id)).output_text == "x"
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await other.responses.create(model=MODEL, input="y", previous_response_id=response.id)
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.AuthenticationError):
            await nobody.responses.retrieve(response.id)
        for client in clients:
            await client.close()


async def broken_off(
    front: RunningGateway, http: httpx.AsyncClient, body: dict[str, Any], num_tokens: int
) -> tuple[str, list[dict[str, Any]]]:
    """Read a stream until an event says that ``num_tokens`` tokens have come; the last id, and all
    events up to there. Each token comes alone."""

    async def feed() -> None:
        while True:
            front.worker.gate.set()
            await asyncio.sleep(0)
            front.worker.gate.clear()
            await asyncio.sleep(0.005)

    front.worker.gate.clear()
    feeding = asyncio.create_task(feed())
    events, last_id = [], ""
    headers = {"idempotency-key": secrets.token_hex(8)}
    async with http.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if last_id and parse_event_id(last_id).indices[0] >= num_tokens:
                    break
    feeding.cancel()
    front.worker.gate.set()
    return last_id, events


def events_in(stream: str) -> list[dict[str, Any]]:
    lines = stream.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("num_tokens", [1, 6, 12, 50, 75])
async def test_a_stream_goes_on_at_another_gateway(
    front: RunningGateway, redis: RedisConfig, num_tokens: int
) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bath"}}</tool_call>'
    says(front, "Let me look." + call)
    tool = {"type": "function", "name": "weather"}
    body = {"model": MODEL, "input": "Well?", "tools": [tool], "stream": True}
    async with (
        running_gateway(
            models=transcribing_models(), redis=redis, gateway_id="gw-2", broker=front.broker
        ) as other,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
        httpx.AsyncClient(base_url=other.url, timeout=10) as http_of_other,
    ):
        last_id, events = await broken_off(front, http, body, num_tokens)
        resumed = await http_of_other.post(
            "/v1/responses", json=body, headers={"last-event-id": last_id}
        )
        request_id = last_id.partition("/")[0]
        kept = await http_of_other.get(f"/v1/responses/{request_id}")
    by_number = {event["sequence_number"]: event for event in events}
    for event in events_in(resumed.text):
        # Who has all tokens is told of the end again.
        assert by_number.setdefault(event["sequence_number"], event) == event
    assert list(by_number) == sorted(by_number)
    events = list(by_number.values())
    added = [event["item"]["id"] for event in events if event["type"].endswith("item.added")]
    assert len(added) == len(set(added)) == 2
    deltas = {"output_text": "", "function_call_arguments": ""}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["type"].split(".")[1]] += event["delta"]
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    message, called = response["output"]
    assert message["content"][0]["text"] == deltas["output_text"] == "Let me look."
    assert called["arguments"] == deltas["function_call_arguments"]
    assert json.loads(called["arguments"]) == {"city": "Bath"}
    assert [message["id"], called["id"]] == added
    assert kept.json() == response


async def test_without_redis_answers_are_not_kept() -> None:
    async with (
        running_gateway() as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        response = await client.responses.create(model=MODEL, input="x")
        assert (response.output_text, response.to_dict()["store"]) == ("x", False)
        for fields in ({"store": True}, {"previous_response_id": response.id}):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.responses.create(model=MODEL, input="x", extra_body=fields)
            assert (caught.value.status_code, caught.value.code) == (503, "state_unavailable")


@pytest.mark.parametrize("is_full", [False, True])
async def test_an_answer_is_not_withheld_when_redis_goes_away_or_is_full(
    tmp_path: Path, is_full: bool
) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with (
            running_gateway(redis=RedisConfig(url=server.url)) as front,
            openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
        ):
            front.worker.gate.clear()
            stream = await client.responses.create(model=MODEL, input="x", stream=True)
            first = await anext(stream)
            assert first.type == "response.created"
            assert first.response.to_dict()["store"] is True
            if is_full:
                assert front.gateway.redis is not None
                await front.gateway.redis.call("CONFIG", "SET", "maxmemory", 1)
            else:
                server.kill()
            front.worker.gate.set()
            *_, last = [event async for event in stream]
            assert last.type == "response.completed"
            assert (last.response.output_text, last.response.to_dict()["store"]) == ("x", False)
    finally:
        server.stop()


async def test_a_moment_without_redis_costs_no_kept_answer(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with (
            running_gateway(redis=RedisConfig(url=server.url)) as front,
            openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
        ):
            front.worker.gate.clear()
            stream = await client.responses.create(model=MODEL, input="x", stream=True)
            await anext(stream)
            server.kill()
            assert front.gateway.redis is not None
            with pytest.raises(RedisUnreachableError):
                await front.gateway.redis.call("PING")
            front.worker.gate.set()
            server.start()
            *_, last = [event async for event in stream]
            assert last.type == "response.completed"
            assert last.response.to_dict()["store"] is True
            response = await client.responses.retrieve(last.response.id)
            assert response.output_text == "x"
    finally:
        server.stop()


async def test_a_conversation_that_is_too_large_to_keep(redis: RedisConfig) -> None:
    async with (
        running_gateway(GatewayConfig(response_max_bytes=500), redis=redis) as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        response = await client.responses.create(model=MODEL, input="x" * 600)
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(model=MODEL, input="x" * 600, store=True)
        assert caught.value.status_code == 413
