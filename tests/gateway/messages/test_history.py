"""Blocks that agents send back in the history of a Messages request."""

from __future__ import annotations

import typing
from typing import Any

import anthropic.types as sdk_types
import anthropic.types.beta as beta_types
import httpx
import msgspec
import pytest

from millrace.gateway.messages.input import generation_request_of
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.anthropic.blocks import ContentBlock, ReadableBlock
from millrace.schemas.anthropic.requests import MessagesRequest
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.notices import Notice, NoticeCode
from millrace.schemas.tools import ToolCall
from tests.support.running_gateway import MODEL

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "c-1", "name": "look", "input": {"at": "sky"}}
RESULT = {"type": "tool_result", "tool_use_id": "c-1", "content": "blue"}
OTHER_USE = USE | {"id": "c-2"}
OTHER_RESULT = RESULT | {"tool_use_id": "c-2"}
SYSTEM = {"role": "system", "content": "Be brief."}
SEARCH = {
    "type": "server_tool_use",
    "id": "s-1",
    "name": "web_search",
    "input": {"query": "sky"},
    "caller": {"type": "direct"},
}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "s-1",
    "content": [
        {
            "type": "web_search_result",
            "title": "The sky",
            "url": "https://a.example",
            "encrypted_content": "x" * 50,
            "page_age": None,
        }
    ],
}


def schema(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}} | more


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def read(*messages: Any, **more: Any) -> GenerationRequest:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages)} | more
    return generation_request_of(msgspec.convert(body, MessagesRequest))


def told(*messages: Any, **more: Any) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in read(*messages, **more).messages or ()]


def tool_names(*messages: Any, **more: Any) -> list[str]:
    return [tool.name for tool in read(*messages, **more).tools]


def kinds_of(union: Any) -> set[str]:
    """The values of ``type`` in a union of the SDK's blocks."""
    kinds: set[str] = set()
    for one in typing.get_args(union):
        if typing.get_args(one):
            kinds |= kinds_of(one)
        elif hasattr(one, "model_fields"):
            kinds |= set(typing.get_args(one.model_fields["type"].annotation))
        elif isinstance(one, type):
            kinds |= set(typing.get_args(typing.get_type_hints(one)["type"]))
    return kinds


@pytest.mark.parametrize("union", [sdk_types.ContentBlockParam, beta_types.BetaContentBlockParam])
def test_each_block_of_the_sdk_is_known(union: Any) -> None:
    ours = {block.__struct_config__.tag for block in typing.get_args(ContentBlock)}
    assert kinds_of(union) - ours == set()


def test_each_block_of_a_result_is_known() -> None:
    hint = typing.get_type_hints(beta_types.BetaToolResultBlockParam)["content"]
    (blocks,) = [one for one in typing.get_args(hint) if one is not str]
    ours = {block.__struct_config__.tag for block in typing.get_args(ReadableBlock)}
    assert kinds_of(typing.get_args(blocks)[0]) - ours == {"image"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_what_it_was_not_told(http: httpx.AsyncClient, stream: bool) -> None:
    hidden = {"type": "redacted_thinking", "data": "x"}
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [HI, assistant(hidden, SEARCH, FOUND, text("Blue.")), SYSTEM, HI, SYSTEM],
        "stream": stream,
    }
    answer = await http.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    named = 'content_left_out;param="messages[1].content[0]";detail="redacted_thinking"'
    assert answer.headers["x-millrace-notice"].startswith(named)
    last = answer.text.split("data: ")[-1]
    first, second = msgspec.json.decode(last)["x-millrace-notice"]
    assert first["detail"] == "redacted_thinking"
    assert second["param"] == "messages[1].content[2].content"


