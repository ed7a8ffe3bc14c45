"""Grammars that the worker cannot compile: the error names the request's field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from millrace.schemas.errors import GrammarError
from millrace.schemas.frames import Failed
from tests.gateway.resuming.clients import opened, send, until
from tests.support.running_gateway import MODEL, RunningGateway

_ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "objct"}}}
_NAMED = {"name": "x", "schema": _SCHEMA}
_FORMAT = {"response_format": {"type": "json_schema", "json_schema": _NAMED}}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}
_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", _FORMAT, "response_format.json_schema.schema"),
    ("/v1/completions", _FORMAT, "response_format.json_schema.schema"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema"} | _NAMED}}, "text.format.schema"),
    (
        "/v1/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
        "output_config.format.schema",
    ),
    ("/v1/chat/completions", {"tools": [_TOOL], "tool_choice": "required"}, "tools"),
    ("/v1/chat/completions", {"tools": [_TOOL]} | _FORMAT, "response_format.json_schema.schema"),
    (
        "/v1/messages",
        {
            "tools": [{"name": "look", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any"},
        },
        "tools",
    ),
    *(
        (path, fields, param)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
        for fields, param in (
            ({"guided_regex": "(a"}, "guided_regex"),
            ({"guided_json": {"type": "objct"}}, "guided_json"),
            ({"guided_grammar": "start: b"}, "guided_grammar"),
            ({"structured_outputs": {"json": {"type": "objct"}}}, "structured_outputs.json"),
            ({"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_json"),
        )
    ),
]


@pytest.fixture
def front(front: RunningGateway) -> RunningGateway:
    why = "The grammar is invalid."
    front.worker.end_with = Failed(code=GrammarError.code, message=why, retryable=False)
    return front


@pytest.mark.parametrize(("path", "fields", "param"), _FIELDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_field_at_fault_is_named(
    front: RunningGateway,
    http: httpx.AsyncClient,
    path: str,
    fields: dict[str, Any],
    param: str,
    stream: bool,
) -> None:
    body = {"model": MODEL, "stream": stream} | _ASKS[path] | fields
    answer = await http.post(path, json=body)
    if answer.status_code == 200:
        lines = [one for one in answer.text.splitlines() if one.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        error = next(one.get("error", one) for one in events if _is_error(one))
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, GrammarError.code)


def _is_error(event: dict[str, Any]) -> bool:
    return event.get("type") == "error" or "error" in event


async def test_the_field_at_fault_is_named_over_a_websocket(front: RunningGateway) -> None:
    async with opened(front) as socket:
        body = {"model": MODEL, "prompt": "hi", "guided_regex": "(a"}
        await send(socket, "generate", id="a", **body)
        *_, error = await until(socket, "error")
    assert (error["param"], error["code"]) == ("guided_regex", GrammarError.code)


async def test_no_field_is_named_without_a_requested_form(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    path = "/v1/chat/completions"
    answer = await http.post(path, json={"model": MODEL} | _ASKS[path])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
