"""Keywords of tools' schemas that calls cannot be held to, at each endpoint."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from millrace.schemas.notices import NOTICE_NAME
from tests.support.running_gateway import MODEL, RunningGateway

# As zod writes an e-mail address.
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
MAIL = {"type": "object", "properties": {"to": {"type": "string", "pattern": EMAIL}}}
PLAIN = {"type": "object", "properties": {"at": {"type": "string"}}}
DROPPED = {
    "code": "schema_keyword_dropped",
    "param": "tools",
    "detail": "mail.properties.to.pattern",
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


def chat(strict: bool, choice: Any, **more: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}
        for name, parameters in (("look", PLAIN), ("mail", MAIL))
    ]
    messages = [{"role": "user", "content": CALL}]
    return {"model": MODEL, "messages": messages, "tools": tools, "tool_choice": choice, **more}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def responses(strict: bool, choice: Any, **more: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": name, "parameters": parameters, "strict": strict}
        for name, parameters in (("look", PLAIN), ("mail", MAIL))
    ]
    return {"model": MODEL, "input": CALL, "tools": tools, "tool_choice": choice, **more}


def messages(strict: bool, choice: Any, **more: Any) -> dict[str, Any]:
    tools = [
        {"name": name, "input_schema": parameters, "strict": strict}
        for name, parameters in (("look", PLAIN), ("mail", MAIL))
    ]
    turns = [{"role": "user", "content": CALL}]
    body = {"model": MODEL, "max_tokens": 200, "messages": turns, "tools": tools}
    return {**body, "tool_choice": choice, **more}


DOORS = [
    ("/v1/chat/completions", chat, "required", named("look")),
    ("/v1/responses", responses, "required", {"type": "function", "name": "look"}),
    ("/v1/messages", messages, {"type": "any"}, {"type": "tool", "name": "look"}),
]


@pytest.mark.parametrize(("path", "body", "any_tool", "other_tool"), DOORS)
async def test_a_tool_that_is_not_strict_does_without_and_the_answer_says_so(
    http: httpx.AsyncClient, path: str, body: Any, any_tool: Any, other_tool: Any
) -> None:
    answer = await http.post(path, json=body(False, any_tool))
    assert answer.status_code == 200, answer.text
    assert answer.json()[NOTICE_NAME] == [DROPPED]
    assert 'detail="mail.properties.to.pattern"' in answer.headers[NOTICE_NAME]
    streamed = await http.post(path, json=body(False, any_tool, stream=True))
    last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
    assert json.dumps(DROPPED, separators=(",", ":")) in last
    other = await http.post(path, json=body(False, other_tool))
    assert (other.status_code, NOTICE_NAME in other.headers) == (200, False)


@pytest.mark.parametrize(("path", "body", "any_tool", "other_tool"), DOORS)
async def test_a_strict_tool_is_refused_by_tool_place_and_keyword(
    http: httpx.AsyncClient, path: str, body: Any, any_tool: Any, other_tool: Any
) -> None:
    answer = await http.post(path, json=body(True, any_tool))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    for word in ("mail", "properties.to", "pattern", "strict"):
        assert word in message
    other = await http.post(path, json=body(True, other_tool))
    assert (other.status_code, NOTICE_NAME in other.headers) == (200, False)


async def test_nothing_is_dropped_where_nothing_is_held(http: httpx.AsyncClient) -> None:
    for choice in ("auto", "none"):
        answer = await http.post("/v1/chat/completions", json=chat(False, choice))
        assert (answer.status_code, NOTICE_NAME in answer.headers) == (200, False)


async def test_a_job_carries_the_grammar_that_is_left(
    http: httpx.AsyncClient, front: RunningGateway
) -> None:
    await http.post("/v1/chat/completions", json=chat(False, "required"))
    (job,) = front.worker.jobs
    assert job.sampling.grammar is not None
    assert "(?!" not in job.sampling.grammar.text
    assert [one.detail for one in job.notices] == [DROPPED["detail"]]


async def test_each_keyword_is_named_once_and_there_are_not_too_many(
    http: httpx.AsyncClient,
) -> None:
    properties = {f"p{i}": {"type": "array", "uniqueItems": True} for i in range(20)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    body = chat(False, "required") | {"tools": [tool], "n": 2}
    notices = (await http.post("/v1/chat/completions", json=body)).json()[NOTICE_NAME]
    assert len(notices) == 16
    assert notices[-1] == {"code": "notices_left_out", "detail": "5"}


@pytest.mark.parametrize(
    ("path", "body", "field", "form"),
    [
        (
            "/v1/chat/completions",
            chat,
            "response_format.json_schema.schema",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": MAIL},
                }
            },
        ),
        ("/v1/chat/completions", chat, "guided_json", {"guided_json": MAIL}),
        (
            "/v1/responses",
            responses,
            "text.format.schema",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": MAIL}}},
        ),
        (
            "/v1/messages",
            messages,
            "output_config.format.schema",
            {"output_config": {"format": {"type": "json_schema", "schema": MAIL}}},
        ),
    ],
)
async def test_a_schema_of_the_answer_beside_tools_is_refused_in_the_caller_s_words(
    http: httpx.AsyncClient, path: str, body: Any, field: str, form: Any
) -> None:
    choice = {"type": "auto"} if path == "/v1/messages" else "auto"
    answer = await http.post(path, json=body(False, choice, **form))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "properties.to" in error["message"]
    assert error["param"] == field
