"""Calls in each format that models write, as clients get them: whole, streamed and as items.

The model says what it was told last, so that a test can have it say anything.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from millrace.gateway.models import LoadedModels
from millrace.gateway.tools.catalogue import load_tools
from millrace.registry.tool_formats.conversation import WITH_SHORT_IDS
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tools import ToolCall, ToolFormat
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway
from tests.support.tool_server import reply, tool_server

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("first-1", "second")
]
MADE = [
    ("first-1", {"text": 'Łódź, "<it>" [is](so)\n', "number": 7}),
    ("second", {}),
    ("first-1", {"number": -1}),
]
CALLS = [ToolCall(id="", name=name, arguments=json.dumps(value)) for name, value in MADE]
# The whole answer is calls in these.
WITHOUT_CONTENT = (ToolFormat.LLAMA3, ToolFormat.PYTHONIC)


def models_of(tool_format: ToolFormat) -> LoadedModels:
    model = ByteModel()
    model.tool_format = tool_format
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    return LoadedModels({MODEL: card}, lambda _name: model)


@pytest.fixture(params=list(ToolFormat))
def tool_format(request: pytest.FixtureRequest) -> ToolFormat:
    chosen: ToolFormat = request.param
    return chosen


@pytest.fixture
async def front(tool_format: ToolFormat) -> AsyncIterator[RunningGateway]:
    async with running_gateway(models=models_of(tool_format)) as running:
        yield running


@pytest.fixture
def content(tool_format: ToolFormat) -> str:
    return "" if tool_format in WITHOUT_CONTENT else "I look."


@pytest.fixture
def asked(tool_format: ToolFormat, content: str) -> dict[str, Any]:
    text = calls_as_text(CALLS, tool_format)
    messages = [{"role": "user", "content": f"{content}\n{text}" if content else text}]
    return {"model": MODEL, "messages": messages, "tools": TOOLS}


async def test_a_whole_answer(
    client: openai.AsyncOpenAI, tool_format: ToolFormat, content: str, asked: dict[str, Any]
) -> None:
    answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", content)
    calls: list[Any] = choice.message.tool_calls or []
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == MADE
    ids = {call.id for call in calls}
    assert len(ids) == len(MADE)
    if tool_format in WITH_SHORT_IDS:
        assert all(len(one) == 9 and one.isalnum() for one in ids)


async def test_a_streamed_answer(
    client: openai.AsyncOpenAI, content: str, asked: dict[str, Any]
) -> None:
    told, reason = "", None
    calls: list[list[str]] = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        told += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                calls.append([delta.function.name or "", ""])
            calls[delta.index][1] += delta.function.arguments or ""
    assert (told, reason) == (content, "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == MADE


async def test_items_of_a_response(
    client: openai.AsyncOpenAI, content: str, asked: dict[str, Any]
) -> None:
    tools: Any = [{"type": "function", "strict": False} | tool["function"] for tool in TOOLS]
    options: dict[str, Any] = {
        "model": MODEL,
        "input": asked["messages"][0]["content"],
        "tools": tools,
    }
    whole = await client.responses.create(**options)
    async with client.responses.stream(**options) as stream:
        streamed = await stream.get_final_response()
    responses: list[Any] = [whole, streamed]
    for response in responses:
        assert response.output_text == content
        calls: list[Any] = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == MADE


@pytest.mark.parametrize("max_tokens", [5, 13, 21, 34])
async def test_a_forced_call_that_was_cut_off_is_no_content(
    client: openai.AsyncOpenAI, tool_format: ToolFormat, max_tokens: int
) -> None:
    text = calls_as_text(CALLS, tool_format)
    cut = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        tools=TOOLS,
        tool_choice="required",
        max_tokens=max_tokens,
    )
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) in (
        ("", "length"),
        (None, "length"),
    )


# What a format's calls begin with.
_BEGINS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.LLAMA3: "<|python_tag|>",
    ToolFormat.PYTHONIC: "<|python_start|>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
    ToolFormat.MISTRAL_V11: "[TOOL_CALLS]",
    ToolFormat.QWEN3_CODER: "<tool_call>",
    ToolFormat.DEEPSEEK_V3: "<｜tool▁calls▁begin｜>",
    ToolFormat.DEEPSEEK_V31: "<｜tool▁calls▁begin｜>",
    ToolFormat.GLM45: "<tool_call>",
}


@pytest.mark.parametrize("num_more", [0, 1, 4, 7])
async def test_a_free_call_that_was_cut_off_is_no_content(
    client: openai.AsyncOpenAI, tool_format: ToolFormat, content: str, num_more: int
) -> None:
    """The answer has neither the tag nor the text after it, streamed or not."""
    tag = _BEGINS[tool_format]
    calls = calls_as_text(CALLS, tool_format)
    text = f"{content}\n{tag}{calls.removeprefix(tag)}" if content else tag + calls
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "max_tokens": len(text.partition(tag)[0] + tag) + num_more,
    }
    whole = await client.chat.completions.create(**options)
    (choice,) = whole.choices
    assert (choice.message.content or "", choice.finish_reason) == (content, "length")
    assert not choice.message.tool_calls
    stream = await client.chat.completions.create(**options, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == content
    assert not any(delta.tool_calls for delta in deltas)
    response = await client.responses.create(
        model=MODEL,
        input=text,
        tools=[{"type": "function", "strict": False} | tool["function"] for tool in TOOLS],
        max_output_tokens=options["max_tokens"],
    )
    assert (response.status, response.output_text) == ("incomplete", content)


@pytest.mark.parametrize("tool_format", [ToolFormat.QWEN3_CODER, ToolFormat.GLM45], indirect=True)
async def test_the_gateway_s_tools_say_what_their_arguments_are(
    tool_format: ToolFormat, tmp_path: Path
) -> None:
    async with tool_server() as server:
        parameters = {"properties": {"code": {"type": "string"}, "days": {"type": "integer"}}}
        entry = {"url": server.url("/clock"), "allow_private": True, "parameters": parameters}
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": {"clock": entry}}))
        server.answers["/clock"] = reply("noon")
        catalogue = load_tools(str(tmp_path / "tools.yaml"), {})
        call = ToolCall(id="", name="clock", arguments='{"code": "007", "days": 2}')
        async with (
            running_gateway(models=models_of(tool_format), tools=catalogue) as front,
            httpx.AsyncClient(base_url=front.url, timeout=10) as http,
        ):
            text = calls_as_text([call], tool_format)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": text}],
                "server_tools": ["clock"],
            }
            answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "noon"
        (seen,) = server.seen
        assert json.loads(seen.body) == {"code": "007", "days": 2}
