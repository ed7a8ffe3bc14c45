"""Lengths of a prompt's parts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from millrace.registry.catalogue import load_catalogue
from millrace.registry.prompt_parts import COUNTED_CHARACTERS, prompt_parts
from millrace.registry.served import ServedModel
from millrace.schemas.context_length import LongestMessage
from millrace.schemas.errors import ContextLengthError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.sampling import SamplingParams
from millrace.schemas.tools import ToolDefinition

_TOOLS = tuple(
    ToolDefinition(
        name=f"tool_{number}",
        description=f"Looks up the record of number {number} and answers with its text.",
        parameters={"type": "object", "properties": {"name": {"type": "string"}}},
    )
    for number in range(36)
)
_MESSAGES = (
    ChatMessage("system", "You are a helpful assistant."),
    ChatMessage("user", "What is a millrace?"),
    ChatMessage("assistant", "It is the current of water that drives a mill wheel, my friend."),
    ChatMessage("user", "Thanks."),
)


@pytest.fixture(scope="module")
def demo() -> ServedModel:
    return ServedModel.load(load_catalogue(""), "demo")


def _job(**fields: Any) -> Job:
    return Job(request_id="r", model="demo", sampling=SamplingParams(max_tokens=5), **fields)


def test_tools_take_what_they_add(demo: ServedModel) -> None:
    with_tools = len(demo.tokenizer.encode_chat(_MESSAGES, _TOOLS))
    without = len(demo.tokenizer.encode_chat(_MESSAGES))
    parts = demo.prompt_parts(_job(messages=_MESSAGES, tools=_TOOLS), with_tools)
    assert parts is not None
    assert (parts.num_tools, parts.tool_tokens) == (36, with_tools - without)
    system = len(demo.tokenizer.encode_content(_MESSAGES[0].content))
    assert (parts.system_tokens, parts.other_tokens) == (system, without - system)
    longest = len(demo.tokenizer.encode_content(_MESSAGES[2].content))
    assert parts.longest == LongestMessage(3, 4, "assistant", longest)


def test_the_error_says_it(demo: ServedModel) -> None:
    window = demo.context_window_tokens
    with pytest.raises(ContextLengthError) as caught:
        demo.prepare(_job(messages=_MESSAGES, tools=_TOOLS * 4), random.Random(1))
    error = caught.value
    assert error.param == "messages"
    assert error.num_prompt_tokens > window
    assert "in the functions" in error.message
    assert "In the prompt: 144 tools take " in error.message


def test_tools_without_a_system_message_and_calls(demo: ServedModel) -> None:
    messages = (ChatMessage("user", "Hello."),)
    total = len(demo.tokenizer.encode_chat(messages, _TOOLS))
    parts = demo.prompt_parts(_job(messages=messages, tools=_TOOLS), total)
    assert parts is not None
    added = total - len(demo.tokenizer.encode_chat(messages))
    assert abs(parts.tool_tokens - added) <= 1
    assert parts.longest.place == 1


def test_a_long_message_costs_no_more_than_its_beginning(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the mill wheel turns " * 100_000
    exact = len(demo.tokenizer.encode_content(text))
    lengths: list[int] = []
    encode = demo.tokenizer.encode_content

    def counted(given: str) -> list[int]:
        lengths.append(len(given))
        return encode(given)

    monkeypatch.setattr(demo.tokenizer, "encode_content", counted)
    messages = (*_MESSAGES, ChatMessage("user", text))
    parts = prompt_parts(demo.tokenizer, _job(messages=messages, tools=_TOOLS), None)
    assert parts is not None
    assert parts.other_tokens is None
    assert abs(parts.longest.num_tokens - exact) <= exact / 100
    assert max(lengths) == COUNTED_CHARACTERS
    assert sum(lengths) <= 4 * COUNTED_CHARACTERS


def test_a_prompt_without_parts(demo: ServedModel) -> None:
    assert demo.prompt_parts(_job(prompt="mill"), 1) is None
    assert demo.prompt_parts(_job(messages=_MESSAGES[1:2]), 9) is None
