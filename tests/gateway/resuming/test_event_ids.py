"""Event ids: a stream resumed after an id sends the rest and repeats nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from millrace.gateway.api.event_ids import EventId, event_id, parse_event_id
from millrace.gateway.models import LoadedModels
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.config import RedisConfig
from millrace.schemas.errors import ParameterError
from millrace.schemas.models.cards import ModelCard
from tests.gateway.resuming.clients import TAKES_EVENTS, Pair
from tests.support.running_gateway import MODEL, ByteModel, running_gateway
from tests.support.waiting import eventually

SAID = "I look at both."
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
)
FUNCTION: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
CUSTOM_CALL = (
    '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nm\u00fchle"}}\n</tool_call>\n'
)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | more


THOUGHTS = "<think>\nIs it?\n\nIt is.\n</think>\n\nIt is."
ANSWERS = [
    ("/v1/chat/completions", chat(THOUGHTS)),
    ("/v1/chat/completions", chat(THOUGHTS, n=2, logprobs=True, return_token_ids=True)),
    ("/v1/chat/completions", chat(THOUGHTS, include_reasoning=False, logprobs=True)),
    ("/v1/responses", {"input": THOUGHTS, "store": False}),
    ("/v1/messages", chat(THOUGHTS, max_tokens=99, thinking={"type": "adaptive"})),
    ("/v1/messages", chat(THOUGHTS, max_tokens=99)),
]

STREAMS: list[Any] = [
    pytest.param("/v1/chat/completions", chat("the mill"), id="chat"),
    pytest.param(
        "/v1/chat/completions",
        chat("mill", n=2, stream_options={"include_usage": True}),
        id="chat-two-choices",
    ),
    pytest.param(
        "/v1/chat/completions",
        chat("m\u00fchle", logprobs=True, top_logprobs=1, return_token_ids=True),
        id="chat-logprobs",
    ),
    pytest.param(
        "/v1/chat/completions",
        chat(
            f"{SAID}\n{CALLS}",
            tools=[{"type": "function", "function": FUNCTION}],
            stream_options={"include_usage": True},
        ),
        id="chat-calls",
    ),
    pytest.param("/v1/completions", {"prompt": "the mill"}, id="completions"),
    pytest.param(
        "/v1/completions",
        {"prompt": ["mill", "race"], "stream_options": {"include_usage": True}},
        id="completions-two-prompts",
    ),
    pytest.param(
        "/v1/completions",
        {"prompt": "m\u00fchle", "echo": True, "logprobs": 1},
        id="completions-echo",
    ),
    pytest.param("/v1/responses", {"input": "the mill", "store": False}, id="responses"),
    pytest.param(
        "/v1/responses",
        {
            "input": f"{SAID}\n{CALLS}",
            "store": False,
            "tools": [{"type": "function", **FUNCTION}],
        },
        id="responses-calls",
    ),
    pytest.param("/v1/messages", chat("the mill", max_tokens=99), id="messages"),
    pytest.param(
        "/v1/messages",
        chat(
            f"{SAID}\n{CALLS}",
            max_tokens=999,
            tools=[{"name": "look", "input_schema": {"type": "object"}}],
        ),
        id="messages-calls",
    ),
    pytest.param(
        "/v1/messages", chat("the mill", max_tokens=99, stop_sequences=["ill"]), id="messages-stop"
    ),
    pytest.param(
        "/v1/chat/completions",
        chat(
            f"{SAID}\n{CUSTOM_CALL}{CALLS}",
            tools=[
                {"type": "custom", "custom": {"name": "note"}},
                {"type": "function", "function": FUNCTION},
            ],
            max_tokens=150,
        ),
        id="chat-custom-call-and-cut-call",
    ),
    pytest.param(
        "/v1/chat/completions",
        chat(
            f"{SAID}\n{CUSTOM_CALL}",
            tools=[{"type": "custom", "custom": {"name": "note"}}],
            max_tokens=76,
        ),
        id="chat-cut-custom-call",
    ),
    pytest.param(
        "/v1/responses",
        {
            "input": f"{SAID}\n{CUSTOM_CALL}{CUSTOM_CALL}",
            "store": False,
            "tools": [{"type": "custom", "name": "note"}],
            "max_output_tokens": 150,
        },
        id="responses-custom-call-and-cut-call",
    ),
    pytest.param(
        "/v1/responses",
        {
            "input": f"{SAID}\n"
            + CALLS.replace("look", "shell").replace('{"at": "sky"}', '{"commands": ["ls"]}'),
            "store": False,
            "tools": [{"type": "shell", "environment": {"type": "local"}}],
        },
        id="responses-built-in-calls",
    ),
    pytest.param(
        "/v1/messages",
        chat(
            f"{SAID}\n{CALLS}",
            max_tokens=140,
            tools=[{"name": "look", "input_schema": {"type": "object"}}],
        ),
        id="messages-cut-call",
    ),
]


def events_of(body: str) -> list[tuple[str, str]]:
    """Id and data of each event."""
    events = []
    for event in body.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if "data" in lines:
            events.append((lines.get("id", ""), lines["data"]))
    return events


def told(events: list[tuple[str, str]]) -> dict[Any, list[Any]]:
    """Return the events of each choice, with consecutive deltas joined."""
    lists: dict[Any, list[Any]] = {}
    for _, data in events:
        event = {} if data == "[DONE]" else json.loads(data)
        event.pop("sequence_number", None)
        choices = event.get("choices") or [{}]
        key = choices[0].get("index", "all" if "choices" in event or not event else 0)
        of_choice = lists.setdefault(key, [])
        text = _take_text(event)
        if text is None:
            of_choice.append(event or data)
        elif of_choice and isinstance(of_choice[-1], tuple) and of_choice[-1][0] == event:
            of_choice[-1] = (event, _added(of_choice[-1][1], text))
        else:
            of_choice.append((event, text))
    return lists


def _added(one: list[Any], other: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _take_text(event: dict[str, Any]) -> list[Any] | None:
    """Take the text and the tokens' fields out of a delta, and return the text."""
    choice = (event.get("choices") or [None])[0]
    if choice is not None and choice["finish_reason"] is None:
        delta = choice.get("delta", choice)
        if delta.get("role") or "id" in (delta.get("tool_calls") or [{}])[0]:
            return None
        calls = delta.get("tool_calls")
        place, name = _place_in(calls[0]) if calls else (delta, _name_in(delta))
        texts = [place.pop(name, "")]
        delta.pop("reasoning", None)
        logprobs = choice.pop("logprobs", None) or {}
        texts.append([*(logprobs.get("content") or []), *(logprobs.get("tokens") or [])])
        texts.append(logprobs.get("text_offset") or [])
        texts.append(choice.pop("token_ids", None) or [])
        return texts
    kind = event.get("type", "")
    if kind == "content_block_delta":
        delta = event["delta"]
        name = next((one for one in ("text", "partial_json", "thinking") if one in delta), "")
        return [delta.pop(name)] if name else None
    if kind.endswith(".delta"):
        event.pop("logprobs", None)
        return [event.pop("delta")]
    return None