def test_a_server_tool_is_a_call_and_its_result() -> None:
    request = read(HI, assistant(text("I look."), SEARCH, FOUND, text("It is blue.")), HI)
    assert request.messages is not None
    assert request.messages[1:4] == (
        ChatMessage(
            "assistant",
            "I look.",
            tool_calls=(ToolCall(id="s-1", name="web_search", arguments='{"query":"sky"}'),),
        ),
        ChatMessage(
            "tool",
            '[{"type":"web_search_result","title":"The sky","url":"https://a.example",'
            '"page_age":null}]',
            tool_call_id="s-1",
        ),
        ChatMessage("assistant", "It is blue."),
    )
    assert request.notices == (
        Notice(
            NoticeCode.CONTENT_LEFT_OUT,
            "messages[1].content[2].content",
            "web_search_tool_result.encrypted_content",
        ),
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"type": "mcp_tool_result", "content": "blue"}, "blue"),
        ({"type": "mcp_tool_result", "content": [text("bl"), text("ue")]}, "blue"),
        ({"type": "mcp_tool_result", "content": "off", "is_error": True}, "Error: off"),
        (
            {
                "type": "code_execution_tool_result",
                "content": {"type": "code_execution_result", "stdout": "4", "return_code": 0},
            },
            '{"type":"code_execution_result","stdout":"4","return_code":0}',
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "content": {"type": "bash_code_execution_tool_result_error", "error_code": "x"},
            },
            '{"type":"bash_code_execution_tool_result_error","error_code":"x"}',
        ),
        ({"type": "text_editor_code_execution_tool_result", "content": "ok"}, "ok"),
        ({"type": "web_fetch_tool_result", "content": "ok"}, "ok"),
        ({"type": "advisor_tool_result", "content": "ok"}, "ok"),
    ],
)
@pytest.mark.parametrize("call", ["server_tool_use", "mcp_tool_use"])
def test_what_server_tools_gave(call: str, result: dict[str, Any], expected: str) -> None:
    use = {"type": call, "id": "s-1", "name": "t", "server_name": "s", "input": {}}
    assert told(HI, assistant(use, result | {"tool_use_id": "s-1"}), HI) == [
        ("user", "Hi"),
        ("assistant", ""),
        ("tool", expected),
        ("user", "Hi"),
    ]


def test_a_server_tool_that_calls_the_clients() -> None:
    run = SEARCH | {"name": "code_execution", "input": {"code": "look()"}}
    ran = {"type": "code_execution_tool_result", "tool_use_id": "s-1", "content": "done"}
    use = USE | {"caller": {"type": "code_execution_20250825", "tool_id": "s-1"}}
    assert told(HI, assistant(run, use), user(RESULT), assistant(ran, text("Blue.")), HI)[1:] == [
        ("assistant", ""),
        ("tool", "blue"),
        ("tool", "done"),
        ("assistant", "Blue."),
        ("user", "Hi"),
    ]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [HI, assistant(USE), SYSTEM, user(RESULT, text("So?"))],
            [("assistant", ""), ("tool", "blue"), ("system", "Be brief."), ("user", "So?")],
        ),
        (
            [HI, assistant(USE, OTHER_USE), user(RESULT), SYSTEM, user(OTHER_RESULT)],
            [("assistant", ""), ("tool", "blue"), ("tool", "blue"), ("system", "Be brief.")],
        ),
        ([HI, SYSTEM], [("system", "Be brief.")]),
        ([HI, assistant(text("Yes.")), SYSTEM], [("assistant", "Yes."), ("system", "Be brief.")]),
        (
            [HI, assistant(USE), user(RESULT), SYSTEM],
            [("assistant", ""), ("tool", "blue"), ("system", "Be brief.")],
        ),
        ([HI, SYSTEM | {"clear_at": "next_user_message"}], [("system", "Be brief.")]),
        ([HI, SYSTEM | {"clear_at": "next_user_message"}, HI], [("user", "Hi")]),
        ([HI, SYSTEM | {"clear_at": "never"}, HI], [("system", "Be brief."), ("user", "Hi")]),
    ],
)
def test_where_a_turn_of_the_system_stands(
    messages: list[Any], expected: list[tuple[str, str]]
) -> None:
    assert told(*messages) == [("user", "Hi"), *expected]


