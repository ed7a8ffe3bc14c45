"""Gateway whose model repeats its prompt or writes a scripted text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.gateway.models import LoadedModels
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tools import ToolDefinition, ToolFormat
from tests.support.running_gateway import (
    MODEL,
    ByteModel,
    ByteTokenizer,
    RunningGateway,
)


class Transcriber(ByteTokenizer):
    """Model whose prompt is the text of all messages, so an echo shows the conversation."""

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = {},
    ) -> list[int]:
        lines = [
            f"{one.role}:{one.content}" + "".join(c.name for c in one.tool_calls)
            for one in messages
        ]
        return list("|".join(lines).encode())


class TranscribingModel(ByteModel):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Transcriber()
        self.tool_format = ToolFormat.HERMES


def transcribing_models() -> LoadedModels:
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    return LoadedModels({MODEL: card}, lambda _name: TranscribingModel())


def says(front: RunningGateway, *texts: str) -> None:
    """The model answers with these, one after the other."""
    left = list(texts)

    def script(_job: Job) -> str:
        return left.pop(0)

    front.worker.script = script
