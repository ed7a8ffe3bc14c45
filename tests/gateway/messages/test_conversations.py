"""Conversion of the messages of a Messages request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.gateway.messages.input import generation_request_of
from millrace.registry.requests.message_fields import in_words
from millrace.schemas.anthropic.requests import MessagesRequest
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolCall, ToolMode

USE = {"type": "tool_use", "id": "c-1", "name": "look", "input": {"at": "sky"}}
RESULT = {"type": "tool_result", "tool_use_id": "c-1", "content": "blue"}
TEXT = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}


def request_of(messages: list[Any], **more: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 5, "messages": messages} | more
    return msgspec.convert(body, MessagesRequest)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def read(messages: list[Any], **more: Any) -> tuple[ChatMessage, ...]:
    return generation_request_of(request_of(messages, **more)).messages or ()


def test_turns_in_words() -> None:
    conversation = read(
        [user(TEXT), {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "No."}],
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
    )
    assert [(one.role, one.content) for one in conversation] == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "No."),
    ]


def test_turns_of_one_role_are_one() -> None:
    conversation = read([user(TEXT), user(TEXT), {"role": "system", "content": "Now."}, user(TEXT)])
    assert [(one.role, one.content) for one in conversation] == [
        ("user", "HiHi"),
        ("system", "Now."),
        ("user", "Hi"),
    ]


def test_calls_and_what_they_gave() -> None:
    thoughts = {"type": "thinking", "thinking": "Where?", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    conversation = read([user(TEXT), assistant(hidden, thoughts, TEXT, USE), user(RESULT, TEXT)])
    assert conversation[1:] == (
        ChatMessage(
            "assistant",
            "Hi",
            tool_calls=(ToolCall(id="c-1", name="look", arguments='{"at":"sky"}'),),
            reasoning="Where?",
        ),
        ChatMessage("tool", "blue", tool_call_id="c-1"),
        ChatMessage("user", "Hi"),
    )


def test_a_call_that_failed_says_so() -> None:
    failed = RESULT | {"is_error": True, "content": [{"type": "text", "text": "dark"}]}
    conversation = read([user(TEXT), assistant(USE), user(failed)])
    assert conversation[-1].content == "Error: dark"


@pytest.mark.parametrize(
    ("thinking", "enabled", "told", "budget"),
    [
        (None, False, False, None),
        ({"type": "disabled"}, False, False, None),
        ({"type": "adaptive"}, True, True, None),
        ({"type": "adaptive", "display": "omitted"}, True, False, None),
        ({"type": "enabled", "budget_tokens": 64}, True, True, 64),
    ],
)
def test_thoughts(thinking: Any, enabled: bool, told: bool, budget: int | None) -> None:
    request = generation_request_of(request_of([user(TEXT)], thinking=thinking))
    assert request.chat_template_kwargs["enable_thinking"] is enabled
    assert request.include_reasoning is told
    assert request.sampling.max_reasoning_tokens == budget


def test_effort_is_a_variable_of_the_template() -> None:
    request = generation_request_of(request_of([user(TEXT)], output_config={"effort": "high"}))
    assert request.chat_template_kwargs["reasoning_effort"] == "high"


def test_an_answer_that_is_begun_already() -> None:
    request = generation_request_of(request_of([user(TEXT), assistant(TEXT)]))
    assert request.continue_final_message
    assert not generation_request_of(request_of([user(TEXT)])).continue_final_message


def test_a_choice_of_tools() -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    for choice, mode, parallel in (
        ({"type": "none"}, ToolMode.NONE, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolMode.REQUIRED, False),
        ({"type": "tool", "name": "look"}, ToolMode.NAMED, True),
    ):
        request = generation_request_of(request_of([user(TEXT)], tools=tools, tool_choice=choice))
        assert (request.tool_choice.mode, request.parallel_tool_calls) == (mode, parallel)


@pytest.mark.parametrize(
    ("messages", "param", "match"),
    [
        ([], "messages", "at least one"),
        ([user(TEXT), assistant(USE)], "messages[1].content[0]", "tool_result of 'c-1'"),
        ([user(TEXT), assistant(USE), user(TEXT)], "messages[1].content[0]", "tool_result"),
        ([user(RESULT)], "messages[0].content[0].tool_use_id", "no tool_use block"),
        (
            [user(TEXT), assistant(USE), user(TEXT, RESULT)],
            "messages[2].content[1]",
            "before the text",
        ),
        (
            [user(TEXT), assistant(USE), user(RESULT, RESULT)],
            "messages[2].content[1].tool_use_id",
            "no tool_use block",
        ),
        ([user(USE)], "messages[0].content[0].type", "no tool_use blocks"),
        ([assistant(RESULT), user(TEXT)], "messages[0].content[0].type", "no tool_result"),
    ],
)
def test_conversations_that_are_none(messages: list[Any], param: str, match: str) -> None:
    with pytest.raises(ParameterError, match=match) as caught:
        read(messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"tools": [{"name": "bash", "type": "zsh_20250124"}]}, "tools[0].type"),
        ({"tools": [{"name": "look", "input_schema": {}, "max_uses": 3}]}, "tools[0].max_uses"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"metadata": {"user_id": "u" * 300}}, "metadata.user_id"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"temperature": 9.0}, "temperature"),
    ],
)
def test_fields_that_cannot_be_honoured(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        generation_request_of(request_of([user(TEXT)], **fields))
    assert caught.value.param == param
    assert param in caught.value.message


def test_what_a_model_refuses_is_named_as_it_was_sent() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2_000}
    asked = request_of([user(TEXT)], thinking=thinking, stop_sequences=["."])
    words = generation_request_of(asked).words
    named = [in_words(one, words) for one in ("max_reasoning_tokens", "max_tokens", "stop")]
    assert named == ["thinking.budget_tokens", "max_tokens", "stop_sequences"]
