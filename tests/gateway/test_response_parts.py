"""The Responses API between the sockets and the streams: input to messages, parts to events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.caller import LOCAL
from gateway.errors import InvalidJsonError, Refusal
from gateway.parsing import Ask, decode
from gateway.parts import CallArguments, CallStart, ChoiceEnd, Part, StepPart, TextPart
from gateway.response_input import ask_of, check_fields, given_items, messages_of
from gateway.response_renderer import ResponseRenderer
from schemas.errors import GrammarError, MillraceError, ParameterError
from schemas.frames import TokenLogprob, Usage
from schemas.openai import LogprobInfo
from schemas.responses import FunctionCallItem, Item, MessageItem, ResponsesRequest

_GOLDEN = Path(__file__).parent / "golden" / "responses_tools.sse"
_DECODER = msgspec.json.Decoder(ResponsesRequest)
_PARTS: list[Part] = [
    TextPart(0, 0, 1, "Let me "),
    TextPart(0, 1, 2, "löok."),
    StepPart("call_1", "clock", '{"zone":"UTC"}', True, "12:00", 3.5),
    TextPart(0, 3, 1, "Noon;"),
    TextPart(0, 4, 2, ""),
    CallStart(0, 0, "call_2", "weather"),
    CallArguments(0, 0, '{"city":'),
    CallArguments(0, 0, '"Bath"}'),
    CallStart(0, 1, "call_3", "weather"),
    CallArguments(0, 1, "{}"),
    ChoiceEnd(0, "tool_calls"),
]


def request_of(**fields: Any) -> ResponsesRequest:
    body = {"model": "echo", "input": "hi"} | fields
    request = decode(_DECODER, json.dumps(body).encode())
    check_fields(request)
    return request


def asked(**fields: Any) -> Ask:
    request = request_of(**fields)
    return ask_of(request, messages_of(given_items(request.input), None))


def messages_from(items: Sequence[Any], instructions: str | None = None) -> list[dict[str, Any]]:
    """The conversation of a request, without what is not set."""
    request = request_of(input=items)
    messages = messages_of(given_items(request.input), instructions)
    return [
        {
            key: value
            for key, value in json.loads(msgspec.json.encode(message)).items()
            if value is not None
        }
        for message in messages
    ]


def describe(entries: Sequence[TokenLogprob]) -> tuple[LogprobInfo, ...]:
    return tuple(LogprobInfo(token="t", logprob=one.logprob, bytes=(116,)) for one in entries)


def renderer_of(
    request: ResponsesRequest | None = None, had: Sequence[Part] = ()
) -> ResponseRenderer:
    request = request or request_of()
    items = given_items(request.input)
    answer = SimpleNamespace(
        request_id="resp-0123456789abcdef01234567",
        created_s=1_700_000_000,
        caller=LOCAL,
        choices=[SimpleNamespace(had=had)],
        ask=ask_of(request, messages_of(items, None)),
        usage=Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=9),
    )
    return ResponseRenderer(request, cast("Answer", answer), (), items, None, describe)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def stream_of(parts: Sequence[Part], renderer: ResponseRenderer | None = None) -> bytes:
    renderer = renderer or renderer_of()
    return renderer.first() + b"".join(map(renderer.part, parts)) + renderer.last()


# --- input -----------------------------------------------------------------------------------


def test_text_and_instructions_are_a_conversation() -> None:
    messages = messages_of(given_items("hi"), "Be brief.")
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


def test_a_call_that_was_cut_off_is_left_out() -> None:
    cut = FunctionCallItem(id="x", call_id="c", name="f", arguments="{", status="incomplete")
    items: tuple[Item, ...] = (cut, *given_items("again"))
    assert [message.role for message in messages_of(items, None)] == ["user"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[1].type"),
        ({"type": "reasoning", "id": "x", "summary": []}, "input[1].type"),
        ({"type": 7}, "input[1].type"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": "x", "name": "y"}, "input[1].name"),
        ({"role": "user", "content": "x", "phase": "commentary"}, "input[1].phase"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0].type"),
        ({"type": "function_call", "call_id": "x", "name": "f"}, "input[1].arguments"),
        ({"type": "function_call_output", "call_id": "x", "output": "y"}, "input"),
        ({"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}, "input"),
        ([], "input[1]"),
    ],
)
def test_a_bad_item_is_named(item: Any, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        messages_from([{"role": "user", "content": "x"}, item])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"session_id": "s"}, "session_id"),
        ({"n": 2}, "n"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"top_logprobs": 21}, "logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"temperature": 3}, "temperature"),
        ({"absent": 1}, "absent"),
    ],
)
def test_a_field_that_is_not_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_fields_become_those_of_a_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    ask = asked(
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
    assert [tool.name for tool in ask.tools] == ["f"]
    assert ask.server_tools == ("clock",)
    assert ask.tool_choice.name == "f"
    assert not ask.parallel_tool_calls
    assert ask.user == "someone"
    sampling = ask.sampling
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
        request = decode(_DECODER, json.dumps(body))
        check_fields(request)
        renderer = renderer_of(request)
    except (ParameterError, InvalidJsonError, GrammarError):
        return
    stream = renderer.first() + renderer.part(ChoiceEnd(0, "stop")) + renderer.last()
    assert events_of(stream)[-1]["type"] == "response.completed"


# --- output ----------------------------------------------------------------------------------


def test_golden_events() -> None:
    assert stream_of(_PARTS).decode() == _GOLDEN.read_text()


def test_the_whole_is_what_the_last_event_says() -> None:
    renderer = renderer_of()
    for part in _PARTS:
        renderer.add(part)
    last = events_of(stream_of(_PARTS))[-1]
    assert last["type"] == "response.completed"
    assert json.loads(renderer.whole()) == last["response"]


def _cut(parts: Sequence[Part], cuts: set[int]) -> list[Part]:
    """The same answer in other parts: tokens and characters that no cut parts go together."""
    result: list[Part] = []
    for number, part in enumerate(parts):
        last = result[-1] if result else None
        if number in cuts or type(last) is not type(part):
            result.append(part)
        elif isinstance(part, TextPart) and isinstance(last, TextPart):
            num_tokens = last.num_tokens + part.num_tokens
            result[-1] = last._replace(num_tokens=num_tokens, text=last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            result[-1] = last._replace(text=last.text + part.text)
        else:
            result.append(part)
    return result


_TEXTS = st.lists(st.sampled_from(["", "a", "bc", "é"]), min_size=1, max_size=6)


@given(texts=_TEXTS, arguments=_TEXTS, more=_TEXTS, cuts=st.sets(st.integers(0, 20)))
def test_numbers_do_not_depend_on_how_the_answer_is_cut(
    texts: list[str], arguments: list[str], more: list[str], cuts: set[int]
) -> None:
    parts: list[Part] = [TextPart(0, i, 1, text) for i, text in enumerate(texts)]
    parts.append(CallStart(0, 0, "call_1", "f"))
    parts += [CallArguments(0, 0, text) for text in arguments if text]
    parts += [TextPart(0, len(texts) + i, 1, text) for i, text in enumerate(more)]
    parts.append(ChoiceEnd(0, "stop"))
    one, other = (events_of(stream_of(cut)) for cut in (parts, _cut(parts, cuts)))
    assert one[-1] == other[-1]
    for events in (one, other):
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("num_had", range(1, len(_PARTS) + 1))
def test_a_stream_goes_on_where_another_connection_stopped(num_had: int) -> None:
    had, rest = _PARTS[:num_had], _PARTS[num_had:]
    if not rest:
        rest = [had.pop()]  # the end comes again
    resumed = renderer_of(had=_cut(had, set()))
    renderer = renderer_of()
    renderer.first()
    for part in had:
        renderer.part(part)
    for one in (resumed, renderer):
        one.part(rest[0])
    whole, tail = (b"".join(map(one.part, rest[1:])) + one.last() for one in (renderer, resumed))
    assert events_of(tail) == events_of(whole)


def test_an_answer_of_no_words_is_an_empty_message() -> None:
    events = events_of(stream_of([TextPart(0, 0, 1, ""), ChoiceEnd(0, "stop")]))
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]
    assert item["status"] == "completed"


def test_an_answer_that_was_too_long_is_incomplete() -> None:
    renderer = renderer_of(request_of(max_output_tokens=1))
    event = events_of(stream_of([TextPart(0, 0, 1, "a"), ChoiceEnd(0, "length")], renderer))[-1]
    assert event["type"] == "response.incomplete"
    response = event["response"]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["total_tokens"] == 14


def test_a_failure_is_told_twice() -> None:
    renderer = renderer_of()
    events = events_of(
        renderer.first()
        + renderer.part(TextPart(0, 0, 2, "ab"))
        + renderer.failed(Refusal(status=503, code="worker_failed", message="it broke"))
    )
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("worker_failed", "it broke")
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "it broke"}
    assert response["output"][0]["status"] == "incomplete"
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3, 5, 6, 7]


def test_log_probabilities_are_those_of_the_text() -> None:
    """Those of half a character go with the whole one, those of a call's markup with nothing."""
    one = (TokenLogprob(1, -0.5),)
    parts: list[Part] = [
        TextPart(0, 0, 1, "", one),
        TextPart(0, 1, 1, "é", one),
        TextPart(0, 2, 1, "", one),
        CallStart(0, 0, "call_1", "f"),
        TextPart(0, 3, 1, "!", one),
        ChoiceEnd(0, "tool_calls"),
    ]
    events = events_of(stream_of(parts))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [len(delta["logprobs"]) for delta in deltas] == [2, 1]
    messages = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert [len(item["content"][0]["logprobs"]) for item in messages] == [2, 1]


