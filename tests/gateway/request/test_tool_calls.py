"""Tool calls over HTTP, run by the client and by the gateway.

The model repeats the last message, so a test decides what it says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import yaml

from millrace.gateway.tools.catalogue import load_tools
from millrace.schemas.config import GatewayConfig
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.tool_server import Seen, ToolServer, Write, reply, tool_server

TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def says(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def asks(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
async def server() -> AsyncIterator[ToolServer]:
    async with tool_server() as running:
        yield running


@pytest.fixture
async def front(tmp_path: Path, server: ToolServer) -> AsyncIterator[RunningGateway]:
    file = tmp_path / "tools.yaml"
    entry = {"url": server.url("/clock"), "allow_private": True, "parameters": {"type": "object"}}
    file.write_text(yaml.safe_dump({"tools": {"clock": entry}}))
    async with running_gateway(tools=load_tools(str(file), {})) as running:
        yield running


async def test_calls_of_an_answer(client: openai.AsyncOpenAI) -> None:
    text = "\n".join(["Hm.", says("f", '{"a": "Łódź"}'), says("f", "{}")])
    answer = await client.chat.completions.create(model="echo", messages=asks(text), tools=[TOOL])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Hm.")
    calls: Sequence[Any] = choice.message.tool_calls or ()
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("f", '{"a": "Łódź"}'),
        ("f", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("max_tokens", [4, 11, 12, 20])
async def test_a_forced_call_that_was_cut_off_is_no_content(
    client: openai.AsyncOpenAI, choice: Any, max_tokens: int
) -> None:
    options: dict[str, Any] = {
        "model": "echo",
        "messages": asks(says("f", "{}")),
        "tools": [TOOL],
        "max_tokens": max_tokens,
    }
    cut = await client.chat.completions.create(**options, tool_choice=choice)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "length")
    stream = await client.chat.completions.create(**options, tool_choice=choice, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert not any(delta.content or delta.tool_calls for delta in deltas)


class Cut(NamedTuple):
    """Text of a model before a stop string, and the arguments of its calls so far."""

    text: str
    arguments: list[str]
    content: str = ""


CUTS = [
    Cut(says("f", '{"a": "x"}').partition("}")[0], ['{"a": "x"']),
    Cut(says("f", "{}").partition("}")[0], ["{"]),
    Cut(
        "Hm. " + says("f", "{}") + says("f", '{"a": 1}').partition("}")[0],
        ["{}", '{"a": 1'],
        "Hm.",
    ),
    Cut(f'{says("f", "{}")}\n<tool_call>{{"name": "f", "ar', ["{}"]),
    Cut('Hm. <tool_call>{"name": "f"', [], "Hm."),
]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_stop_string_within_a_call(
    client: openai.AsyncOpenAI, front: RunningGateway, cut: Cut, choice: Any
) -> None:
    front.worker.script = lambda _job: cut.text
    front.worker.stop_reason = "}"
    options: dict[str, Any] = {
        "model": "echo",
        "messages": asks("Call."),
        "tools": [TOOL],
        "tool_choice": choice,
        "stop": ["}"],
    }
    answer = await client.chat.completions.create(**options)
    (whole,) = answer.choices
    assert whole.finish_reason == "stop"
    assert whole.to_dict()["stop_reason"] == "}"
    assert (whole.message.content or "") == cut.content
    calls: Sequence[Any] = whole.message.tool_calls or ()
    assert [call.function.arguments for call in calls] == cut.arguments
    arguments, ends = list[str](), list[Any]()
    async for chunk in await client.chat.completions.create(**options, stream=True):
        (streamed,) = chunk.choices
        for delta in streamed.delta.tool_calls or ():
            assert delta.function is not None
            arguments += [""] if delta.id is not None else []
            arguments[delta.index] += delta.function.arguments or ""
        if streamed.finish_reason is not None:
            ends.append((streamed.finish_reason, streamed.to_dict()["stop_reason"]))
    assert (arguments, ends) == (cut.arguments, [("stop", "}")])


async def test_a_stop_string_within_the_input_of_a_custom_tool(
    client: openai.AsyncOpenAI, front: RunningGateway
) -> None:
    """An escape that the model did not finish is no part of the input."""
    whole_call = says("note", '{"input": "one\\ntwo"}')
    front.worker.script = lambda _job: says("f", "{}") + whole_call.partition("ntwo")[0]
    front.worker.stop_reason = "ntwo"
    options: dict[str, Any] = {
        "model": "echo",
        "messages": asks("Call."),
        "tools": [TOOL, {"type": "custom", "custom": {"name": "note"}}],
        "stop": ["ntwo"],
    }
    answer = await client.chat.completions.create(**options)
    (whole,) = answer.choices
    assert (whole.finish_reason, whole.to_dict()["stop_reason"]) == ("stop", "ntwo")
    calls: Sequence[Any] = whole.message.tool_calls or ()
    assert len(calls) == 2
    call = calls[1]
    assert call.to_dict() == {
        "id": call.id,
        "type": "custom",
        "custom": {"name": "note", "input": "one"},
    }
    text, ends = "", list[Any]()
    async for chunk in await client.chat.completions.create(**options, stream=True):
        (streamed,) = chunk.choices
        for delta in streamed.delta.tool_calls or ():
            text += delta.to_dict().get("custom", {}).get("input", "")
        if streamed.finish_reason is not None:
            ends.append((streamed.finish_reason, streamed.to_dict()["stop_reason"]))
    assert (text, ends) == ("one", [("stop", "ntwo")])


async def test_a_stop_string_behind_a_whole_call(
    client: openai.AsyncOpenAI, front: RunningGateway
) -> None:
    front.worker.script = lambda _job: says("f", "{}").partition("</tool_call>")[0]
    front.worker.stop_reason = "</tool_call>"
    answer = await client.chat.completions.create(
        model="echo", messages=asks("Call."), tools=[TOOL], stop="</tool_call>"
    )
    (choice,) = answer.choices
    calls: Sequence[Any] = choice.message.tool_calls or ()
    assert (choice.finish_reason, calls[0].function.arguments) == ("tool_calls", "{}")


async def test_the_gateway_runs_no_tool_of_a_cut_call(
    client: openai.AsyncOpenAI, front: RunningGateway, server: ToolServer
) -> None:
    calls = says("clock", "{}") + says("clock", '{"a": 1}')
    for text in (calls.rpartition("}}")[0], says("clock", "{}").partition("}")[0]):
        front.worker.script = lambda _job, text=text: text  # type: ignore[misc]
        front.worker.stop_reason = "}"
        answer = await client.chat.completions.create(
            model="echo",
            messages=asks("Call."),
            stop="}",
            extra_body={"server_tools": ["clock"]},
        )
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert not server.seen


async def test_streamed_calls(client: openai.AsyncOpenAI) -> None:
    text = " ".join(["Hm.", says("f", '{"a": 1}'), says("f", '{"b": 2}'), "Well."])
    content, calls, reasons = "", list[dict[str, str]](), list[str]()
    async for chunk in await client.chat.completions.create(
        model="echo", messages=asks(text), tools=[TOOL], stream=True
    ):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append({"id": delta.id, "name": delta.function.name or "", "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments or ""
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    assert content == "Hm.Well."
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("f", '{"a": 1}'),
        ("f", '{"b": 2}'),
    ]
    assert reasons == ["tool_calls"]


async def test_without_tools_a_call_is_text(client: openai.AsyncOpenAI) -> None:
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        given: Any = more
        answer = await client.chat.completions.create(
            model="echo", messages=asks(says("f", "{}")), **given
        )
        assert answer.choices[0].message.content == says("f", "{}")
        assert answer.choices[0].finish_reason == "stop"


async def test_the_gateway_runs_its_own_tool(
    client: openai.AsyncOpenAI, server: ToolServer
) -> None:
    server.answers["/clock"] = reply("It is noon.")
    text = "Let me see. " + says("clock", '{"zone": "CET"}')
    answer = await client.chat.completions.create(
        model="echo", messages=asks(text), extra_body={"server_tools": ["clock"]}
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    assert choice.message.content.startswith("Let me see.")
    assert choice.message.content.endswith("It is noon.")
    assert not choice.message.tool_calls
    (seen,) = server.seen
    assert json.loads(seen.body) == {"zone": "CET"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(text) + len("It is noon.")


async def test_rounds_of_several_choices_are_parts_of_one_request(
    client: openai.AsyncOpenAI, server: ToolServer, front: RunningGateway
) -> None:
    """Choices share the prompt of the first round; each pays for that of its second."""
    server.answers["/clock"] = reply("It is noon.")
    answer = await client.chat.completions.create(
        model="echo",
        messages=asks(says("clock", "{}")),
        n=2,
        extra_body={"server_tools": ["clock"]},
    )
    parts = [job.part for job in front.worker.jobs if job.part is not None]
    assert sorted((part.choice, part.round, part.shares_prompt) for part in parts) == [
        (0, 0, False),
        (0, 1, False),
        (1, 0, True),
        (1, 1, False),
    ]
    assert {part.request_id for part in parts} == {answer.id}
    sizes = [
        len(job.prompt_token_ids or ())
        for job in front.worker.jobs
        if job.part is not None and not job.part.shares_prompt
    ]
    assert len(sizes) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(sizes)


async def test_all_rounds_have_the_notices_of_the_request(
    client: openai.AsyncOpenAI, front: RunningGateway
) -> None:
    properties = {f"p{i}": {"type": "array", "uniqueItems": True} for i in range(20)}
    tool: Any = {"type": "function", "function": {"name": "f"}}
    tool["function"]["parameters"] = {"type": "object", "properties": properties}
    texts = [says("clock", "{}"), "It is late."]
    front.worker.script = lambda _job: texts.pop(0)
    await client.chat.completions.create(
        model="echo",
        messages=asks("Late?"),
        tools=[tool],
        parallel_tool_calls=False,
        extra_body={"server_tools": ["clock"]},
    )
    first, second = (job.notices for job in front.worker.jobs)
    assert len(first) == 16
    assert second == first


async def test_rounds_are_bounded(client: openai.AsyncOpenAI, server: ToolServer) -> None:
    again = says("clock", "{}")
    server.answers["/clock"] = reply(again)
    answer = await client.chat.completions.create(
        model="echo", messages=asks(again), extra_body={"server_tools": ["clock"]}
    )
    assert 1 <= len(server.seen) <= GatewayConfig().max_tool_rounds
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


async def test_a_tool_that_fails_is_told_to_the_model(
    client: openai.AsyncOpenAI, server: ToolServer
) -> None:
    async def break_off(_seen: Seen, _write: Write) -> None:
        raise ConnectionResetError

    server.answers["/clock"] = break_off
    answer = await client.chat.completions.create(
        model="echo",
        messages=asks(says("clock", "{}")),
        extra_body={"server_tools": ["clock"]},
    )
    assert answer.choices[0].message.content == "The tool cannot be reached."


async def test_the_client_s_calls_beside_the_gateway_s(
    client: openai.AsyncOpenAI, server: ToolServer
) -> None:
    server.answers["/clock"] = reply("noon")
    answer = await client.chat.completions.create(
        model="echo",
        messages=asks(f"{says('clock', '{}')}\n{says('f', '{}')}"),
        tools=[TOOL],
        extra_body={"server_tools": ["clock"]},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["f"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"server_tools": ["hammer"]}, "server_tools"),
        (
            {"server_tools": ["clock"], "tools": [TOOL | {"function": {"name": "clock"}}]},
            "server_tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
    ],
)
async def test_what_cannot_be_honoured(
    front: RunningGateway, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "echo", "messages": asks("hi")} | fields
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_list_of_tools(front: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        listed = (await http.get("/v1/tools")).json()["data"]
    assert [tool["name"] for tool in listed] == ["clock"]
