"""``POST /v1/responses`` with bodies as Codex sends them, and OpenAI's client with custom tools."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from millrace.gateway.responses.normalised import opened, sealed
from millrace.registry.tool_formats.freeform import arguments_of_input
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import NOTICE_NAME
from tests.gateway.responses.fronts import says
from tests.gateway.responses.rendered import asked, events_of
from tests.registry.tool_formats.test_freeform_tools import APPLY_PATCH, PATCH
from tests.support.running_gateway import MODEL, RunningGateway

LARK: Any = {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH}
EDIT: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files. This is a FREEFORM tool.",
    "format": LARK,
}
ORDER: Any = {
    "type": "function",
    "name": "lookup_order",
    "description": "Look up an order",
    "strict": False,
    "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}},
}
RUN: Any = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [
    RUN,
    EDIT,
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text"]},
    {
        "type": "namespace",
        "name": "mcp__demo__",
        "description": "Demo tools",
        "tools": [ORDER, {**EDIT, "name": "note", "format": {"type": "text"}}],
    },
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Search app tools",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
]


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def body(*items: Any, **fields: Any) -> dict[str, Any]:
    """The fields that codex-rs/codex-api writes."""
    permissions = [{"type": "input_text", "text": "<permissions instructions>"}]
    return {
        "model": MODEL,
        "instructions": "You are Codex.",
        "input": [{"type": "message", "role": "developer", "content": permissions}, *items],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
        "store": False,
        "stream": True,
        "access_programs": {"cyber": "standard"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "a", "x-codex-window-id": "b"},
        **fields,
    }


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def prompt_of(front: RunningGateway) -> str:
    return bytes(front.worker.jobs[-1].prompt_token_ids or ()).decode()


async def test_a_turn_of_codex(front: RunningGateway, http: httpx.AsyncClient) -> None:
    says(
        front,
        "I edit." + called("apply_patch", arguments_of_input(PATCH)),
        called("mcp__demo__lookup_order", '{"order_id": "7"}'),
        called("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 9}'),
        called("tool_search", '{"query": "mail"}'),
        called("mcp__mail__send", "{}"),
        "Done.",
    )
    history: list[Any] = [user("Edit it.")]
    message, edit = await _turn(front, http, history)
    assert (message["content"][0]["text"], edit["type"]) == ("I edit.", "custom_tool_call")
    assert (edit["name"], edit["input"], edit["status"]) == ("apply_patch", PATCH, "completed")
    history.append({"type": "custom_tool_call_output", "call_id": edit["call_id"], "output": "ok"})

    (order,) = await _turn(front, http, history)
    assert (order["name"], order["namespace"]) == ("lookup_order", "mcp__demo__")
    history.append({"type": "function_call_output", "call_id": order["call_id"], "output": "{}"})

    (shell,) = await _turn(front, http, history)
    assert shell["type"] == "local_shell_call"
    assert shell["action"]["type"] == "exec"
    assert shell["action"]["command"] == ["ls", "-l"]
    history.append({"type": "function_call_output", "call_id": shell["call_id"], "output": "a.txt"})

    (search,) = await _turn(front, http, history)
    assert (search["type"], search["execution"]) == ("tool_search_call", "client")
    assert search["arguments"] == {"query": "mail"}
    found: Any = {"type": "namespace", "name": "mcp__mail", "description": "Mail"}
    found["tools"] = [{**ORDER, "name": "send", "defer_loading": True}]
    output = {"type": "tool_search_output", "status": "completed", "execution": "client"}
    history.append({**output, "call_id": search["call_id"], "tools": [found]})

    (send,) = await _turn(front, http, history)
    assert (send["name"], send["namespace"]) == ("send", "mcp__mail")
    history.append({"type": "function_call_output", "call_id": send["call_id"], "output": "sent"})
    (done,) = await _turn(front, http, history)
    assert done["content"][0]["text"] == "Done."
    names = [tool.name for tool in front.worker.jobs[-1].tools]
    assert names == [
        *("exec_command", "apply_patch", "mcp__demo__lookup_order", "mcp__demo__note"),
        *("tool_search", "local_shell", "mcp__mail__send"),
    ]
    assert prompt_of(front) == (
        "system:You are Codex.|system:<permissions instructions>|user:Edit it."
        "|assistant:I edit.apply_patch|tool:ok|assistant:mcp__demo__lookup_order|tool:{}"
        "|assistant:local_shell|tool:a.txt|assistant:tool_search|tool:Found: send"
        "|assistant:mcp__mail__send|tool:sent"
    )


async def _turn(front: RunningGateway, http: httpx.AsyncClient, history: list[Any]) -> list[Any]:
    """The items of the next answer, which are added to the history."""
    options = {"reasoning_summary_delivery": "sequential_cutoff"}
    answer = await http.post("/v1/responses", json=body(*history, stream_options=options))
    assert answer.status_code == 200, answer.text
    assert answer.headers[NOTICE_NAME] == (
        'tool_left_out;param="tools[2]";detail="web_search", '
        'tool_left_out;param="tools[5]";detail="image_generation"'
    )
    events = events_of(answer.content)
    assert events[-1]["type"] == "response.completed"
    assert len(events[-1]["response"][NOTICE_NAME]) == 2
    assert events[-1]["response"]["tools"] == TOOLS
    items = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    history += items
    # The grammar of the one tool constrains the answer for any other tools.
    grammar = front.worker.jobs[-1].sampling.grammar
    assert grammar is not None
    assert "Begin Patch" in grammar.text
    return items


async def test_the_client_of_openai_reads_custom_calls(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    says(front, called("apply_patch", arguments_of_input(PATCH)), "Edited.")
    deltas = ""
    async with client.responses.stream(model=MODEL, input="Edit.", tools=[EDIT]) as stream:
        async for event in stream:
            if event.type == "response.custom_tool_call_input.delta":
                deltas += event.delta
            elif event.type == "response.custom_tool_call_input.done":
                assert event.input == PATCH
        first = await stream.get_final_response()
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert (call.input, deltas) == (PATCH, PATCH)
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id}
    result["output"] = [{"type": "input_text", "text": "we"}, {"type": "input_text", "text": "ll"}]
    second = await client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=first.id,
        tools=[EDIT],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    assert second.output_text == "Edited."
    assert prompt_of(front) == "user:Edit.|assistant:apply_patch|tool:well"
    items = await client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items.data] == [
        *("message", "custom_tool_call", "custom_tool_call_output")
    ]


async def test_items_of_other_servers_are_left_out(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    says(front, "Yes.")
    items = [
        user("x"),
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": sealed("Hm.")},
        {"type": "message", "role": "assistant", "content": "No.", "phase": "final_answer"},
        {
            "type": "agent_message",
            "author": "/root",
            "recipient": "/a",
            "content": [{"type": "input_text", "text": "Go on."}],
        },
    ]
    answer = await http.post("/v1/responses", json=body(*items, tools=[], stream=False))
    notices = answer.json()[NOTICE_NAME]
    assert [(one["code"], one["param"], one["detail"]) for one in notices] == [
        ("item_left_out", "input[2]", "web_search_call"),
        ("item_left_out", "input[3]", "compaction"),
        ("item_left_out", "input[4]", "reasoning"),
    ]
    assert prompt_of(front).endswith("user:x|assistant:No.|user:/root to /a: Go on.")
    only = await http.post("/v1/responses", json={"model": MODEL, "input": items[1:2]})
    assert (only.status_code, only.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("text", ["", "Hm.\n", "Łódź \ud800"])
def test_thoughts_come_back_sealed(text: str) -> None:
    assert opened(sealed(text)) == text.encode(errors="replace").decode()
    assert opened("gAAAA") is None
    assert opened(sealed(text) + "!") is None


def test_thoughts_that_were_sealed_are_told_to_the_model() -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed("I know.")}
    answer = {"role": "assistant", "content": "Yes."}
    request = asked(input=[{"role": "user", "content": "?"}, thought, answer])
    assert request.messages is not None
    assert request.messages[-1].reasoning == "I know."


@pytest.mark.parametrize(
    ("arguments", "kind", "field", "value"),
    [
        ('{"commands": ["ls"]}', "shell", "action", ["ls"]),
        ('{"type": "delete_file", "path": "a"}', "apply_patch", "operation", "a"),
    ],
)
async def test_other_tools_that_clients_run(
    front: RunningGateway,
    http: httpx.AsyncClient,
    arguments: str,
    kind: str,
    field: str,
    value: Any,
) -> None:
    says(front, called(kind, arguments), "Done.")
    environment = {"environment": {"type": "local"}} if kind == "shell" else {}
    fields: Any = {"tools": [{"type": kind, **environment}], "tool_choice": {"type": kind}}
    first = await http.post("/v1/responses", json=body(user("x"), **fields, stream=False))
    (call,) = first.json()["output"]
    assert call["type"] == f"{kind}_call"
    assert value in call[field].values()
    result: Any = {"type": f"{kind}_call_output", "call_id": call["call_id"]}
    outcome = {"type": "exit", "exit_code": 0}
    chunks = [{"stdout": "a", "stderr": "", "outcome": outcome}]
    result |= {"output": chunks} if kind == "shell" else {"status": "failed", "output": "no"}
    second = await http.post("/v1/responses", json=body(user("x"), call, result, stream=False))
    assert second.json()["output"][0]["content"][0]["text"] == "Done."
    text = '[{"stdout":"a"' if kind == "shell" else "failed: no"
    assert f"assistant:{kind}|tool:{text}" in prompt_of(front)


@pytest.mark.parametrize("arguments", ['{"command": "ls"}', '{"command": ["ls"', "{}"])
async def test_a_command_that_is_none_asks_for_nothing(
    front: RunningGateway, http: httpx.AsyncClient, arguments: str
) -> None:
    says(front, called("local_shell", arguments))
    answer = await http.post("/v1/responses", json=body(user("x"), stream=False))
    (call,) = [item for item in answer.json()["output"] if item["type"] == "local_shell_call"]
    assert (call["status"], call["action"]["command"]) == ("incomplete", [])


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        (
            {"type": "namespace", "name": "n", "tools": [{"type": "local_shell"}]},
            "tools[0].tools[0].type",
        ),
        (
            {"type": "namespace", "name": "n", "tools": [{**ORDER, "parameters": 3}]},
            "tools[0].tools[0].parameters",
        ),
        ({"type": "custom"}, "tools[0].name"),
        (
            {**EDIT, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}},
            "tools[0].format.syntax",
        ),
        ({**EDIT, "format": {**LARK, "definition": ""}}, "tools[0].format.definition"),
        ({**EDIT, "format": {**LARK, "definition": "start: ("}}, "tools[0].format.definition"),
        ({**EDIT, "parameters": {}}, "tools[0].parameters"),
        ({"name": "f"}, "tools[0].type"),
        ({"type": "function", "name": 3}, "tools[0].name"),
    ],
)
def test_bad_tools_are_named(tool: Any, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        asked(tools=[tool])
    assert caught.value.param == param


def test_names_of_namespaces_fit_the_model() -> None:
    long = "x" * 60
    tools = [
        {"type": "namespace", "name": name, "tools": [{**ORDER, "name": "f"}]}
        for name in ("a", "b_", "c.d", long, long + "y")
    ]
    request = asked(tools=tools, tool_choice={"type": "function", "name": "f", "namespace": "c.d"})
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "b_"}]}
    assert [tool.name for tool in asked(tools=tools, tool_choice=some).tools] == ["b_f"]
    with pytest.raises(ParameterError, match="Several tools are called 'f'"):
        asked(tools=tools, tool_choice={"type": "function", "name": "f"})
    with pytest.raises(ParameterError, match="name one of its tools"):
        asked(tools=tools, tool_choice={"type": "namespace", "name": "b_"})
    names = [tool.name for tool in request.tools]
    assert names[:2] == ["a__f", "b_f"]
    assert names[2].startswith("c_d__f_")
    assert request.tool_choice.name == names[2]
    assert len({*names}) == 5
    assert all(len(name) <= 64 for name in names)


async def test_tools_among_the_items(front: RunningGateway, http: httpx.AsyncClient) -> None:
    """Codex sends tools to some models in one item, in one namespace."""
    says(front, called("functions__exec_command", '{"cmd": "ls"}'))
    space = {"type": "namespace", "name": "functions", "description": "All.", "tools": [RUN, EDIT]}
    item = {"type": "additional_tools", "role": "developer", "tools": [space, TOOLS[2]]}
    answer = await http.post("/v1/responses", json=body(item, user("x"), tools=None, stream=False))
    (call,) = answer.json()["output"]
    assert (call["name"], call["namespace"]) == ("exec_command", "functions")
    where = "input[1].tools"
    wanted = f'tool_left_out;param="{where}[1]";detail="web_search"'
    assert answer.headers[NOTICE_NAME] == wanted
    tools = front.worker.jobs[-1].tools
    assert [tool.name for tool in tools] == ["functions__exec_command", "functions__apply_patch"]
    assert tools[0].description.startswith("All.")
    bad = {"type": "additional_tools", "role": "developer", "tools": [{"type": "x"}]}
    refused = await http.post("/v1/responses", json=body(bad, user("x"), tools=None))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"{where}[0].type")
