"""Answers of the Messages API, as Anthropic's own client reads them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import msgspec
import pydantic
import pytest

from millrace.schemas.anthropic.answers import MessageEvent
from millrace.schemas.frames import Failed
from tests.support.running_gateway import MODEL, RunningGateway

HELLO: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Hello there."}],
}
TOOL: Any = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


def said(text: str, **more: Any) -> dict[str, Any]:
    return HELLO | {"messages": [{"role": "user", "content": text}]} | more


async def test_a_whole_answer(sdk: anthropic.AsyncAnthropic) -> None:
    answer = await sdk.messages.create(**HELLO, system="Be kind.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg-")
    assert answer._request_id == answer.id
    (block,) = answer.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == "Hello there."
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (12, 12)


async def test_a_streamed_answer(sdk: anthropic.AsyncAnthropic) -> None:
    async with sdk.messages.stream(**HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Hello there."
    assert [block.type for block in final.content] == ["text"]
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (12, 12)


async def test_each_event_is_as_its_schema_says(http: httpx.AsyncClient) -> None:
    decoder = msgspec.json.Decoder(MessageEvent)
    for body in (said("Hi"), said(f"I look.\n{CALL}", tools=[TOOL])):
        text = (await http.post("/v1/messages", json=body | {"stream": True})).text
        names = []
        for event in text.removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            decoded = decoder.decode(data.removeprefix("data: "))
            assert name == f"event: {type(decoded).__struct_config__.tag}"
            names.append(type(decoded).__struct_config__.tag)
        assert names[0] == "message_start"
        assert names[-2:] == ["message_delta", "message_stop"]
        assert names.count("content_block_start") == names.count("content_block_stop")


async def test_an_answer_of_nothing(sdk: anthropic.AsyncAnthropic, front: RunningGateway) -> None:
    front.worker.script = lambda _job: ""
    whole = await sdk.messages.create(**HELLO)
    async with sdk.messages.stream(**HELLO) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.to_dict() for block in answer.content] == [
            {"type": "text", "text": "", "citations": None}
        ]


@pytest.mark.parametrize(
    ("stop_reason", "stop"),
    [("over", ("stop_sequence", "over")), (7, ("end_turn", None)), (None, ("end_turn", None))],
)
async def test_a_stop_reason_says_what_ended_the_answer(
    sdk: anthropic.AsyncAnthropic,
    front: RunningGateway,
    stop_reason: str | int | None,
    stop: tuple[str, str | None],
) -> None:
    front.worker.stop_reason = stop_reason
    whole = await sdk.messages.create(**HELLO, stop_sequences=["over"])
    async with sdk.messages.stream(**HELLO, stop_sequences=["over"]) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == stop
    assert front.worker.jobs[0].sampling.stop == ("over",)


async def test_an_answer_that_was_cut_off(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway
) -> None:
    answer = await sdk.messages.create(**HELLO | {"max_tokens": 5})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 5)


async def test_the_same_sampling_as_elsewhere(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway
) -> None:
    await sdk.messages.create(
        **HELLO,
        metadata={"user_id": "u-1"},
        service_tier="standard_only",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
    )
    (job,) = front.worker.jobs
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.max_tokens, job.user) == (200, "u-1")


async def test_hints_change_nothing(sdk: anthropic.AsyncAnthropic) -> None:
    answer = await sdk.messages.create(
        **said("Hi"),
        cache_control={"type": "ephemeral"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "mcp_servers": [],
            "container": None,
            "speed": "standard",
        },
    )
    assert answer.content[0].to_dict()["text"] == "Hi"


async def test_a_call_of_a_tool(sdk: anthropic.AsyncAnthropic) -> None:
    asked = said(f"I look.\n{CALL}", tools=[TOOL])
    whole = await sdk.messages.create(**asked)
    async with sdk.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        text, call = answer.content
        assert isinstance(text, anthropic.types.TextBlock)
        assert isinstance(call, anthropic.types.ToolUseBlock)
        assert (text.text, call.name, call.input) == ("I look.", "look", {"at": "sky"})
        assert answer.stop_reason == "tool_use"


async def test_several_calls_are_blocks_of_their_own(sdk: anthropic.AsyncAnthropic) -> None:
    other = CALL.replace("sky", "sea")
    async with sdk.messages.stream(**said(f"{CALL}\n{other}", tools=[TOOL])) as stream:
        answer = await stream.get_final_message()
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"at": "sky"}, {"at": "sea"}]
    assert len({call.id for call in calls}) == 2


async def test_a_call_that_was_cut_off(sdk: anthropic.AsyncAnthropic) -> None:
    asked = said(f"{CALL}", tools=[TOOL]) | {"max_tokens": 50}
    answer = await sdk.messages.create(**asked, tool_choice={"type": "any"})
    assert (answer.stop_reason, answer.content) == ("max_tokens", [])
    async with sdk.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        pieces = [event.partial_json async for event in stream if event.type == "input_json"]
        streamed = await stream.get_final_message()
    assert streamed.stop_reason == "max_tokens"
    assert "".join(pieces) == '{"at": "'


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}])
@pytest.mark.parametrize("text", ["", f"I look.\n{CALL}\n"])
async def test_a_stop_sequence_within_a_call(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway, choice: Any, text: str
) -> None:
    """Text before the cut call stays, and no part of that call looks complete."""
    front.worker.script = lambda _job: text + CALL.partition("}")[0]
    front.worker.stop_reason = "}"
    asked = HELLO | {"tools": [TOOL], "tool_choice": choice, "stop_sequences": ["}"]}
    whole = await sdk.messages.create(**asked)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "}")
    told = [block.type for block in whole.content]
    assert told == (["text", "tool_use"] if text else [])
    async with sdk.messages.stream(**asked) as stream:
        partial, types = "", list[str]()
        async for event in stream:
            types.append(event.type)
            if event.type == "content_block_start":
                partial = ""
            elif event.type == "input_json":
                partial += event.partial_json
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "}")
    assert partial == '{"at": "sky"'
    assert types.count("content_block_stop") == len(told) + 1


async def test_a_stop_sequence_behind_a_whole_call(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway
) -> None:
    front.worker.script = lambda _job: CALL.partition("</tool_call>")[0]
    front.worker.stop_reason = "</tool_call>"
    answer = await sdk.messages.create(**HELLO, tools=[TOOL], stop_sequences=["</tool_call>"])
    (call,) = answer.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.input, answer.stop_reason) == ({"at": "sky"}, "tool_use")


async def test_a_call_that_is_no_json(sdk: anthropic.AsyncAnthropic) -> None:
    """The model wrote all that it wanted to: the client answers it as it does any other."""
    answer = await sdk.messages.create(**said(CALL.replace('"sky"', "]"), tools=[TOOL]))
    (call,) = answer.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (list(call.input), answer.stop_reason) == (["INVALID_JSON"], "tool_use")


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "look"}, True),
    ],
)
async def test_whether_a_tool_must_be_called(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway, choice: Any, is_held: bool
) -> None:
    await sdk.messages.create(**said(CALL, tools=[TOOL]), tool_choice=choice)
    assert (front.worker.jobs[0].sampling.grammar is not None) is is_held


async def test_an_answer_of_a_shape(sdk: anthropic.AsyncAnthropic, front: RunningGateway) -> None:
    class Sky(pydantic.BaseModel):
        is_blue: bool

    answer = await sdk.messages.parse(**said('{"is_blue":true}'), output_format=Sky)
    assert answer.parsed_output == Sky(is_blue=True)
    grammar = front.worker.jobs[0].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"]["is_blue"]["type"] == "boolean"


async def test_a_stream_that_fails_on_the_way(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway
) -> None:
    front.worker.stop_before = 3
    front.worker.end_with = Failed(code="engine_failed", message="It broke.", retryable=True)
    with pytest.raises(anthropic.APIStatusError, match="It broke"):
        async with sdk.messages.stream(**HELLO) as stream:
            await stream.get_final_message()
    with pytest.raises(anthropic.APIStatusError) as caught:
        await sdk.messages.create(**HELLO)
    assert caught.value.type == "overloaded_error"
    assert caught.value.status_code == 503


async def test_counted_tokens_are_those_of_the_answer(sdk: anthropic.AsyncAnthropic) -> None:
    count = await sdk.messages.count_tokens(
        model=MODEL, messages=HELLO["messages"], tools=[TOOL], system="Be kind."
    )
    answer = await sdk.messages.create(**HELLO, tools=[TOOL], system="Be kind.")
    assert count.input_tokens == answer.usage.input_tokens == 12


async def test_an_answer_that_was_begun_by_its_client(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway
) -> None:
    messages: Any = [*HELLO["messages"], {"role": "assistant", "content": "The sky is"}]
    await sdk.messages.create(**HELLO | {"messages": messages})
    count = await sdk.messages.count_tokens(model=MODEL, messages=messages)
    assert front.worker.jobs[0].continue_final_message
    assert count.input_tokens == len("The sky is")
