"""``POST /v1/responses`` with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from millrace.gateway.tools.catalogue import load_tools
from millrace.schemas.config import RedisConfig
from millrace.schemas.frames import Failed
from millrace.schemas.sampling import GrammarKind
from tests.gateway.responses.fronts import says, transcribing_models
from tests.support.running_gateway import (
    MODEL,
    RunningGateway,
    running_gateway,
)
from tests.support.tool_server import reply, tool_server

_GOLDEN = Path(__file__).parents[1] / "golden" / "responses.sse"
_WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "What the sky does.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


async def test_text_is_answered(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model=MODEL, input="Grüße", instructions="Be brief.", metadata={"a": "b"}
    )
    assert response.output_text == "system:Be brief.|user:Grüße"
    assert response.id.startswith("resp-")
    assert (response.status, response.error, response.metadata) == ("completed", None, {"a": "b"})
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (29, 27, 56)
    assert usage.output_tokens_details.reasoning_tokens == 0


async def test_a_stream_is_put_together_by_the_client(client: openai.AsyncOpenAI) -> None:
    types: list[str] = []
    text = ""
    async with client.responses.stream(model=MODEL, input="hé") as stream:
        async for event in stream:
            types.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
        final = await stream.get_final_response()
    assert text == final.output_text == "user:hé"
    assert [kind for kind in types if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.usage is not None
    assert final.usage.output_tokens == 7


async def test_an_answer_that_is_cut_off_is_incomplete(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model=MODEL, input="hello", max_output_tokens=6)
    assert (response.status, response.output_text) == ("incomplete", "user:h")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(
        model=MODEL, input="hello", max_output_tokens=6, stream=True
    )
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"


async def test_tools_are_called_and_their_results_continue(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath"}}\n</tool_call>'
    says(front, "Let me look." + call, "Rain.")
    deltas = ""
    async with client.responses.stream(model=MODEL, input="Well?", tools=[_WEATHER]) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                deltas += event.delta
        first = await stream.get_final_response()
    message, called = first.output
    assert message.type == "message"
    assert called.type == "function_call"
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Bath"})
    assert deltas == called.arguments
    assert first.output_text == "Let me look."

    result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "wet"}
    second = await client.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, tools=[_WEATHER]
    )
    assert second.output_text == "Rain."
    prompt = bytes(front.worker.jobs[-1].prompt_token_ids or ()).decode()
    assert prompt == "user:Well?|assistant:Let me look.weather|tool:wet"


async def test_a_stop_string_within_a_call_leaves_the_answer_incomplete(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath"'
    says(front, cut, cut, "Rain.")
    front.worker.stop_reason = "}"
    asked: dict[str, Any] = {"model": MODEL, "input": "Well?", "tools": [_WEATHER]}
    stop = {"stop": ["}"]}
    whole = await client.responses.create(**asked, extra_body=stop)
    stream = await client.responses.create(**asked, extra_body=stop, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    streamed = events[-1].response
    assert "response.function_call_arguments.done" not in [event.type for event in events]
    for response in (whole, streamed):
        details = response.incomplete_details
        assert details is not None
        assert (response.status, str(details.reason)) == ("incomplete", "stop")
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.status, call.arguments) == ("incomplete", '{"city": "Bath"')

    front.worker.stop_reason = None
    after = await client.responses.create(
        model=MODEL, input="And now?", previous_response_id=streamed.id, tools=[_WEATHER]
    )
    assert after.output_text == "Rain."
    prompt = bytes(front.worker.jobs[-1].prompt_token_ids or ()).decode()
    assert prompt == "user:Well?|user:And now?"


async def test_tools_of_the_gateway_are_steps_of_the_answer(
    redis: RedisConfig, tmp_path: Path
) -> None:
    async with tool_server() as server:
        server.answers["/clock"] = reply("12:00")
        file = tmp_path / "tools.yaml"
        clock = {"url": server.url("/clock"), "allow_private": True}
        file.write_text(json.dumps({"tools": {"clock": clock}}))
        async with (
            running_gateway(
                models=transcribing_models(), redis=redis, tools=load_tools(str(file), {})
            ) as front,
            openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
        ):
            call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
            says(front, "A moment." + call, "Noon.", "Still.")
            own: Any = [{"type": "server", "name": "clock"}]
            events = await client.responses.create(
                model=MODEL, input="Time?", tools=own, stream=True
            )
            *_, last = [event async for event in events]
            assert last.type == "response.completed"
            first = last.response
            await client.responses.create(model=MODEL, input="?", previous_response_id=first.id)
            prompt = bytes(front.worker.jobs[-1].prompt_token_ids or ()).decode()
            absent: Any = [{"type": "server", "name": "absent"}]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model=MODEL, input="x", tools=absent)
    kinds = [item.type for item in first.output]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    assert first.output_text == "A moment.Noon."
    assert first.output[2].to_dict()["output"] == "12:00"
    assert prompt == "user:Time?|assistant:A moment.clock|tool:12:00|assistant:Noon.|user:?"
    assert caught.value.param == "tools"


async def test_a_schema_shapes_the_answer(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    class Place(pydantic.BaseModel):
        city: str

    says(front, '{"city":"Bath"}')
    response = await client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert response.output_parsed == Place(city="Bath")
    (job,) = front.worker.jobs
    assert job.sampling.grammar is not None
    assert job.sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(job.sampling.grammar.text)["required"] == ["city"]


async def test_bad_requests_are_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(model=MODEL, input="x", max_tool_calls=1)
    assert bad.value.param == "max_tool_calls"
    with pytest.raises(openai.NotFoundError) as absent:
        await client.responses.create(model="absent", input="x")
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(model=MODEL, input="x" * 5_000)
    assert long.value.code == "context_length_exceeded"


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns(
    client: openai.AsyncOpenAI,
) -> None:
    turns: Any = [{"role": "user", "content": letter * 1_500} for letter in "abc"]
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model=MODEL, input=turns, max_output_tokens=10)
    response = await client.responses.create(
        model=MODEL, input=turns, instructions="Stay.", max_output_tokens=500, truncation="auto"
    )
    assert response.usage is not None
    assert response.usage.input_tokens < 3_600
    assert response.output_text.startswith("system:Stay.|user:bbb")


async def test_an_end_before_any_token_has_its_status(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.end_with = Failed(code="worker_failed", message="it broke", retryable=True)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.create(model=MODEL, input="x", stream=stream)
        assert (caught.value.status_code, caught.value.code) == (503, "worker_failed")


async def test_a_failure_inside_a_stream_is_told(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.stop_before = 3
    front.worker.end_with = Failed(code="worker_failed", message="it broke")
    stream = await client.responses.create(model=MODEL, input="x", stream=True)
    events = [event async for event in stream]
    error, failed = events[-2:]
    assert error.type == "error"
    assert (error.code, error.message) == ("worker_failed", "it broke")
    assert failed.type == "response.failed"
    assert failed.response.output_text == "use"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(failed.response.id)


async def test_golden_transcript(front: RunningGateway) -> None:
    # One token per event at any speed: a token is sent after the previous one has arrived.
    body = {"model": MODEL, "input": 'Say "hé"\n', "stream": True}
    front.worker.gate.clear()
    async with httpx.AsyncClient(base_url=front.url) as http:
        asking = asyncio.create_task(http.post("/v1/responses", json=body))
        while not asking.done():
            front.worker.gate.set()
            await asyncio.sleep(0)
            front.worker.gate.clear()
            await asyncio.sleep(0.005)
        answer = await asking
    settled = re.sub(r"(resp-|msg_)[0-9a-f]{24}", r"\1ID", answer.text)
    settled = re.sub(r'"created_at":\d+', '"created_at":0', settled)
    # Which events of a token carry its index depends on whether the end came with it.
    settled = re.sub(r"^id: .*\n", "", settled, flags=re.MULTILINE)
    assert settled == _GOLDEN.read_text()
