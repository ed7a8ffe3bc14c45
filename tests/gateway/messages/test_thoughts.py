"""Thoughts as blocks of their own, for requests that ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from millrace.gateway.models import LoadedModels
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.models.cards import ModelCard
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway

TEXT = "<think>\nIs it?\n</think>\n\nIt is."
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": TEXT}],
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    model = ByteModel()
    model.reasoning_format = ReasoningFormat()
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    async with running_gateway(models=LoadedModels({MODEL: card}, lambda _name: model)) as running:
        yield running


async def test_thoughts_are_returned_if_requested(
    sdk: anthropic.AsyncAnthropic, front: RunningGateway
) -> None:
    whole = await sdk.messages.create(**ASKED, thinking=THINKING)
    async with sdk.messages.stream(**ASKED, thinking=THINKING) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        thought, text = answer.content
        assert isinstance(thought, anthropic.types.ThinkingBlock)
        assert isinstance(text, anthropic.types.TextBlock)
        assert (thought.thinking, thought.signature, text.text) == ("Is it?", answer.id, "It is.")
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == len(TEXT.partition("\n\n")[0])
    assert front.worker.jobs[0].sampling.max_reasoning_tokens == 1024
    history = [*ASKED["messages"], {"role": "assistant", "content": whole.content}]
    again = await sdk.messages.create(
        **ASKED | {"messages": [*history, {"role": "user", "content": "Sure?"}]}
    )
    assert again.content[0].to_dict()["text"] == "Sure?"


@pytest.mark.parametrize(
    "thinking",
    [anthropic.omit, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}],
)
async def test_thoughts_are_not_returned_unless_requested(
    sdk: anthropic.AsyncAnthropic, thinking: Any
) -> None:
    whole = await sdk.messages.create(**ASKED, thinking=thinking)
    async with sdk.messages.stream(**ASKED, thinking=thinking) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        (block,) = answer.content
        assert block.to_dict()["text"] == "It is."
