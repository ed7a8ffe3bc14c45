"""Conversion of a request's items and fields into a conversation and sampling settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.responses.history import messages_of
from millrace.gateway.responses.input import check_fields
from millrace.gateway.streams.parts import ChoiceEnd
from millrace.registry.requests.decoding import decode
from millrace.schemas.errors import GrammarError, InvalidJsonError, ParameterError
from millrace.schemas.responses.items import FunctionCallItem, Item, ResponsesRequest
from tests.gateway.responses.rendered import (
    DECODER,
    asked,
    events_of,
    items_of,
    renderer_of,
    request_of,
    stream_of,
)


def messages_from(items: Sequence[Any], instructions: str | None = None) -> list[dict[str, Any]]:
    """Return the conversation of a request without unset fields."""
    request = request_of(input=items)
    messages = messages_of(items_of(request.input), instructions)
    return [
        {
            key: value
            for key, value in json.loads(msgspec.json.encode(message)).items()
            if value is not None
        }
        for message in messages
    ]


def test_text_and_instructions_are_a_conversation() -> None:
    messages = messages_of(items_of("hi"), "Be brief.")
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]


def test_items_are_turns_and_calls_belong_to_the_turn_before() -> None:
    answered = {"id": "msg_1", "status": "completed", "type": "message", "role": "assistant"}
    text: dict[str, Any] = {
        "type": "output_text",
        "text": "I look.",
        "annotations": [],
        "logprobs": None,
    }
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output"}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_from(
        [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": parts},
            answered | {"content": [text]},
            call | {"call_id": "c1", "id": "fc_1", "status": "completed"},
            call | {"call_id": "c2"},
            output | {"call_id": "c2", "output": parts},
            output | {"call_id": "c1", "output": "1"},
            {"role": "user", "content": "and?"},
            call | {"call_id": "c3"},
            output | {"call_id": "c3", "output": "3"},
        ]
    ) == [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "function": {"name": "f", "arguments": "{}"}, "type": "function"},
                {"id": "c2", "function": {"name": "f", "arguments": "{}"}, "type": "function"},
            ],
        },
        {"role": "tool", "content": "ab", "tool_call_id": "c2"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "user", "content": "and?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c3", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c3"},
    ]


def test_refusals_and_turns_without_text() -> None:
    refusal = {"type": "refusal", "refusal": "I can't."}
    messages = messages_from(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [refusal]},
            {"role": "assistant", "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": None},
        ]
    )
    assert [(one["role"], one["content"]) for one in messages] == [
        ("user", "hi"),
        ("assistant", "I can't."),
        ("assistant", ""),
        ("tool", ""),
    ]


def test_a_call_that_was_cut_off_is_left_out() -> None:
    cut = FunctionCallItem(id="x", call_id="c", name="f", arguments="{", status="incomplete")
    items: tuple[Item, ...] = (cut, *items_of("again"))
    assert [message.role for message in messages_of(items, None)] == ["user"]


def test_what_sdks_add_to_items_that_are_sent_back_is_ignored() -> None:
    citation = {"type": "url_citation", "url": "https://a.example"}
    text = {"type": "output_text", "text": "I look.", "annotations": [citation], "parsed": {"a": 1}}
    answer = {"id": "msg_1", "type": "message", "role": "assistant", "phase": "commentary"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert messages_from(
        [
            {"role": "user", "content": "x"},
            answer | {"content": [text]},
            call | {"parsed_arguments": {}, "caller": {"type": "direct"}},
            {"type": "function_call_output", "call_id": "c", "output": "1", "name": "f"},
        ]
    ) == [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference"}, "input[1].id"),
        ({"type": "compaction_trigger"}, "input[1].type"),
        ({"type": "custom_tool_call", "call_id": "x", "name": "f"}, "input[1].input"),
        ({"type": "custom_tool_call_output", "output": "y"}, "input[1].call_id"),
        (
            {
                "type": "custom_tool_call_output",
                "call_id": "c",
                "output": [{"type": "text", "text": "y"}],
            },
            "input[1].output[0].type",
        ),
        ({"type": "local_shell_call", "call_id": "x", "action": []}, "input[1].action"),
        ({"type": 7}, "input[1].type"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": "x", "name": "y"}, "input[1].name"),
        ({"role": "user", "content": "x", "phase": "commentary"}, "input[1].phase"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0].type"),
        ({"type": "function_call", "call_id": "x", "name": "f"}, "input[1].arguments"),
        (
            {"type": "function_call_output", "call_id": "x", "output": [{"text": "y"}]},
            "input[1].output[0].type",
        ),
        ({"type": "function_call_output", "call_id": "x", "output": "y"}, "input[1].call_id"),
        (
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
            "input[1].call_id",
        ),
        ([], "input[1]"),
    ],
)
def test_a_bad_item_is_named(item: Any, param: str) -> None:
    given = [{"role": "user", "content": "x"}, item]
    with pytest.raises(ParameterError) as caught:
        asked(input=given)
    error = caught.value
    assert error.param == param
    # The sentence spells the field in the same way.
    assert error.message.startswith((f"{param} ", f"{param}:"))


def test_a_field_is_named_behind_items_that_are_left_out() -> None:
    left_out = {"type": "web_search_call", "id": "a", "status": "completed"}
    output = {"type": "function_call_output", "call_id": "c", "output": "y"}
    tools = {"type": "additional_tools", "tools": [{"type": "function"}]}
    for item, param in ((output, "input[2].call_id"), (tools, "input[2].tools[0].name")):
        with pytest.raises(ParameterError) as caught:
            asked(input=[{"role": "user", "content": "x"}, left_out, item])
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"background": 1}, "background"),
        ({"conversation": ""}, "conversation"),
        ({"conversation": {"id": ""}}, "conversation"),
        ({"conversation": "conv-1", "previous_response_id": "resp-1"}, "conversation"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"prompt_cache_key": 3}, "prompt_cache_key"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"session_id": "s"}, "session_id"),
        ({"n": 2}, "n"),
        ({"include": ["file_search_call.pages"]}, "include"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "websearch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"temperature": 3}, "temperature"),
        ({"absent": 1}, "absent"),
    ],
)
def test_a_field_that_is_not_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_hints_change_nothing() -> None:
    hinted = asked(
        prompt_cache_key="a",
        prompt_cache_retention="24h",
        reasoning={"summary": "auto"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content"],
    )
    assert hinted == asked()


def test_thoughts_belong_to_what_follows_them() -> None:
    thought: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    thought["content"] = [{"type": "reasoning_text", "text": "Hm."}]
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "1"}
    answer: Any = {"role": "assistant", "content": "Yes."}
    raws = [thought, call, result, thought, answer, thought, {"role": "user", "content": "hi"}]
    messages = messages_of(items_of([msgspec.Raw(msgspec.json.encode(r)) for r in raws]), None)
    assert [getattr(one, "reasoning_content", None) for one in messages] == [
        "Hm.",
        None,
        "Hm.",
        None,
    ]


def test_how_to_think_becomes_that_of_a_chat() -> None:
    thinking = asked(reasoning={"effort": "high"}, thinking_token_budget=5)
    assert thinking.chat_template_kwargs == {"reasoning_effort": "high"}
    assert thinking.sampling.max_reasoning_tokens == 5


def test_fields_become_those_of_a_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    generation_request = asked(
        tools=[tool, {"type": "server", "name": "clock"}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        max_output_tokens=9,
        text={"format": {"type": "json_object"}},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        safety_identifier="someone",
        reasoning={"effort": None},
        top_k=5,
        seed=7,
    )
    assert [tool.name for tool in generation_request.tools] == ["f"]
    assert generation_request.server_tools == ("clock",)
    assert generation_request.tool_choice.name == "f"
    assert not generation_request.parallel_tool_calls
    assert generation_request.user == "someone"
    sampling = generation_request.sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.top_k) == (9, 3, 5)
    assert sampling.grammar is not None


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        ["", "x", "auto", "function", "user", "message", "input_text", "json_schema"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "format", "schema", "call_id"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(name=st.sampled_from(ResponsesRequest.__struct_fields__), value=_JSON)
def test_any_value_of_a_field_is_taken_or_refused(name: str, value: object) -> None:
    body = {"model": "echo", "input": "hi", name: value}
    try:
        request = decode(DECODER, json.dumps(body))
        check_fields(request)
        renderer = renderer_of(request)
    except (ParameterError, InvalidJsonError, GrammarError):
        return
    stream = stream_of([ChoiceEnd(0, "stop")], renderer)
    assert events_of(stream)[-1]["type"] == "response.completed"
