"""The Responses API of a whole system, with OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from tests.support.system import System

pytestmark = pytest.mark.e2e

QUESTION = "What is TTFT?"
_TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Verdict(pydantic.BaseModel):
    sure: bool


@pytest.fixture
async def client(system: System) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none") as made:
        yield made


async def test_an_answer_is_streamed_and_continued(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(
        model="demo",
        input=QUESTION,
        temperature=0,
        max_output_tokens=48,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    ) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        first = await stream.get_final_response()
    assert text == first.output_text != ""
    (message,) = first.output
    assert message.type == "message"
    (content,) = message.content
    assert content.type == "output_text"
    assert content.logprobs
    assert all(len(one.top_logprobs) == 2 for one in content.logprobs)
    assert b"".join(bytes(one.bytes) for one in content.logprobs).decode().strip() == text.strip()

    again = await client.responses.create(
        model="demo",
        input="Again?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=8,
    )
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens > first.usage.total_tokens
    items = await client.responses.input_items.list(again.id, order="asc")
    assert [item.to_dict()["role"] for item in items.data] == ["user", "assistant", "user"]


async def test_a_tool_is_called_and_its_output_taken(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(
        model="demo",
        input=QUESTION,
        tools=[_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=200,
    )
    call = first.output[-1]
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"word"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a time"}
    second = await client.responses.create(
        model="demo", input=[output], previous_response_id=first.id, max_output_tokens=8
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.output_tokens


async def test_the_input_of_a_custom_tool_is_held_to_its_grammar(
    client: openai.AsyncOpenAI,
) -> None:
    grammar = 'start: line~1..3\nline: /[ab"]/ " " /[0-9]{1,3}/ LF\n%import common.LF\n'
    tool: Any = {"type": "custom", "name": "note", "description": "Notes."}
    tool["format"] = {"type": "grammar", "syntax": "lark", "definition": grammar}
    choices: list[Any] = [{"type": "custom", "name": "note"}, "required"]
    for tools, choice in zip([[tool, _TOOL], [tool]], choices, strict=True):
        response = await client.responses.create(
            model="demo",
            input=QUESTION,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=200,
        )
        call = response.output[-1]
        assert call.type == "custom_tool_call"
        assert re.fullmatch(r'([ab"] [0-9]{1,3}\n){1,3}', call.input)


async def test_an_answer_is_held_to_a_schema(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.parse(
        model="demo", input=QUESTION, text_format=Verdict, temperature=0, max_output_tokens=64
    )
    assert response.output_parsed is not None
