"""Tool calls of checkpoints whose tags are special tokens, read with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pytest

from millrace.registry.tool_formats.conversation import WITH_SHORT_IDS
from millrace.schemas.tools import ToolFormat
from tests.e2e.api.conftest import TOOL_FORMATS
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts seven engines; the gateway's tests read the calls of each format"
    ),
]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "note": {"type": "string", "maxLength": 4}},
    "required": ["on", "note"],
    "additionalProperties": False,
}
FUNCTION = {"name": "light", "parameters": PARAMETERS}
ASKED: Any = [{"role": "user", "content": "Light!"}]


@pytest.fixture
async def client(small: System) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{small.http}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
async def test_a_call_and_its_result(client: openai.AsyncOpenAI, tool_format: ToolFormat) -> None:
    options: dict[str, Any] = {
        "model": tool_format.value,
        "tools": [{"type": "function", "function": FUNCTION}],
        "temperature": 0,
        "max_tokens": 300,
    }
    forced = options | {"tool_choice": "required", "parallel_tool_calls": False}
    whole = await client.chat.completions.create(**forced, messages=ASKED)
    message: Any = whole.choices[0].message
    call: Any
    [call] = message.tool_calls or []
    assert (message.content or "", whole.choices[0].finish_reason) == ("", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert tool_format not in WITH_SHORT_IDS or len(call.id) == 9

    name, arguments, content = "", "", ""
    async for chunk in await client.chat.completions.create(**forced, messages=ASKED, stream=True):
        content += chunk.choices[0].delta.content or ""
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments, content) == ("light", call.function.arguments, "")

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = await client.chat.completions.create(
        **(options | {"max_tokens": 4}), messages=[*ASKED, message.to_dict(), result]
    )
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
async def test_an_item_of_a_response(client: openai.AsyncOpenAI, tool_format: ToolFormat) -> None:
    tool: Any = {"type": "function", "strict": False, **FUNCTION}
    first = await client.responses.create(
        model=tool_format.value,
        input="Light!",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=300,
    )
    call: Any
    [call] = first.output
    assert (call.type, first.output_text) == ("function_call", "")
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = await client.responses.create(
        model=tool_format.value,
        input=[output],
        tools=[tool],
        previous_response_id=first.id,
        max_output_tokens=4,
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