def test_the_request_is_told_again() -> None:
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_object"}},
        "temperature": 0.5,
        "truncation": "auto",
    }
    response = events_of(renderer_of(request_of(**fields)).first())[0]["response"]
    assert response["status"] == "in_progress"
    assert response["usage"] is None
    assert not response["store"]
    for name in ("instructions", "metadata", "tool_choice", "temperature", "truncation"):
        assert response[name] == fields[name]
    assert response["text"]["format"] == {"type": "json_object"}
    assert response["tools"][0]["name"] == "f"


def test_schemas_of_several_lines_are_told_in_one() -> None:
    body = b"""{"model": "echo", "input": "x", "stream": true,
      "tools": [{"type": "function", "name": "f", "parameters": {
        "type": "object" }}],
      "text": {"format": {"type": "json_schema", "name": "n", "schema": {
        "type":\r\n "object"}}}}"""
    response = events_of(renderer_of(decode(_DECODER, body)).first())[0]["response"]
    assert response["tools"][0]["parameters"] == {"type": "object"}
    assert response["text"]["format"]["schema"] == {"type": "object"}


@pytest.mark.parametrize("depth", range(850, 960, 5))
def test_a_deep_schema_is_refused_or_told_again(depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "name": "f", "parameters": {deep}}}'
    body = f'{{"model": "echo", "input": "x", "tools": [{tool}]}}'
    try:
        renderer = renderer_of(decode(_DECODER, body))
    except MillraceError:
        return
    assert deep.encode() in renderer.first()


def test_items_without_ids_are_given_some() -> None:
    renderer = renderer_of(
        request_of(
            input=[
                {"role": "user", "content": "a"},
                {"id": "x", "role": "assistant", "content": "b"},
                {"id": "x", "role": "user", "content": "c"},
            ]
        )
    )
    items = renderer.conversation
    assert all(isinstance(item, MessageItem) for item in items)
    stem = "0123456789abcdef01234567"
    assert [item.id for item in items] == [f"msg_{stem}_in0", "x", f"msg_{stem}_in2"]
