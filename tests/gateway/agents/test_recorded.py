"""The last request of a loop of four tools, as each client sent it, and what it gets.

A file of ``recorded`` has the path, the headers that matter, and the body, whose long texts are
cut. ``calls`` are the tools that its history has called, ``result`` stands in the last tool's
result, and ``notices`` are what the answer says of the request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.gateway.models import Models
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.notices import NOTICE_NAME
from millrace.schemas.tools import ToolDefinition
from tests.gateway.request.test_tool_calls import says
from tests.support.running_gateway import (
    MODEL,
    ByteModel,
    ByteTokenizer,
    RunningGateway,
    running_gateway,
)

_RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
_ANSWER = "All four steps are done."
_THOUGHT = "One at a time."


class Listener(ByteTokenizer):
    """Keeps the last conversation, in place of a template."""

    messages: Sequence[ChatMessage] = ()

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = {},
    ) -> list[int]:
        self.messages = messages
        return list(b"prompt")


class ThinkingModel(ByteModel):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Listener = Listener()
        self.reasoning_format = ReasoningFormat(start="<think>", end="</think>")


@dataclass
class Told:
    """What a client reads from an answer, whatever the API."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reason: str = ""


@pytest.fixture
def thinker() -> ThinkingModel:
    return ThinkingModel()


@pytest.fixture
async def front(
    thinker: ThinkingModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningGateway]:
    # Agents ask for 32,000 tokens.
    monkeypatch.setattr("tests.support.running_gateway.CONTEXT_WINDOW_TOKENS", 65_536)
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    async with running_gateway(models=Models({MODEL: card}, lambda _name: thinker)) as running:
        yield running


@pytest.mark.parametrize("file", _RECORDED, ids=lambda file: file.stem)
async def test_a_recorded_request_gets_a_call_and_an_answer(
    file: Path, thinker: ThinkingModel, front: RunningGateway, http: httpx.AsyncClient
) -> None:
    recorded = json.loads(file.read_text())
    heard = thinker.tokenizer
    tool = (recorded["calls"] or ["final_answer"])[0]
    arguments = '{"path": "notes.txt"}'
    front.worker.script = lambda _job: f"<think>{_THOUGHT}</think>{says(tool, arguments)}"
    told = await _ask(http, recorded)
    assert told.calls == [(tool, arguments)]
    assert (told.text, told.reason) == ("", "tool")
    assert told.thoughts in (_THOUGHT, "")
    front.worker.script = lambda _job: f"<think>{_THOUGHT}</think>{_ANSWER}"
    told = await _ask(http, recorded)
    assert (told.text, told.calls, told.reason) == (_ANSWER, [], "end")

    assert [call.name for one in heard.messages for call in one.tool_calls] == recorded["calls"]
    results = [one.content for one in heard.messages if one.role == "tool"]
    assert len(results) == len(recorded["calls"])
    assert recorded["result"] in (results or [heard.messages[-1].content])[-1]
    assert tool in [one.name for one in front.worker.jobs[-1].tools]


async def _ask(http: httpx.AsyncClient, recorded: Mapping[str, Any]) -> Told:
    answer = await http.post(recorded["url"], json=recorded["body"], headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(NOTICE_NAME, "") == recorded["notices"]
    path = recorded["url"].partition("?")[0]
    read = {"/v1/chat/completions": _chat, "/v1/messages": _message, "/v1/responses": _response}
    return read[path](_events(answer.text) if recorded["body"].get("stream") else [answer.json()])


def _events(stream: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: "]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _chat(answers: Sequence[Any]) -> Told:
    told = Told()
    for choice in (choice for answer in answers for choice in answer["choices"]):
        part = choice.get("delta") or choice.get("message") or {}
        told.text += part.get("content") or ""
        told.thoughts += part.get("reasoning_content") or ""
        for call in part.get("tool_calls") or ():
            function = call["function"]
            if call.get("id"):
                told.calls.append((function["name"], ""))
            name, arguments = told.calls[-1]
            told.calls[-1] = (name, arguments + function.get("arguments", ""))
        reasons = {"tool_calls": "tool", "stop": "end"}
        told.reason = reasons.get(choice["finish_reason"] or "", told.reason)
    return told


def _message(events: Sequence[Any]) -> Told:
    told = Told()
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            told.calls.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            told.text += delta.get("text", "")
            told.thoughts += delta.get("thinking", "")
            if "partial_json" in delta:
                name, arguments = told.calls[-1]
                told.calls[-1] = (name, arguments + delta["partial_json"])
        elif event["type"] == "message_delta":
            reasons = {"tool_use": "tool", "end_turn": "end"}
            told.reason = reasons[event["delta"]["stop_reason"]]
    return told


def _response(events: Sequence[Any]) -> Told:
    response = events[-1].get("response", events[-1])
    assert response["status"] == "completed"
    told = Told(reason="end")
    for item in response["output"]:
        if item["type"] == "message":
            told.text += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            told.thoughts += item["content"][0]["text"]
        else:
            told.calls.append((item["name"], item["arguments"]))
            told.reason = "tool"
    return told
