"""Conversations as SDKs keep them: what an answer became there is sent back whole.

The model says what it was told last, so that a test can have it say anything.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.gateway.request.test_tool_calls import asks, says
from tests.support.running_gateway import MODEL

_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_CALL = says("weather", '{"city": "Bath"}')
_AND_NOW: Any = {"role": "user", "content": "And now?"}


class Place(pydantic.BaseModel):
    city: str


async def goes_on(client: openai.AsyncOpenAI, *echoed: Any) -> None:
    messages = [*asks("hi"), *echoed, _AND_NOW]
    answer = await client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == "And now?"


def results(message: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": "Rain"}
        for call in message["tool_calls"]
    ]


async def test_a_parsed_answer_goes_back(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=asks('{"city": "Bath"}'), response_format=Place
    )
    message = answer.choices[0].message
    assert message.parsed == Place(city="Bath")
    await goes_on(client, message.model_dump())
    await goes_on(client, message)


async def test_parsed_calls_go_back(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=asks(_CALL), tools=[_WEATHER]
    )
    message = answer.choices[0].message.model_dump()
    assert message["tool_calls"][0]["function"]["parsed_arguments"] == {"city": "Bath"}
    await goes_on(client, message, *results(message))


async def test_what_a_stream_gathered_goes_back(client: openai.AsyncOpenAI) -> None:
    for text in (_CALL, "Rain."):
        async with client.chat.completions.stream(
            model=MODEL, messages=asks(text), tools=[_WEATHER]
        ) as stream:
            gathered = await stream.get_final_completion()
        message = gathered.choices[0].message.model_dump()
        await goes_on(client, message, *(results(message) if message["tool_calls"] else ()))


async def test_deltas_that_were_added_up_go_back(client: openai.AsyncOpenAI) -> None:
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState(input_tools=[_WEATHER])
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=asks(_CALL), tools=[_WEATHER], stream=True
    ):
        state.handle_chunk(chunk)
    message = state.current_completion_snapshot.choices[0].message.model_dump()
    assert message["tool_calls"][0]["index"] == 0
    await goes_on(client, message, *results(message))


async def test_a_message_of_litellm_goes_back(client: openai.AsyncOpenAI) -> None:
    message = {
        "content": None,
        "role": "assistant",
        "tool_calls": [
            {
                "index": 0,
                "function": {"arguments": '{"city": "Bath"}', "name": "weather"},
                "id": "call-1",
                "type": "function",
                "provider_specific_fields": {"thought_signature": "s"},
            }
        ],
        "function_call": None,
        "reasoning_content": "The weather, then.",
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
        "provider_specific_fields": {"refusal": None},
    }
    await goes_on(client, message, *results(message))


async def test_items_of_a_parsed_response_go_back(client: openai.AsyncOpenAI) -> None:
    parsed = await client.responses.parse(
        model=MODEL, input='{"city": "Bath"}', text_format=Place, store=False
    )
    assert parsed.output_parsed == Place(city="Bath")
    tool: Any = {"type": "function", **_WEATHER["function"]}
    async with client.responses.stream(
        model=MODEL, input=_CALL, tools=[tool], store=False
    ) as stream:
        called = await stream.get_final_response()
    (call,) = called.output
    assert call.type == "function_call"
    items: list[Any] = [
        *asks("hi"),
        *(item.model_dump() for item in parsed.output),
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"},
        _AND_NOW,
    ]
    last = await client.responses.create(model=MODEL, input=items, store=False)
    assert last.output_text == "And now?"


async def test_refusals_and_turns_without_text_go_back(client: openai.AsyncOpenAI) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    await goes_on(
        client,
        {"role": "assistant", "content": None, "refusal": "I can't."},
        _AND_NOW,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
        _AND_NOW,
        {"role": "assistant", "content": None, "tool_calls": []},
        _AND_NOW,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": None},
    )
    items: Any = [
        *asks("hi"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": None},
        _AND_NOW,
    ]
    last = await client.responses.create(model=MODEL, input=items, store=False)
    assert last.output_text == "And now?"


async def test_hints_are_taken(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=asks("hi"),
        prompt_cache_key="a",
        prompt_cache_retention="24h",
        reasoning_effort="low",
        safety_identifier="someone",
        store=True,
        verbosity="low",
    )
    assert answer.choices[0].message.content == "hi"
    response = await client.responses.create(
        model=MODEL,
        input="hi",
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a",
        prompt_cache_retention="24h",
        reasoning={"effort": "low", "summary": "auto"},
        safety_identifier="someone",
        store=False,
        text={"verbosity": "low"},
    )
    assert response.output_text == "hi"


async def test_what_a_user_says_has_known_fields_only(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi", "parsed": None}]}
    answer = await http.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].parsed"
