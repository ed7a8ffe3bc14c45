"""Answers in the background, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from millrace.schemas.config import RedisConfig
from millrace.schemas.frames import Failed
from millrace.schemas.notices import NOTICE_NAME
from tests.gateway.responses.fronts import transcribing_models
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

TEXT = "user:zwölf Boxkämpfer"


def client_of(front: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=10)


async def over(client: openai.AsyncOpenAI, response_id: str) -> Response:
    """The answer, once it has ended."""

    async def has_ended() -> bool:
        return not await has_status(client, response_id, "queued", "in_progress")

    await eventually(has_ended)
    return await client.responses.retrieve(response_id)


async def has_status(client: openai.AsyncOpenAI, response_id: str, *statuses: str) -> bool:
    return (await client.responses.retrieve(response_id)).status in statuses


@pytest.fixture
async def second(front: RunningGateway, redis: RedisConfig) -> AsyncIterator[RunningGateway]:
    """Another gateway of the same system."""
    async with running_gateway(
        models=transcribing_models(), gateway_id="gw-2", broker=front.broker, redis=redis
    ) as running:
        yield running


async def test_a_background_answer_is_begun_polled_and_read(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.gate.clear()
    begun = await client.responses.create(model=MODEL, input=TEXT[5:], background=True)
    assert begun.status in ("queued", "in_progress")
    assert begun.background
    assert begun.output == []
    await eventually(lambda: front.worker.num_running == 1)
    await eventually(lambda: has_status(client, begun.id, "in_progress"))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
    assert caught.value.code == "previous_response_not_found"
    front.worker.gate.set()
    ended = await over(client, begun.id)
    assert (ended.status, ended.output_text, ended.background) == ("completed", TEXT, True)
    assert ended.usage is not None
    assert ended.usage.output_tokens == len(TEXT)
    assert len(front.worker.jobs) == 1
    again = await client.responses.create(model=MODEL, input="on", previous_response_id=begun.id)
    assert again.output_text == f"{TEXT}|assistant:{TEXT}|user:on"
    await client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_a_cut_background_answer_is_incomplete(client: openai.AsyncOpenAI) -> None:
    begun = await client.responses.create(
        model=MODEL, input="long", background=True, max_output_tokens=3
    )
    ended = await over(client, begun.id)
    assert (ended.status, ended.output_text) == ("incomplete", "use")


async def test_a_background_answer_is_followed_by_cursor_at_any_gateway(
    front: RunningGateway, second: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    stream = await client.responses.create(
        model=MODEL, input=TEXT[5:], background=True, stream=True
    )
    whole: list[dict[str, Any]] = [event.to_dict() async for event in stream]
    response_id: str = whole[0]["response"]["id"]
    assert [whole[0]["type"], whole[-1]["type"]] == ["response.created", "response.completed"]
    async with client_of(second) as other:
        for front_client in (client, other):
            for after in range(-1, int(whole[-1]["sequence_number"]) + 1):
                events = await _followed(front_client, response_id, after)
                rest = [one for one in whole if one["sequence_number"] > after]
                assert _text(events) == _text(rest) or _text(rest).endswith(_text(events))
                assert all(one["sequence_number"] > after for one in events)
                seen = "".join(
                    one["delta"]
                    for one in whole
                    if one["type"].endswith(".delta") and one["sequence_number"] <= after
                )
                if after in {one["sequence_number"] for one in whole}:
                    assert seen + _text(events) == TEXT
                if after < whole[-1]["sequence_number"]:
                    assert events[-1] == whole[-1]
                else:
                    assert not events
    assert len(front.worker.jobs) == 1


async def _followed(
    client: openai.AsyncOpenAI, response_id: str, after: int
) -> list[dict[str, Any]]:
    cursor = openai.omit if after < 0 else after
    stream = await client.responses.retrieve(response_id, stream=True, starting_after=cursor)
    return [event.to_dict() async for event in stream]


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(one["delta"] for one in events if one["type"].endswith(".delta"))


async def test_each_way_to_ask_has_the_notices_and_lines_that_no_client_splits(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    text = "a\u2028b\u0085c"
    tools = [{"type": "web_search"}]
    fields = {"model": MODEL, "input": text, "background": True, "tools": tools}
    front.worker.gate.clear()
    begun = await http.post("/v1/responses", json=fields)
    path = f"/v1/responses/{begun.json()['id']}"
    looked = await http.get(path)
    follow = asyncio.create_task(http.get(path, params={"stream": "true"}))
    await eventually(lambda: front.worker.num_running == 1)
    front.worker.gate.set()
    followed = await follow

    async def is_over() -> bool:
        return bool((await http.get(path)).json()["status"] == "completed")

    await eventually(is_over)
    replayed = await http.get(path, params={"stream": "true"})
    for answer in (begun, looked, followed, await http.get(path), replayed):
        assert answer.status_code == 200
        assert answer.headers[NOTICE_NAME] == 'tool_left_out;param="tools[0]";detail="web_search"'
    for stream in (followed, replayed):
        last = json.loads(stream.text.splitlines()[-2].removeprefix("data: "))
        assert last["response"]["output"][0]["content"][0]["text"] == f"user:{text}"
        assert not {"\u2028", "\u0085"} & {*stream.text}


async def test_a_follower_that_leaves_changes_nothing(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.stop_before = 4
    stream = await client.responses.create(model=MODEL, input="four", background=True, stream=True)
    last: Any = None
    async for event in stream:
        last = event
        if event.type == "response.output_text.delta":
            break
    response_id = f"resp-{last.item_id.split('_')[1]}"
    await stream.close()
    state = await client.responses.retrieve(response_id)
    assert state.status == "in_progress"
    assert front.worker.cancelled == []
    await client.responses.cancel(response_id)


async def test_a_background_answer_is_cancelled_from_any_gateway(
    front: RunningGateway, second: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.stop_before = 4
    async with client_of(second) as other:
        for asked in (client, other):
            begun = await client.responses.create(model=MODEL, input="four", background=True)
            await eventually(lambda: front.worker.num_running == 1)
            cancelled = await asked.responses.cancel(begun.id)
            assert (cancelled.status, cancelled.error) == ("cancelled", None)
            again = await client.responses.cancel(begun.id)
            assert again.to_dict() == cancelled.to_dict()
            assert (await over(client, begun.id)).to_dict() == cancelled.to_dict()
            stream = await asked.responses.retrieve(begun.id, stream=True)
            last = [event async for event in stream][-1]
            assert last.type == "response.failed"
            assert last.response.status == "cancelled"
    assert len(front.worker.cancelled) == 2


async def test_a_background_answer_continues_after_its_gateway_is_gone(
    front: RunningGateway, redis: RedisConfig
) -> None:
    """The gateway that began it is closed while nothing is made yet, and while all is."""
    for is_made in (False, True):
        front.worker.gate.clear()
        async with (
            running_gateway(
                models=transcribing_models(), gateway_id="gw-3", broker=front.broker, redis=redis
            ) as third,
            client_of(third) as client,
        ):
            begun = await client.responses.create(model=MODEL, input=TEXT[5:], background=True)
            await eventually(lambda: front.worker.num_running == 1)
            if is_made:
                front.worker.gate.set()
                await eventually(lambda: front.worker.num_running == 0)
        async with client_of(front) as client:
            stream = await client.responses.retrieve(begun.id, stream=True, starting_after=1)
            front.worker.gate.set()
            events: list[dict[str, Any]] = [event.to_dict() async for event in stream]
            assert _text(events) == TEXT
            ended = await over(client, begun.id)
            assert (ended.status, ended.output_text) == ("completed", TEXT)


async def test_a_background_answer_is_followed_without_its_model(
    front: RunningGateway, second: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    """The model is taken from the catalogue while the answer is made, and when it is over."""
    front.worker.gate.clear()
    begun = await client.responses.create(model=MODEL, input=TEXT[5:], background=True)
    await eventually(lambda: front.worker.num_running == 1)
    for gateway in (front.gateway, second.gateway):
        gateway.models.change({}, lambda _name: None, gateway.models.router, [MODEL])  # type: ignore[arg-type,return-value]
    async with client_of(second) as other:
        here, there = (asyncio.create_task(_followed(one, begun.id, -1)) for one in (client, other))
        assert await has_status(other, begun.id, "queued", "in_progress")
        front.worker.gate.set()
        assert (_text(await here), _text(await there)) == (TEXT, TEXT)
        for one in (client, other):
            assert (await one.responses.retrieve(begun.id)).output_text == TEXT
            again = await _followed(one, begun.id, -1)
            assert (again[-1]["type"], _text(again)) == ("response.completed", TEXT)
            assert [event["type"] for event in await _followed(one, begun.id, 20)][-1] == (
                "response.completed"
            )


async def test_bad_requests_are_named(front: RunningGateway, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="x", background=True, store=False)
    assert caught.value.param == "store"
    response = await client.responses.create(model=MODEL, input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.cancel(response.id)
    assert caught.value.code == "not_in_background"
    for call in (client.responses.cancel, client.responses.retrieve):
        with pytest.raises(openai.NotFoundError):
            await call("resp-none")
    async with httpx.AsyncClient(base_url=front.url) as http:
        for query, param in (
            ("stream=1", "stream"),
            ("starting_after=1", "starting_after"),
            ("stream=true&starting_after=x", "starting_after"),
        ):
            answer = await http.get(f"/v1/responses/{response.id}?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        body = {"model": MODEL, "input": "x", "background": True}
        answer = await http.post("/v1/responses", json=body, headers={"last-event-id": "resp-1/0"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")


async def test_an_idempotency_key_begins_one_background_answer(front: RunningGateway) -> None:
    body = json.dumps({"model": MODEL, "input": "once", "background": True})
    headers = {"idempotency-key": "k"}
    async with httpx.AsyncClient(base_url=front.url) as http:
        answers = [
            (await http.post("/v1/responses", content=body, headers=headers)).json()
            for _ in range(3)
        ]
    assert len({answer["id"] for answer in answers}) == 1
    assert len(front.worker.jobs) == 1


async def test_a_deleted_background_answer_stops(
    front: RunningGateway, second: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.stop_before = 3
    begun = await client.responses.create(model=MODEL, input="slow", background=True)
    await eventually(lambda: front.worker.num_running == 1)
    async with client_of(second) as other:
        await other.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(begun.id)
    await eventually(lambda: front.worker.cancelled == [begun.id])
    await eventually(lambda: front.worker.num_running == 0)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


@pytest.mark.parametrize("may_pass", [False, True])
async def test_the_key_of_a_failed_answer_may_be_tried_again_if_retryable(
    front: RunningGateway, client: openai.AsyncOpenAI, may_pass: bool
) -> None:
    front.worker.end_with = Failed(code="engine_failed", message="It broke.", retryable=may_pass)
    asked: Any = {
        "model": MODEL,
        "input": "x",
        "background": True,
        "extra_headers": {"Idempotency-Key": "k-background"},
    }
    first = await client.responses.create(**asked)
    failed = await over(client, first.id)
    assert failed.status == "failed"
    front.worker.end_with = None

    async def is_another() -> bool:
        again = await client.responses.create(**asked)
        return bool(again.id != first.id)

    if not may_pass:
        assert not await is_another()
        return
    await eventually(is_another)
    again = await over(client, (await client.responses.create(**asked)).id)
    assert again.output_text == "user:x"
