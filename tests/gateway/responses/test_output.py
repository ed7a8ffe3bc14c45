"""Conversion of parts into events and into the whole answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.api.event_ids import ToldEvents, parse_event_id
from millrace.gateway.errors import Refusal
from millrace.gateway.responses.items import _without_end
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    ChoiceEnd,
    Part,
    ReasoningPart,
    StepPart,
)
from millrace.registry.requests.decoding import decode
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.openai import LogprobInfo
from millrace.schemas.responses.items import MessageItem
from tests.gateway.responses.rendered import (
    DECODER,
    bytes_of,
    events_of,
    renderer_of,
    request_of,
    stream_of,
)

_GOLDEN = Path(__file__).parents[1] / "golden" / "responses_tools.sse"
_PARTS: list[Part] = [
    ReasoningPart(0, 0, 2, "A clöck"),
    ReasoningPart(0, 2, 1, "?"),
    AnswerText(0, 3, 1, "Let me "),
    AnswerText(0, 4, 2, "löok."),
    StepPart("call_1", "clock", '{"zone":"UTC"}', True, "12:00", 3.5),
    AnswerText(0, 6, 1, "Noon;"),
    AnswerText(0, 7, 2, ""),
    CallStart(0, 0, "call_2", "weather"),
    CallArguments(0, 0, '{"city":'),
    CallArguments(0, 0, '"Bath"}'),
    CallStart(0, 1, "call_3", "weather"),
    CallArguments(0, 1, "{}"),
    ChoiceEnd(0, "tool_calls"),
]


def _cut(parts: Sequence[Part], cuts: set[int]) -> list[Part]:
    """The same answer in other parts: tokens and characters that no cut parts go together."""
    result: list[Part] = []
    for number, part in enumerate(parts):
        last = result[-1] if result else None
        if number in cuts or type(last) is not type(part):
            result.append(part)
        elif isinstance(part, AnswerText | ReasoningPart) and type(last) is type(part):
            num_tokens = last.num_tokens + part.num_tokens
            result[-1] = last._replace(num_tokens=num_tokens, text=last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            result[-1] = last._replace(text=last.text + part.text)
        else:
            result.append(part)
    return result


_TEXTS = st.lists(st.sampled_from(["", "a", "bc", "é"]), min_size=1, max_size=6)


def test_golden_events() -> None:
    assert stream_of(_PARTS).decode() == _GOLDEN.read_text()


def test_the_whole_is_what_the_last_event_says() -> None:
    renderer = renderer_of()
    for part in _PARTS:
        renderer.add(part)
    last = events_of(stream_of(_PARTS))[-1]
    assert last["type"] == "response.completed"
    assert json.loads(renderer.whole()) == last["response"]


@given(texts=_TEXTS, arguments=_TEXTS, more=_TEXTS, cuts=st.sets(st.integers(0, 20)))
def test_numbers_do_not_depend_on_how_the_answer_is_cut(
    texts: list[str], arguments: list[str], more: list[str], cuts: set[int]
) -> None:
    parts: list[Part] = [AnswerText(0, i, 1, text) for i, text in enumerate(texts)]
    parts.append(CallStart(0, 0, "call_1", "f"))
    parts += [CallArguments(0, 0, text) for text in arguments if text]
    parts += [AnswerText(0, len(texts) + i, 1, text) for i, text in enumerate(more)]
    parts.append(ChoiceEnd(0, "stop"))
    one, other = (events_of(stream_of(cut)) for cut in (parts, _cut(parts, cuts)))
    assert one[-1] == other[-1]
    for events in (one, other):
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))


def _told(parts: Sequence[Part], last_id: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the ids and events for a client that has all events up to ``last_id``."""
    renderer = renderer_of()
    response: Any = SimpleNamespace(choices=[SimpleNamespace(had=[])], request_id="r")
    events = ToldEvents(response, renderer, parse_event_id(last_id) if last_id else None)
    stream = (
        events.first(renderer.first()) + events.parts(list(parts)) + events.last(renderer.last())
    )
    blocks = [block.split(b"\n") for block in stream.split(b"\n\n")[:-1]]
    return [(block[0][4:].decode(), json.loads(block[2][6:])) for block in blocks]


