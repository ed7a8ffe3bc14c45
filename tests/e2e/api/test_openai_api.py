"""OpenAI's own client against the running system, on everything that it can ask."""

from __future__ import annotations

import base64
import json
import math
import struct
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.clients import chat_body
from tests.e2e.weather import CITY, FORECAST, PARAMETERS
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

ASK: Any = [{"role": "user", "content": "What is TTFT?"}]
GREEDY: dict[str, Any] = {"model": "demo", "messages": ASK, "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "words": {"type": "integer"}},
    "required": ["sure", "words"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(system: System) -> AsyncIterator[openai.AsyncOpenAI]:
    async with _client(system, "none") as made:
        yield made


def _client(system: System, key: str) -> openai.AsyncOpenAI:
    base_url = f"{system.http}/v1"
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60.0)


async def test_a_stream_says_what_the_whole_answer_says(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**GREEDY)
    stream = await client.chat.completions.create(
        **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = _text(chunks)
    assert "first token" in text.lower()
    assert whole.choices[0].message.content == text
    assert len(chunks) > 4, "it did not stream"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0


async def test_choices_have_seeds_of_their_own(client: openai.AsyncOpenAI) -> None:
    story: Any = [{"role": "user", "content": "Tell a tale of three rivers"}]
    options: dict[str, Any] = {"model": "demo", "messages": story, "seed": 5, "max_tokens": 32}
    both = await client.chat.completions.create(**options, temperature=2, n=2)
    alone = await client.chat.completions.create(**options, temperature=2)
    first, second = both.choices
    assert [first.index, second.index] == [0, 1]
    assert first.message.content == alone.choices[0].message.content
    assert first.message.content != second.message.content


async def test_logprobs_of_a_chat_and_of_an_echoed_prompt(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        **GREEDY, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(one.token for one in logprobs.content) == chat.choices[0].message.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == one.logprob, "the likeliest was taken"
    text = await client.completions.create(
        model="demo", prompt="The first token", echo=True, logprobs=1, max_tokens=4, temperature=0
    )
    assert text.choices[0].text.startswith("The first token")
    found = text.choices[0].logprobs
    assert found is not None
    values: list[Any] = list(found.token_logprobs or ())
    assert values[0] is None, "nothing stands before the first token"
    assert len(values) > 4
    assert all(value <= 0 for value in values[1:])


async def test_an_answer_fits_the_schema_that_was_given(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        **GREEDY,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        },
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


async def test_a_call_that_is_demanded_is_made(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = GREEDY | {"tools": [WEATHER], "tool_choice": "required"}
    whole = await client.chat.completions.create(**options, parallel_tool_calls=False)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": CITY}
    assert whole.choices[0].finish_reason == "tool_calls"

    name, arguments, reason = "", "", ""
    stream = await client.chat.completions.create(**options, parallel_tool_calls=False, stream=True)
    async for chunk in stream:
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, arguments, reason) == ("weather", call.function.arguments, "tool_calls")

    answered = await client.chat.completions.create(
        model="demo",
        messages=[
            *ASK,
            {"role": "assistant", "tool_calls": [call.to_dict()]},
            {"role": "tool", "tool_call_id": call.id, "content": FORECAST},
        ],
        tools=[WEATHER],
        max_tokens=16,
    )
    assert answered.choices[0].message.content


async def test_a_stop_string_within_a_demanded_call(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = GREEDY | {"tools": [WEATHER], "tool_choice": "required"}
    answer = await client.chat.completions.create(**options, stop=["}"])
    [choice] = answer.choices
    assert (choice.finish_reason, choice.to_dict()["stop_reason"]) == ("stop", "}")
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


async def test_the_gateway_runs_its_own_tool(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        **GREEDY, tool_choice="required", extra_body={"server_tools": ["weather"]}, max_tokens=64
    )
    [step, *_] = answer.to_dict()["tool_steps"]
    assert (step["name"], json.loads(step["arguments"])) == ("weather", {"city": CITY})
    assert json.loads(step["output"]) == {"city": CITY, "forecast": FORECAST}
    assert answer.choices[0].message.tool_calls is None


async def test_embeddings_in_both_encodings(client: openai.AsyncOpenAI) -> None:
    texts = ["a lease", "a worker"]
    floats = await client.embeddings.create(
        model="demo", input=texts, dimensions=16, encoding_format="float"
    )
    packed = await client.embeddings.create(
        model="demo", input=texts, dimensions=16, encoding_format="base64"
    )
    for one, other in zip(floats.data, packed.data, strict=True):
        encoded: Any = other.embedding
        unpacked = struct.unpack("<16f", base64.b64decode(encoded))
        assert one.embedding == pytest.approx(unpacked, abs=1e-5)
        assert math.hypot(*unpacked) == pytest.approx(1.0, abs=1e-5)
    assert floats.usage.prompt_tokens == packed.usage.prompt_tokens > 0


async def test_responses_follow_one_another(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(
        model="demo", input="What is TTFT?", temperature=0, instructions="Be brief."
    )
    assert "first token" in first.output_text.lower()
    stream = await client.responses.create(
        model="demo",
        input="What is a KV cache?",
        previous_response_id=first.id,
        temperature=0,
        stream=True,
    )
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == last.response.output_text
    assert last.response.previous_response_id == first.id
    assert first.usage is not None
    assert last.response.usage is not None
    assert last.response.usage.input_tokens > first.usage.total_tokens
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text


async def test_a_batch_is_answered_line_by_line(client: openai.AsyncOpenAI) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": chat_body(f"What is TTFT? {number}", max_tokens=8),
        }
        for number in range(6)
    ]
    lines[-1]["body"] = chat_body("What is TTFT?", max_tokens=-1)
    data = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    async def is_over() -> bool:
        nonlocal batch
        batch = await client.batches.retrieve(batch.id)
        return batch.status == "completed"

    await eventually(is_over, timeout_s=30.0, what="the batch's end")
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = await _lines(client, batch.output_file_id)
    assert {answer["custom_id"] for answer in answers} == {f"line-{n}" for n in range(5)}
    for answer in answers:
        assert answer["response"]["body"]["choices"][0]["message"]["content"]
    [refused] = await _lines(client, batch.error_file_id)
    assert refused["custom_id"] == "line-5"
    assert refused["response"]["status_code"] == 400


async def _lines(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def test_models_tell_their_windows(client: openai.AsyncOpenAI) -> None:
    [model] = [one.to_dict() async for one in client.models.list()]
    assert model["id"] == "demo"
    assert model["max_model_len"] == 2048
    tiers = model["tier_context_tokens"]
    assert isinstance(tiers, dict)
    assert set(tiers) == {"enterprise", "pro", "free", "batch"}


async def test_one_key_gets_one_answer(system: System, client: openai.AsyncOpenAI) -> None:
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    drawn: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 24}
    first = await client.chat.completions.create(**drawn, extra_headers=headers)
    again = await client.chat.completions.create(**drawn, extra_headers=headers)
    assert again.to_dict() == first.to_dict()
    with pytest.raises(openai.ConflictError) as refused:
        await client.chat.completions.create(**drawn | {"n": 2}, extra_headers=headers)
    assert refused.value.code == "idempotency_conflict"
    query = f"SELECT count() AS n FROM requests FINAL WHERE request_id = '{first.id}'"
    await eventually(lambda: int(system.sql(query)[0]["n"]) == 1)


async def test_each_request_with_a_key_has_a_copy_of_the_running_stream(
    client: openai.AsyncOpenAI,
) -> None:
    options: dict[str, Any] = GREEDY | {"max_tokens": 300, "stream": True}
    options["extra_body"] = {"ignore_eos": True}
    options["extra_headers"] = {"Idempotency-Key": uuid.uuid4().hex}
    former = await client.chat.completions.create(**options)
    seen = [await anext(former) for _ in range(4)]
    latter = [chunk async for chunk in await client.chat.completions.create(**options)]
    seen += [chunk async for chunk in former]
    assert {chunk.id for chunk in (*seen, *latter)} == {seen[0].id}
    assert seen[-1].choices[0].finish_reason == latter[-1].choices[0].finish_reason == "length"
    assert _text(latter) == _text(seen), "each has it from its beginning to its end"


def _text(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_a_session_remembers(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    session_id = uuid.uuid4().hex
    first = await client.chat.completions.create(**GREEDY, extra_body={"session_id": session_id})
    second = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is a KV cache?"}],
        temperature=0,
        extra_body={"session_id": session_id},
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.total_tokens
    messages = (await http.get(f"/v1/sessions/{session_id}")).json()["messages"]
    assert [(turn["role"], turn["content"]) for turn in messages] == [
        ("user", "What is TTFT?"),
        ("assistant", first.choices[0].message.content),
        ("user", "What is a KV cache?"),
        ("assistant", second.choices[0].message.content),
    ]
    assert (await http.delete(f"/v1/sessions/{session_id}")).status_code == 200
    assert (await http.get(f"/v1/sessions/{session_id}")).status_code == 404


async def test_a_limit_holds_and_a_revoked_key_opens_nothing(system: System) -> None:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    made = json.loads(
        _keys(system, "create", "--tenant", tenant, "--tier", "free", "--requests-per-minute", "2")
    )
    async with _client(system, made["key"]) as limited:
        raw = await limited.chat.completions.with_raw_response.create(**GREEDY, max_tokens=4)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        await limited.chat.completions.create(**GREEDY, max_tokens=4)
        with pytest.raises(openai.RateLimitError) as refused:
            await limited.chat.completions.create(**GREEDY, max_tokens=4)
        assert refused.value.code == "requests_per_minute"
        assert 0 < int(refused.value.response.headers["retry-after"]) <= 60
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        _keys(system, "revoke", made["key_id"])
        with pytest.raises(openai.AuthenticationError) as closed:
            await limited.chat.completions.create(**GREEDY, max_tokens=4)
        assert closed.value.code == "invalid_api_key"

    async def charged() -> bool:
        [row] = system.sql(
            f"SELECT count() AS n FROM requests FINAL WHERE tenant = '{tenant}' AND tier = 'free'"
        )
        return int(row["n"]) == 2

    await eventually(charged, what="the records of two requests")


def _keys(system: System, *arguments: str) -> str:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "millrace.cli", "keys", *arguments),
            *("--json", "--data", str(system.data)),
        ],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
