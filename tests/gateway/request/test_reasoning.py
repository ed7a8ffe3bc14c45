"""Thoughts as clients get them: whole, streamed, as items and over a socket.

The model says what it was told last, so that a test can have it think anything.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from millrace.gateway.models import LoadedModels
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.config import RedisConfig
from millrace.schemas.models.cards import ModelCard
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway
from tests.support.servers import RedisServer

THOUGHTS, ANSWER = "Is it?\n\nIt is, I think.", "It is."
TEXT = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
# Up to the end of their mark; a byte is a token.
NUM_REASONING = len(TEXT.partition("\n\nIt is.")[0].encode())
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
async def front(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    model = ByteModel()
    model.reasoning_format = ReasoningFormat()
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    models = LoadedModels({MODEL: card}, lambda _name: model)
    async with running_gateway(models=models, redis=RedisConfig(url=redis_server.url)) as running:
        yield running


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> tuple[str, str, Any]:
    """The thoughts, the answer and the usage of a stream."""
    thoughts, answer, usage = "", "", None
    options: dict[str, Any] = ASKED | {"stream_options": {"include_usage": True}} | more
    async for chunk in await client.chat.completions.create(**options, stream=True):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta: Any = choice.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            thoughts += delta.get("reasoning_content") or ""
            answer += delta["content"] or ""
            assert not (answer and delta.get("reasoning")), "thoughts come first"
    return thoughts, answer, usage


async def test_each_answer_of_a_beam_search_has_its_thoughts(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        **ASKED, n=2, extra_body={"use_beam_search": True}
    )
    messages: list[Any] = [choice.message for choice in answer.choices]
    assert [message.reasoning_content for message in messages] == [THOUGHTS] * 2
    assert [message.content for message in messages] == [ANSWER, ANSWER + "!"]


async def test_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASKED)
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning) == (THOUGHTS, THOUGHTS)
    assert message.content == ANSWER
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == NUM_REASONING
    assert answer.usage.completion_tokens == len(TEXT.encode())


async def test_a_streamed_answer(client: openai.AsyncOpenAI) -> None:
    thoughts, answer, usage = await streamed(client)
    assert (thoughts, answer) == (THOUGHTS, ANSWER)
    assert usage.completion_tokens_details.reasoning_tokens == NUM_REASONING


async def test_thoughts_that_are_not_wanted(client: openai.AsyncOpenAI) -> None:
    extra = {"include_reasoning": False}
    thoughts, answer, usage = await streamed(client, extra_body=extra)
    assert (thoughts, answer) == ("", ANSWER)
    assert usage.completion_tokens_details.reasoning_tokens == NUM_REASONING
    whole = await client.chat.completions.create(**ASKED, extra_body=extra)
    assert whole.choices[0].message.model_dump().get("reasoning_content") is None


async def test_log_probabilities_are_of_all_tokens(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**ASKED, logprobs=True)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or ()) == len(TEXT.encode())
    count = 0
    async for chunk in await client.chat.completions.create(**ASKED, logprobs=True, stream=True):
        for choice in chunk.choices:
            count += 0 if choice.logprobs is None else len(choice.logprobs.content or ())
    assert count == len(TEXT.encode())


async def test_an_answer_that_was_cut_off_in_thoughts(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASKED, max_tokens=18)
    message: Any = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Is it?\n\nIt", "")
    assert answer.choices[0].finish_reason == "length"


async def test_calls_come_behind_thoughts(client: openai.AsyncOpenAI) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    text = f"<think>\nShall I <tool_call>?\n</think>\n\n{call}"
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], tools=[TOOL]
    )
    message: Any = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Shall I <tool_call>?", None)
    assert [one.function.name for one in message.tool_calls] == ["look"]


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_a_response(client: openai.AsyncOpenAI, stream: bool) -> None:
    given: Any = TEXT
    response: openai.types.responses.Response
    if stream:
        async with client.responses.stream(model=MODEL, input=given) as events:
            kinds = [event.type async for event in events]
            response = await events.get_final_response()
        assert kinds.index("response.reasoning_text.delta") < kinds.index(
            "response.reasoning_text.done"
        )
    else:
        response = await client.responses.create(model=MODEL, input=given)
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == [THOUGHTS]
    assert message.type == "message"
    assert response.output_text == ANSWER
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == NUM_REASONING
    # Items go back as the SDK keeps them, and with a kept response.
    again: Any = [*response.output, {"role": "user", "content": "on"}]
    echoed = await client.responses.create(model=MODEL, input=again)
    kept = await client.responses.create(
        model=MODEL, input="on", previous_response_id=response.id, include=[]
    )
    assert echoed.output_text == kept.output_text == "on"
    items = await client.responses.input_items.list(kept.id, order="asc")
    assert [item.type for item in items.data] == ["message", "reasoning", "message", "message"]


async def test_events_have_the_same_numbers_however_they_were_cut(front: RunningGateway) -> None:
    """Whole sentences at a time, or single bytes."""
    deltas: list[list[Any]] = []
    for tokens_per_frame in (1, 7, 500):
        front.worker.tokens_per_frame = tokens_per_frame
        async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
            body = {"model": MODEL, "input": TEXT, "stream": True}
            answer = await http.post("/v1/responses", json=body)
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: ")
        ]
        deltas.append(
            [
                (event["type"], event["sequence_number"])
                for event in events
                if not event["type"].endswith(".delta")
            ]
        )
    assert deltas[0] == deltas[1] == deltas[2]


async def test_a_stream_goes_on_behind_any_of_its_tokens(front: RunningGateway) -> None:
    key = {"Idempotency-Key": "k", "Accept": "text/event-stream"}
    body = ASKED | {"stream": True}
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        whole = _deltas((await http.post("/v1/chat/completions", json=body, headers=key)).text)
        for number, (event_id, _, _) in enumerate(whole):
            if not event_id:
                continue
            headers = key | {"Last-Event-ID": event_id}
            rest = await http.post("/v1/chat/completions", json=body, headers=headers)
            had = whole[: number + 1]
            events = [*had, *_deltas(rest.text)]
            assert "".join(thoughts for _, thoughts, _ in events) == THOUGHTS, event_id
            assert "".join(answer for _, _, answer in events) == ANSWER, event_id


def _deltas(text: str) -> list[tuple[str, str, str]]:
    """Return id, thoughts and answer of each event; the last of a group has the id."""
    deltas = []
    for event in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if lines.get("data", "[DONE]") != "[DONE]":
            choices = json.loads(lines["data"])["choices"]
            delta = choices[0]["delta"] if choices else {}
            deltas.append(
                (lines.get("id", ""), delta.get("reasoning", ""), delta.get("content", ""))
            )
    return deltas


@pytest.mark.parametrize("wanted", [True, False])
async def test_over_a_socket(front: RunningGateway, wanted: bool) -> None:
    async with connect(front.url.replace("http", "ws") + "/v1/ws") as socket:
        await socket.send(
            json.dumps({"type": "generate", "id": "a", "include_reasoning": wanted} | ASKED)
        )
        texts: dict[str, str] = {"reasoning": "", "delta": ""}
        num_tokens = 0
        while (message := json.loads(await socket.recv()))["type"] != "done":
            if message["type"] in texts:
                assert message["index"] == num_tokens
                texts[message["type"]] += message["text"]
                num_tokens += message["num_tokens"]
    assert texts == {"reasoning": THOUGHTS if wanted else "", "delta": ANSWER}
    assert num_tokens == len(TEXT.encode())
    assert message["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_REASONING


async def test_what_a_request_says_of_thinking(
    client: openai.AsyncOpenAI, front: RunningGateway
) -> None:
    await client.chat.completions.create(
        **ASKED,
        reasoning_effort="low",
        extra_body={"thinking_token_budget": 9, "chat_template_kwargs": {"a": [1]}},
    )
    assert front.worker.jobs[-1].sampling.max_reasoning_tokens == 9
    for field, value in (("thinking_token_budget", -1), ("chat_template_kwargs", [1])):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASKED, extra_body={field: value})
        assert caught.value.param == field


async def test_a_session_keeps_no_thoughts(client: openai.AsyncOpenAI, http: Any) -> None:
    extra = {"session_id": "s"}
    await client.chat.completions.create(**ASKED, extra_body=extra)
    session = (await http.get("/v1/sessions/s")).json()
    assert THOUGHTS not in json.dumps(session["messages"][1:], ensure_ascii=False)
    assert session["messages"][-1]["content"] == ANSWER
