"""Calls that were cut and sent back, and answers that are told again from what is kept of them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai

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
    streamed = await http.post("/v1/responses", json=body(user("x"), **fields))
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