def _place_in(call: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return (call["custom"], "input") if "custom" in call else (call["function"], "arguments")


def _name_in(delta: dict[str, Any]) -> str:
    return next((one for one in ("content", "text", "reasoning_content") if one in delta), "")


async def whole_and_rests(
    pair: Pair, path: str, body: dict[str, Any], tokens_per_frame: int
) -> None:
    """Cut a stream after each of its events and resume it at the two gateways in turn."""
    pair.worker.tokens_per_frame = tokens_per_frame
    body = {"model": MODEL, "stream": True, "temperature": 0} | body
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as first,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as second,
    ):
        answer = await first.post(path, json=body, headers=TAKES_EVENTS)
        assert answer.status_code == 200, answer.text
        whole = events_of(answer.text)
        assert all(event_id for event_id, _ in whole), "each event has an id"
        assert len({event_id for event_id, _ in whole}) == len(whole)
        for number, (last_id, _) in enumerate(whole):
            at = second if number % 2 else first
            rest = await at.post(path, json=body, headers={"Last-Event-ID": last_id})
            assert rest.status_code == 200, (last_id, rest.text)
            together = [*whole[: number + 1], *events_of(rest.text)]
            assert told(together) == told(whole), last_id
            if path == "/v1/responses":
                numbers = [json.loads(data)["sequence_number"] for _, data in together]
                assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("tokens_per_frame", [1, 7, 500])
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_resumed_after_any_event_sends_the_rest(
    pair: Pair, path: str, body: dict[str, Any], tokens_per_frame: int
) -> None:
    await whole_and_rests(pair, path, body, tokens_per_frame)


@pytest.mark.parametrize("tokens_per_frame", [1, 7, 500])
@pytest.mark.parametrize(("path", "body"), ANSWERS)
async def test_a_stream_resumed_after_any_event_of_thoughts_sends_the_rest(
    redis: RedisConfig, path: str, body: dict[str, Any], tokens_per_frame: int
) -> None:
    model = ByteModel()
    model.reasoning_format = ReasoningFormat()
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    models = LoadedModels({MODEL: card}, lambda _name: model)
    async with (
        running_gateway(models=models, redis=redis) as first,
        running_gateway(
            models=models, redis=redis, gateway_id="gw-2", broker=first.broker
        ) as second,
    ):
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        await whole_and_rests(Pair(first, second), path, body, tokens_per_frame)


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_ids_of_tokens_alone_are_taken(pair: Pair, path: str, body: dict[str, Any]) -> None:
    """Earlier streams had ids of token indices alone."""
    body = {"model": MODEL, "stream": True, "temperature": 0} | body
    async with httpx.AsyncClient(base_url=pair.second.url, timeout=10) as http:
        whole = events_of((await http.post(path, json=body, headers=TAKES_EVENTS)).text)
        ids = [parse_event_id(one) for one, _ in whole]
        for number in range(len(whole) - 1):
            is_last_of_token = ids[number].indices != ids[number + 1].indices
            if not (is_last_of_token and any(ids[number].indices)):
                continue
            if any('"finish_reason":"' in data for _, data in whole[: number + 1]):
                break  # that a choice has ended is not said by its tokens
            indices = ",".join(map(str, ids[number].indices))
            last_id = f"{ids[number].request_id}/{indices}"
            rest = await http.post(path, json=body, headers={"Last-Event-ID": last_id})
            together = [*whole[: number + 1], *events_of(rest.text)]
            assert told(together) == told(whole), last_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chatcmpl-1/5", EventId("chatcmpl-1", (5,))),
        ("a/5,0", EventId("a", (5, 0))),
        ("a/5,0~7,9", EventId("a", (5, 0), (7, 9))),
        ("a/0~0~2", EventId("a", (0,), (0,), 2)),
    ],
)
def test_ids_are_read(text: str, expected: EventId) -> None:
    assert parse_event_id(text) == expected
    if expected.told is not None:
        request_id, indices, told_of, others = expected
        assert event_id(request_id, indices, told_of or (), others) == text


@pytest.mark.parametrize(
    "text", ["a", "a/", "a/x", "/5", "a/5~", "a/5,6~1", "a/5~1,2", "a/5~~1", "a/5~1~2~3", "a~1/5"]
)
def test_a_malformed_event_id_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="Last-Event-ID"):
        parse_event_id(text)