def _together(events: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events, with deltas that follow one another put together."""
    result: list[dict[str, Any]] = []
    for _, event in events:
        last = result[-1] if result else {"type": ""}
        if event["type"].endswith(".delta") and last["type"] == event["type"]:
            result[-1] = event | {"delta": last["delta"] + event["delta"]}
        else:
            result.append(event)
    return result


@given(cuts=st.sets(st.integers(0, 20)), other_cuts=st.sets(st.integers(0, 20)))
def test_ids_do_not_depend_on_how_the_answer_is_cut(cuts: set[int], other_cuts: set[int]) -> None:
    # No token of its own, so that the whole of it is read again.
    bare = [
        part._replace(num_tokens=0, first_index=0)
        if isinstance(part, AnswerText | ReasoningPart)
        else part
        for part in _PARTS
    ]
    whole = _told(_cut(bare, cuts))
    for number, (last_id, _) in enumerate(whole):
        rest = _told(_cut(bare, other_cuts), last_id)
        assert _together([*whole[: number + 1], *rest]) == _together(whole)


def test_an_answer_of_no_words_is_an_empty_message() -> None:
    events = events_of(stream_of([AnswerText(0, 0, 1, ""), ChoiceEnd(0, "stop")]))
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]
    assert item["status"] == "completed"


def test_an_answer_that_was_too_long_is_incomplete() -> None:
    renderer = renderer_of(request_of(max_output_tokens=1))
    event = events_of(stream_of([AnswerText(0, 0, 1, "a"), ChoiceEnd(0, "length")], renderer))[-1]
    assert event["type"] == "response.incomplete"
    response = event["response"]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["total_tokens"] == 14


def test_a_whole_call_in_an_answer_that_was_too_long_is_completed() -> None:
    parts: list[Part] = [
        CallStart(0, 0, "c", "f"),
        CallArguments(0, 0, "{}"),
        ChoiceEnd(0, "length"),
    ]
    response = events_of(stream_of(parts))[-1]["response"]
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "completed")


def test_a_failure_is_told_twice() -> None:
    renderer = renderer_of()
    events = events_of(
        renderer.first()
        + bytes_of(renderer, [AnswerText(0, 0, 2, "ab")])
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
    """Logprobs of half a character go with the whole one; markup of calls has none."""
    one = (TokenLogprob(1, -0.5),)
    parts: list[Part] = [
        AnswerText(0, 0, 1, "", one),
        AnswerText(0, 1, 1, "é", one),
        AnswerText(0, 2, 1, "", one),
        CallStart(0, 0, "call_1", "f"),
        AnswerText(0, 3, 1, "!", one),
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
    response = events_of(renderer_of(decode(DECODER, body)).first())[0]["response"]
    assert response["tools"][0]["parameters"] == {"type": "object"}
    assert response["text"]["format"]["schema"] == {"type": "object"}


@pytest.mark.parametrize("depth", range(850, 960, 5))
def test_a_deep_schema_is_refused_or_told_again(depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "name": "f", "parameters": {deep}}}'
    body = f'{{"model": "echo", "input": "x", "tools": [{tool}]}}'
    try:
        renderer = renderer_of(decode(DECODER, body))
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


@pytest.mark.parametrize(
    ("tokens", "text", "num_kept"),
    [
        ([b"net", b"work."], "network.", 2),
        ([b"net", b"work.", b"<|end|>"], "network.", 2),
        ([b"\xc3", b"\xa9", b"<|end|>"], "\u00e9", 2),
        ([b"x", b"<|end|>"], "y", 2),
        ([b"<|end|>"], "network", 1),
    ],
)
def test_the_token_that_ends_an_answer_is_none_of_its_text(
    tokens: list[bytes], text: str, num_kept: int
) -> None:
    infos = tuple(LogprobInfo(token="", logprob=-1.0, bytes=tuple(one)) for one in tokens)
    assert _without_end(infos, text) == infos[:num_kept]