def test_effort_of_the_turn() -> None:
    high = {"role": "system", "output_config": {"effort": "high"}}
    low = {"effort": "low"}
    request = read(HI, high, output_config=low)
    assert request.chat_template_kwargs["reasoning_effort"] == "high"
    request = read(HI, high, assistant(text("Yes.")), HI, output_config=low)
    assert request.chat_template_kwargs["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, "{}"),
        ("", "{}"),
        (None, "{}"),
        ('{"at": "sk', '{"at": "sk'),
        ({"INVALID_JSON": '{"at'}, '{"INVALID_JSON":"{\\"at"}'),
    ],
)
def test_a_call_that_was_cut_goes_back(given: Any, arguments: str) -> None:
    request = read(HI, assistant(USE | {"input": given}), user(RESULT | {"content": None}))
    assert request.messages is not None
    assert request.messages[1].tool_calls[0].arguments == arguments
    assert request.messages[2] == ChatMessage("tool", "", tool_call_id="c-1")


def test_deferred_tools_are_offered_once_they_are_found() -> None:
    tools = [schema("find"), schema("look", defer_loading=True), schema("x", defer_loading=True)]
    assert tool_names(HI, tools=tools) == ["find"]
    found = user(RESULT | {"content": [{"type": "tool_reference", "tool_name": "look"}]})
    asked = assistant(USE | {"name": "find"})
    assert tool_names(HI, asked, found, tools=tools) == ["find", "look"]
    assert told(HI, asked, found, tools=tools)[-1] == ("tool", "The tool look was found.")


def test_deferred_tools_that_nothing_can_find_are_offered() -> None:
    deferred = schema("look", defer_loading=True)
    assert tool_names(HI, tools=[deferred]) == ["look"]


def test_tools_that_a_provider_found() -> None:
    search = SEARCH | {"name": "tool_search_tool_regex", "input": {"pattern": "l.*"}}
    found = {
        "type": "tool_search_tool_result",
        "tool_use_id": "s-1",
        "content": {
            "type": "tool_search_tool_search_result",
            "tool_references": [
                {"type": "tool_reference", "tool_name": "look"},
                {"type": "tool_reference", "tool_name": "gone"},
            ],
        },
    }
    tools = [schema("a"), schema("look", defer_loading=True), schema("b", defer_loading=True)]
    request = read(HI, assistant(search, found), HI, tools=tools)
    assert [tool.name for tool in request.tools] == ["a", "look"]
    where = "messages[1].content[1]"
    assert request.notices == (Notice(NoticeCode.TOOL_LEFT_OUT, where, "gone"),)
    assert "tool_references" in (request.messages or ())[2].content


def test_tools_come_and_go() -> None:
    tools = [schema("a"), schema("b"), schema("c", defer_loading=True)]

    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    def names(*changes: Any) -> list[str]:
        return tool_names(HI, *changes, tools=tools)

    by_name: dict[str, Any] = {"type": "tool_reference"}
    added = change("tool_addition", **by_name, name="c")
    removed = change("tool_removal", **by_name, name="a")
    defined = change("tool_addition", type="tool_definition", definition=schema("d"))
    again = change(
        "tool_addition", type="tool_definition", definition=schema("a", description="New.")
    )
    assert names(added) == ["a", "b", "c"]
    assert names(removed) == ["b"]
    assert names(removed, change("tool_addition", **by_name, name="a")) == ["a", "b"]
    assert names(defined) == ["a", "b", "d"]
    assert names(again) == ["b", "a"]
    request = read(
        HI, change("tool_removal", type="mcp_toolset_reference", server_name="s"), tools=tools
    )
    where = "messages[1].content[0].tool"
    assert request.notices == (Notice(NoticeCode.TOOL_LEFT_OUT, where, "s"),)


