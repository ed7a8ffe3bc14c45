"""Custom tools, ``allowed_tools`` and tools of a provider's server, at each endpoint."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from websockets.asyncio.client import connect

from millrace.registry.requests.offered.chat_tools import given_tools
from millrace.registry.requests.offered.offered_tools import (
    asked_choice,
    offered_tools,
    own_tools,
)
from millrace.registry.tool_formats.freeform import arguments_of_input
from millrace.schemas.notices import NOTICE_NAME
from millrace.schemas.sampling import Grammar
from millrace.schemas.tools import ToolMode
from tests.registry.tool_formats.test_freeform_tools import APPLY_PATCH, PATCH
from tests.support.running_gateway import RunningGateway

CALL = f'<tool_call>\n{{"name": "edit", "arguments": {arguments_of_input(PATCH)}}}\n</tool_call>'
FORMAT = {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}}
EDIT: Any = {
    "type": "custom",
    "custom": {"name": "edit", "description": "Edits files.", "format": FORMAT},
}
SEARCH: Any = {"type": "web_search", "search_context_size": "low"}


def function(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **fields}


def grammar_of(front: RunningGateway) -> Grammar | None:
    return front.worker.jobs[-1].sampling.grammar


def told(front: RunningGateway) -> list[str]:
    return [tool.name for tool in front.worker.jobs[-1].tools]


async def test_a_custom_tool_is_called_with_text(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    answer = await client.chat.completions.create(**asked(CALL, tools=[EDIT, function("look")]))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or [None]
    assert call is not None
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("edit", PATCH)
    edit, _ = front.worker.jobs[-1].tools
    assert edit.parameters is not None
    assert list(edit.parameters["properties"]) == ["input"]
    assert APPLY_PATCH in edit.description
    grammar = grammar_of(front)
    assert grammar is not None
    assert "Begin Patch" in grammar.text

    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages: Any = [{"role": "user", "content": "x"}, choice.message.to_dict(), result]
    await client.chat.completions.create(model="echo", messages=messages, tools=[EDIT])


async def test_the_text_is_streamed(client: openai.AsyncOpenAI) -> None:
    deltas: list[Any] = []
    async for chunk in await client.chat.completions.create(
        **asked(CALL, tools=[EDIT]), stream=True
    ):
        deltas += [one.to_dict() for one in chunk.choices[0].delta.tool_calls or ()]
    first, *more = deltas
    assert first | {"id": ""} == {
        "index": 0,
        "id": "",
        "type": "custom",
        "custom": {"name": "edit", "input": ""},
    }
    assert len(more) > 10
    assert "".join(delta["custom"]["input"] for delta in more) == PATCH


async def test_a_grammar_that_is_not_kept_is_told(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    nested = 'start: "(" start ")" | "x"'
    tool = {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar"}}}
    tool["custom"]["format"]["grammar"] = {"syntax": "lark", "definition": nested}  # type: ignore[index]
    answer = await http.post("/v1/chat/completions", json=asked("hi", tools=[tool]))
    (notice,) = answer.json()[NOTICE_NAME]
    assert notice == {
        "code": "grammar_not_kept",
        "param": "tools[0].custom.format.grammar.definition",
        "detail": "edit: the rule start refers to itself in its middle",
    }
    assert answer.headers[NOTICE_NAME].startswith("grammar_not_kept;param=")
    assert grammar_of(front) is None
    assert nested in front.worker.jobs[-1].tools[0].description

    tool["custom"]["format"]["grammar"]["definition"] = "start: absent"  # type: ignore[index]
    refused = await http.post("/v1/chat/completions", json=asked("hi", tools=[tool]))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, notice["param"])
    assert "line 1: there is no rule absent" in error["message"]


async def test_other_tools_of_which_there_is_no_grammar(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    """The tools are too large for one grammar, so the request is served without one."""
    tools = [
        {"type": "custom", "custom": {"name": f"edit_{i}", "format": {"type": "grammar"}}}
        for i in range(8)
    ]
    for tool in tools:
        grammar = {"syntax": "regex", "definition": "a" * 9_000}
        tool["custom"]["format"]["grammar"] = grammar  # type: ignore[index]
    answer = await http.post("/v1/chat/completions", json=asked("hi", tools=tools))
    (notice,) = answer.json()[NOTICE_NAME]
    assert (notice["code"], notice["param"]) == ("grammar_not_kept", "tools")
    assert answer.headers[NOTICE_NAME].startswith("grammar_not_kept;")
    assert grammar_of(front) is None
    body = asked("hi", tools=tools, tool_choice="required")
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_in_chat(
    front: RunningGateway, client: openai.AsyncOpenAI, mode: Any
) -> None:
    tools = [function("look"), function("walk"), EDIT, SEARCH]
    some = {
        "mode": mode,
        "tools": [function("walk"), {"type": "custom", "custom": {"name": "edit"}}],
    }
    choice: Any = {"type": "allowed_tools", "allowed_tools": some}
    answer = await client.chat.completions.create(**asked(CALL, tools=tools, tool_choice=choice))
    assert answer.choices[0].finish_reason == "tool_calls"
    assert told(front) == ["walk", "edit"]
    grammar = grammar_of(front)
    assert grammar is not None
    assert ("walk" in grammar.text, "look" in grammar.text) == (True, False)
    assert ("TEXT" in grammar.text) == (mode == "auto")


async def test_allowed_tools_in_responses(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    tools: Any = [
        {"type": "function", "name": "look", "parameters": {}, "strict": False},
        {"type": "function", "name": "walk", "parameters": {}, "strict": False},
        {"type": "image_generation"},
    ]
    some: Any = {"type": "allowed_tools", "mode": "required"}
    some["tools"] = [{"type": "function", "name": "look"}, {"type": "image_generation"}]
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    answer = await client.responses.create(
        model="echo", input=call, tools=tools, tool_choice=some, store=False
    )
    assert answer.output[0].type == "function_call"
    assert answer.to_dict()["tool_choice"] == some
    assert told(front) == ["look"]


def test_tools_of_the_gateway_may_be_allowed() -> None:
    given = [*given_tools([msgspec.Raw(json.dumps(function("f")).encode())]), *own_tools(["clock"])]
    some = {"mode": "required", "tools": [function("clock")]}
    choice = asked_choice({"type": "allowed_tools", "allowed_tools": some})
    offered = offered_tools(given, choice)
    assert (offered.tools, offered.own) == ((), ("clock",))
    assert offered.choice.mode is ToolMode.REQUIRED
    named = offered_tools(given, asked_choice(function("clock")))
    assert (named.choice.name, len(named.tools), named.own) == ("clock", 1, ("clock",))
    flat = offered_tools(given, asked_choice({"type": "function", "name": "f"}))
    assert flat.choice.name == "f"


async def test_allowed_tools_over_a_socket(front: RunningGateway) -> None:
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("walk")]}}
    body = asked(CALL, tools=[function("walk"), EDIT, SEARCH], tool_choice=some)
    async with connect(front.ws_url, subprotocols=["millrace.v1"]) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps({"type": "generate", "id": "a", **body}))
        done = await _done(socket)
        assert done[-1][NOTICE_NAME] == [
            {"code": "tool_left_out", "param": "tools[2]", "detail": "web_search"}
        ]
        assert told(front) == ["walk"]
        await socket.send(json.dumps({"type": "generate", "id": "b", **asked(CALL, tools=[EDIT])}))
        called = [one for one in await _done(socket) if one["type"].startswith("tool_")]
    assert all(one["custom"] for one in called)
    assert "".join(one.get("text", "") for one in called) == PATCH


async def _done(socket: Any) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    while not said or said[-1]["type"] != "done":
        said.append(json.loads(await socket.recv()))
        assert said[-1]["type"] != "error", said[-1]
    return said


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [function("f")]}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"type": "allowed_tools", "mode": "none", "tools": [function("f")]}, "tool_choice.mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("g")]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [function("f"), function("g")]},
            "tool_choice.tools[1]",
        ),
        ({"type": "custom", "custom": {"name": "f"}}, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "web_search_preview"}, "tool_choice"),
        ("any", "tool_choice"),
        (["auto"], "tool_choice"),
    ],
)
async def test_choices_that_are_none(http: httpx.AsyncClient, choice: Any, param: str) -> None:
    body = asked("x", tools=[function("f")], tool_choice=choice)
    refused = await http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


_OF_PROVIDERS = ["web_search", "web_search_preview_2025_03_11", "code_interpreter", "mcp"]


@pytest.mark.parametrize("kind", _OF_PROVIDERS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_s_tool_is_left_out(
    front: RunningGateway, http: httpx.AsyncClient, kind: str, path: str, stream: bool
) -> None:
    own = function("look") if "chat" in path else {"type": "function", "name": "look"}
    tools = [own, {"type": kind, "server_label": "s", "container": {"type": "auto"}}]
    for choice in ("auto", "none", "required"):
        fields = {"tools": tools, "tool_choice": choice, "stream": stream}
        body = (
            asked("hi", **fields) if "chat" in path else {"model": "echo", "input": "hi", **fields}
        )
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        wanted = f'tool_left_out;param="tools[1]";detail="{kind}"'
        assert answer.headers[NOTICE_NAME] == wanted
        assert f'"{NOTICE_NAME}":[{{"code":"tool_left_out"' in answer.text
        assert told(front) == ([] if choice == "none" else ["look"])


@pytest.mark.parametrize("kind", _OF_PROVIDERS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_provider_s_tool_cannot_be_demanded(
    http: httpx.AsyncClient, kind: str, path: str
) -> None:
    own = function("look") if "chat" in path else {"type": "function", "name": "look"}
    some = {"mode": "required", "tools": [{"type": kind}]}
    allowed = {"allowed_tools": some} if "chat" in path else some
    for tools, choice in (
        ([{"type": kind}], "required"),
        ([own, {"type": kind}], {"type": kind}),
        ([own, {"type": kind}], {"type": "allowed_tools", **allowed}),
    ):
        fields = {"tools": tools, "tool_choice": choice}
        body = (
            asked("hi", **fields) if "chat" in path else {"model": "echo", "input": "hi", **fields}
        )
        refused = await http.post(path, json=body)
        error = refused.json()["error"]
        where = f"tools[{len(tools) - 1}]"
        assert (refused.status_code, error["param"]) == (400, where)
        assert error["message"].startswith(f"{where}: {kind} is run by its provider's own server")


async def test_tools_of_anthropic_s(front: RunningGateway) -> None:
    own: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {
            "type": "text_editor_20250728",
            "name": "str_replace_based_edit_tool",
            "max_characters": 9,
        },
        {"type": "memory_20250818", "name": "memory"},
    ]
    others: Any = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": 9,
            "display_height_px": 9,
        },
    ]
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    fields: Any = {
        "model": "echo",
        "max_tokens": 90,
        "messages": [{"role": "user", "content": call}],
    }
    async with anthropic.AsyncAnthropic(
        base_url=front.url, api_key="none", max_retries=0, timeout=10
    ) as sdk:
        raw = await sdk.messages.with_raw_response.create(**fields, tools=[*others, *own])
        (block,) = (await raw.parse()).content
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("bash", {"command": "ls"})
        assert raw.headers[NOTICE_NAME].count("tool_left_out") == 4
        assert 'param="tools[3]";detail="computer_20250124"' in raw.headers[NOTICE_NAME]
        bash, editor, memory = front.worker.jobs[-1].tools
        assert bash.parameters is not None
        assert "command" in bash.parameters["properties"]
        assert (editor.name, memory.name) == ("str_replace_based_edit_tool", "memory")
        demanded: Any = [{"type": "any"}, {"type": "tool", "name": "web_fetch"}]
        for choice in demanded:
            tools: Any = others[1:2]
            with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]: web_fetch_20250910"):
                await sdk.messages.create(**fields, tools=tools, tool_choice=choice)
        unknown: Any = [{"type": "bush_20250124", "name": "x"}]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: 'bush_20250124'"):
            await sdk.messages.create(**fields, tools=unknown)


async def test_counts_of_tokens(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
    counted = await http.post("/v1/tokenize", json=body | {"tools": [EDIT, SEARCH]})
    assert counted.json()["count"] == 2
    asked_of: dict[str, Any] = {
        "/v1/tokenize": (body, SEARCH),
        "/v1/responses/input_tokens": ({"model": "echo", "input": "hi"}, SEARCH),
        "/v1/messages/count_tokens": (body, {"type": "web_search_20250305", "name": "web_search"}),
    }
    for path, (said, tool) in asked_of.items():
        counted = await http.post(path, json=said | {"tools": [tool]})
        assert counted.headers[NOTICE_NAME].startswith('tool_left_out;param="tools[0]"')
        assert counted.json()[NOTICE_NAME][0]["detail"] == tool["type"]
        assert NOTICE_NAME not in (await http.post(path, json=said)).headers
    refused = await http.post(
        "/v1/tokenize", json=body | {"tools": [function("f"), {"type": "fn"}]}
    )
    assert refused.json()["error"]["param"] == "tools[1].type"


@pytest.mark.parametrize(
    ("path", "tool", "field"),
    [
        ("chat/completions", function("a b"), "tools[1].function.name"),
        (
            "chat/completions",
            {"type": "custom", "custom": {"name": "a b"}},
            "tools[1].custom.name",
        ),
        ("tokenize", function("a b"), "tools[1].function.name"),
        ("responses", {"type": "function", "name": "a b"}, "tools[1].name"),
        ("responses", {"type": "custom", "name": "a b"}, "tools[1].name"),
        ("messages", {"name": "a b", "input_schema": {"type": "object"}}, "tools[1].name"),
    ],
)
async def test_a_name_that_no_tool_may_have_is_found_by_its_place(
    http: httpx.AsyncClient, path: str, tool: dict[str, Any], field: str
) -> None:
    right = json.loads(json.dumps(tool).replace("a b", "f"))
    fields = {"input": "hi"} if path == "responses" else {"messages": asked("hi")["messages"]}
    fields |= {"model": "echo", "tools": [right, tool]}
    fields |= {"max_tokens": 9} if path == "messages" else {}
    refused = await http.post(f"/v1/{path}", json=fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, field)
    assert error["message"] == f"{field} must be 1 to 64 letters, digits, _ or -, got 'a b'"
