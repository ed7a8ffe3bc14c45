"""Answers are held to a form by every API, and bad forms are refused by each."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import httpx
import openai
import pytest

from millrace.bus.api import Bus
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.e2e.clients import ask_nats, ask_sse, ask_websocket, chat_body
from tests.e2e.interruptions import assert_streams_survive_the_worker
from tests.e2e.schema_answers import check_schema_answer
from tests.support.system import System

pytestmark = pytest.mark.e2e

NUM_STREAMS = 6
QUESTION = "What is TTFT?"
DATE = r"[12][0-9]{3}-[01][0-9]-[0-3][0-9]"


async def test_openai_client_gets_what_its_schema_says(system: System) -> None:
    await check_schema_answer(system, QUESTION, longest=60)


async def test_streams_and_sockets_and_jobs_are_held_to_a_form(
    system: System, http: httpx.AsyncClient, bus: Bus
) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text=DATE)
    answers = [
        await ask_sse(http, QUESTION, guided_regex=DATE),
        await ask_websocket(system.websocket, QUESTION, guided_regex=DATE),
        await ask_nats(bus, f"form-{uuid.uuid4().hex[:8]}", QUESTION, grammar=grammar),
    ]
    assert all(re.fullmatch(DATE, answer.text) for answer in answers)
    assert {(answer.text, answer.finish_reason) for answer in answers} == {
        (answers[0].text, "stop")
    }, "the same seedless greedy answer by every API"


async def test_openai_client_gets_one_of_its_choices(system: System) -> None:
    """A choice with special characters is taken literally, in the two forms of vLLM's clients."""
    choices = ["a.b*c", "(x)[y]{z}", "^$|\\", "two words\n", "漢字", "a-b&c#d~e"]
    async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none") as client:
        forms: list[tuple[dict[str, Any], list[str]]] = [
            ({"structured_outputs": {"choice": [choice]}}, [choice]) for choice in choices
        ]
        for form, expected in [*forms, ({"guided_choice": choices}, choices)]:
            completion = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                extra_body=form,
            )
            assert completion.choices[0].message.content in expected
            assert completion.choices[0].finish_reason == "stop"


async def test_openai_client_gets_the_blanks_that_it_asks_for(system: System) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none") as client:
        for blanks, pattern in (
            ({}, r"\[ ?1 ?, ?1 ?, ?1 ?\]"),
            ({"disable_any_whitespace": True}, r"\[1,1,1\]"),
            ({"whitespace_pattern": "\n"}, r"\[\n?1\n?,\n?1\n?,\n?1\n?\]"),
        ):
            completion = await client.completions.create(
                model="demo",
                prompt=QUESTION,
                max_tokens=64,
                temperature=2.0,
                seed=1,
                extra_body={"structured_outputs": {"json": schema} | blanks},
            )
            assert re.fullmatch(pattern, completion.choices[0].text)


async def test_answers_keep_their_form_when_the_worker_is_killed(
    system: System, http: httpx.AsyncClient
) -> None:
    form = {"guided_regex": f"({DATE} [a-z]+ ){{60}}", "max_tokens": 400}

    await assert_streams_survive_the_worker(
        system,
        http,
        lambda i: ask_sse(http, f"{QUESTION} {i}", **form),
        NUM_STREAMS,
    )


async def test_a_stop_string_ends_it_within(http: httpx.AsyncClient) -> None:
    answer = await ask_sse(http, QUESTION, guided_regex="[ab]{5}-[cd]{90}", stop="-")
    assert re.fullmatch("[ab]{5}", answer.text)
    assert answer.finish_reason == "stop"


LOOP = {
    "$defs": {"Loop": {"type": "object", "properties": {}, "required": ["a"]}},
    "$ref": "#/$defs/Loop",
}
LOOP["$defs"]["Loop"]["properties"]["a"] = {"$ref": "#/$defs/Loop"}  # type: ignore[index]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"a": schema}}}}
    for name, schema in (("good", {"type": "string"}), ("bad", {"pattern": "(", "type": "string"}))
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": LOOP}, "nothing finite matches"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": LOOP},
                }
            },
            "nothing finite matches",
        ),
        ({"guided_json": {"type": "object", "minProperties": 2}}, "minProperties"),
        ({"guided_grammar": 'x: "a"\nstart: x b'}, "line 2, column 8: unknown name"),
        ({"tools": TOOLS, "tool_choice": "required"}, "the parameters of the tool bad: regex"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_grammar": 'start: "a" b'}, "unknown name"),
        ({"guided_json": {"type": "objct"}}, "objct"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_form_is_a_bad_request(
    http: httpx.AsyncClient, fields: dict[str, Any], message: str, stream: bool
) -> None:
    response = await http.post(
        "/v1/chat/completions", json=chat_body(QUESTION, stream=stream, **fields)
    )
    if response.status_code == 200:
        # The stream was open already: the error is its last event.
        error = json.loads(response.text.split("data: ")[-1])["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("grammar_invalid", "invalid_parameter")
    assert message in error["message"]
    assert error["param"].startswith(next(iter(fields)))