def test_a_summary_takes_the_place_of_what_was_before_it() -> None:
    compaction = {
        "type": "compaction",
        "content": "They said hello.",
        "tool_changes": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
        ],
    }
    messages = [HI, assistant(USE), user(RESULT), assistant(compaction, text("Yes.")), HI]
    assert told(*messages, system="Be kind.", tools=[schema("look"), schema("see")]) == [
        ("system", "Be kind."),
        ("user", "They said hello."),
        ("assistant", "Yes."),
        ("user", "Hi"),
    ]
    assert tool_names(*messages, tools=[schema("look"), schema("see")]) == ["see"]
    failed = {"type": "compaction", "content": None}
    assert told(HI, assistant(failed, text("Yes.")))[0] == ("user", "Hi")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {"type": "search_result", "source": "a.md", "title": "A", "content": [text("blue")]},
            "A\na.md\nblue",
        ),
        (
            {"type": "document", "title": "A", "source": {"type": "text", "data": "blue"}},
            "A\nblue",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("blue")]}},
            "blue",
        ),
    ],
)
def test_what_is_more_than_text_is_read(block: dict[str, Any], expected: str) -> None:
    assert told(user(block, text("?"))) == [("user", f"{expected}\n?")]
    in_result = user(RESULT | {"content": [block]})
    assert told(HI, assistant(USE), in_result)[-1] == ("tool", expected)


@pytest.mark.parametrize(
    "kind", ["redacted_thinking", "fallback", "mcp_tool_listing", "container_upload"]
)
def test_what_only_its_provider_reads_is_named(kind: str) -> None:
    block = {"type": kind, "data": "x", "file_id": "f", "tools": [], "to": {"model": "m"}}
    request = read(HI, assistant(block, text("Yes.")), HI)
    assert [one.content for one in request.messages or ()] == ["Hi", "Yes.", "Hi"]
    where = "messages[1].content[0]"
    assert request.notices == (Notice(NoticeCode.CONTENT_LEFT_OUT, where, kind),)


@pytest.mark.parametrize(
    ("messages", "param", "match"),
    [
        ([HI, assistant(SEARCH), HI], "messages[1].content[0]", "no result of 's-1'"),
        ([HI, assistant(SEARCH)], "messages[1].content[0]", "server tools"),
        ([HI, assistant(FOUND)], "messages[1].content[0].tool_use_id", "no server_tool_use"),
        ([user(SEARCH)], "messages[0].content[0].type", "no server_tool_use blocks"),
        ([HI, assistant(USE), SYSTEM], "messages[1].content[0]", "tool_result of 'c-1'"),
        ([HI, assistant(USE), SYSTEM, HI], "messages[1].content[0]", "tool_result of 'c-1'"),
        ([user({"type": "container_upload", "file_id": "f"})], "messages[0].content[0].type", "no"),
        (
            [user({"type": "document", "source": {"type": "base64", "data": "x"}})],
            "messages[0].content[0].source",
            "not 'base64'",
        ),
        (
            [{"role": "developer", "content": "x"}],
            "messages[0].role",
            "must be one of user, assistant, system",
        ),
        ([{"role": "user"}], "messages[0].content", "required"),
        ([HI, {"role": "system"}], "messages[1].content", "required"),
        ([HI | {"clear_at": "never"}], "messages[0].clear_at", "role system"),
        ([{"role": "system", "content": ""}], "messages", "with text"),
        (
            [
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "tool_addition",
                            "tool": {"type": "tool_reference", "name": "none"},
                        }
                    ],
                }
            ],
            "messages[0].content[0].tool.name",
            "'none'",
        ),
        (
            [
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "tool_addition",
                            "tool": {"type": "tool_definition", "definition": {"name": 3}},
                        }
                    ],
                }
            ],
            "messages[0].content[0].tool.definition.name",
            "Expected `str`",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(messages: list[Any], param: str, match: str) -> None:
    with pytest.raises(ParameterError, match=match) as caught:
        read(*messages)
    assert caught.value.param == param
