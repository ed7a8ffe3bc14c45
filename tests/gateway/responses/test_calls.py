"""Cut calls that clients send back, and answers replayed from the store."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from millrace.gateway.responses.replay import replayed
from millrace.registry.tool_formats.freeform import arguments_of_input
from tests.gateway.responses.fronts import says
from tests.gateway.responses.rendered import events_of
from tests.gateway.responses.test_codex import EDIT, RUN, body, called, prompt_of, user
from tests.registry.tool_formats.test_freeform_tools import PATCH
from tests.support.running_gateway import MODEL, RunningGateway


async def test_a_call_that_was_cut_goes_back_with_its_output(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    says(front, called("exec_command", '{"cmd": "ls"}'), "Cut.")
    first = await client.responses.create(
        model=MODEL, input="Run.", tools=[RUN], max_output_tokens=62
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert (first.status, call.status) == ("incomplete", "incomplete")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "it was cut"}
    sent_back: Any = [{"role": "user", "content": "Run."}, call.to_dict(), result]
    for fields in ({"input": sent_back}, {"input": [result], "previous_response_id": first.id}):
        says(front, "Again.")
        again = await client.responses.create(model=MODEL, tools=[RUN], **fields)
        assert again.output_text == "Again."
        assert prompt_of(front) == "user:Run.|assistant:exec_command|tool:it was cut"
    says(front, "Without.")
    await client.responses.create(model=MODEL, input="Go on.", previous_response_id=first.id)
    assert prompt_of(front) == "user:Run.|user:Go on."


async def test_a_custom_call_that_was_cut(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    says(front, called("apply_patch", arguments_of_input(PATCH)), "Cut.")
    first = await client.responses.create(
        model=MODEL, input="Edit.", tools=[EDIT], max_output_tokens=80
    )
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert PATCH.startswith(call.input)
    assert call.to_dict()["status"] == "incomplete"
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "cut"}
    await client.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
    assert prompt_of(front) == "user:Edit.|assistant:apply_patch|tool:cut"


async def test_a_stop_string_within_the_input_of_a_custom_tool(
    front: RunningGateway, http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    """The answer is whole, streamed, and replayed from a stored background answer."""
    edit = called("apply_patch", arguments_of_input(PATCH))
    made, _, _ = edit.partition("End Patch")
    partial, _, _ = PATCH.partition("End Patch")
    front.worker.stop_reason = "End Patch"
    front.worker.script = lambda _job: "I edit." + made
    fields: dict[str, Any] = {"model": MODEL, "input": "x", "tools": [EDIT], "stop": "End Patch"}
    response = (await http.post("/v1/responses", json=fields)).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "stop"}
    message, call = response["output"]
    assert message["status"] == "completed"
    assert (call["input"], call["status"]) == (partial, "incomplete")

    streamed = await http.post(
        "/v1/responses", json=fields | {"stream": True, "background": True, "store": True}
    )
    events = events_of(streamed.content)
    assert "response.custom_tool_call_input.done" not in {event["type"] for event in events}
    assert events[-1]["type"] == "response.incomplete"
    deltas = [one["delta"] for one in events if one["type"].endswith("call_input.delta")]
    assert "".join(deltas) == partial
    response_id = events[-1]["response"]["id"]
    stream = await client.responses.retrieve(response_id, stream=True)
    assert _joined([event.to_dict() async for event in stream]) == _joined(events)


@pytest.mark.parametrize("last", ["", "Then I stop."])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", '{"commands": "ls"}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": 0}'),
        ("tool_search", "[]"),
        ("apply_patch", '{"type": "no_change"}'),
        ("local_shell", '{"command": [], "timeout_ms": 0}'),
        ("local_shell", '{"command": ["ls"], "user": ""}'),
    ],
)
async def test_calls_of_built_in_tools_are_replayed_as_they_were_streamed(
    front: RunningGateway, http: httpx.AsyncClient, name: str, arguments: str, last: str
) -> None:
    tools = [
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client"},
    ]
    says(front, called(name, arguments) + called("local_shell", '{"command": ["ls"]}') + last)
    fields = {"parallel_tool_calls": True, "tools": tools}
    await _check_replay(http, body(user("x"), **fields))


async def test_an_answer_is_replayed_as_it_was_streamed(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    says(
        front,
        "I see."
        + called("apply_patch", arguments_of_input(PATCH))
        + called("mcp__demo__lookup_order", '{"order_id": "7"}')
        + called("local_shell", '{"command":["ls"]}'),
    )
    fields = {"parallel_tool_calls": True, "include": ["message.output_text.logprobs"]}
    await _check_replay(http, body(user("x"), **fields))


async def _check_replay(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    streamed = await http.post("/v1/responses", json=fields)
    assert streamed.status_code == 200, streamed.text
    events = _joined(events_of(streamed.content))
    last = json.dumps(events[-1]["response"]).encode()
    again = replayed(last, -1)
    assert _joined([json.loads(msgspec.json.encode(event)) for event in again]) == events


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with all deltas of a part as one."""
    told: list[dict[str, Any]] = []
    for event in events:
        if told and "delta" in event and event["type"] == told[-1]["type"]:
            logprobs = told[-1].get("logprobs", []) + event.get("logprobs", [])
            told[-1] = {**event, "delta": told[-1]["delta"] + event["delta"]}
            if logprobs:
                told[-1]["logprobs"] = logprobs
        else:
            told.append(event)
    return told
