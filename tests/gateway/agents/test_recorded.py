"""The last request of a loop of four tools, as each client sent it, and what it gets.

A file of ``recorded`` has the path, the headers that matter, and the body, whose long texts are
cut. ``calls`` are the tools that its history has called, ``result`` stands in the last tool's
result, and ``notices`` are codes and fields that the answer names, by kind of engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.gateway.models import LoadedModels
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.engines import EngineKind
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.notices import NOTICE_NAME
from tests.clients.scripted_model import RESULT, Call, ScriptedModel, write_model
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway

_RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
_ANSWER = "All four steps are done."


@dataclass
class Told:
    """Answer as its client reads it, for each API."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reason: str = ""


@pytest.fixture(scope="module", params=[EngineKind.REAL, EngineKind.OPENAI])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model that thinks and calls tools, on an engine that holds calls to a grammar, and on one
    that does not."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder / "scripted")
    text = f"models: {{{MODEL}: {{source: ./scripted, engine: {{kind: {request.param}}}}}}}"
    (folder / "models.yaml").write_text(text)
    return ServedModel.load(load_catalogue(str(folder / "models.yaml")), MODEL)


@pytest.fixture
async def front(model: ServedModel) -> AsyncIterator[RunningGateway]:
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=model.context_window_tokens)
    async with running_gateway(models=LoadedModels({MODEL: card}, lambda _name: model)) as running:
        yield running


@pytest.mark.parametrize("file", _RECORDED, ids=lambda file: file.stem)
async def test_a_recorded_request_gets_a_call_and_an_answer(
    file: Path, model: ServedModel, front: RunningGateway, http: httpx.AsyncClient
) -> None:
    recorded = json.loads(file.read_text())
    names, notices = recorded["calls"], recorded["notices"][model.engine_kind]
    script, prompts = ScriptedModel(), []
    mark = RESULT if names else "<|user|>Observation:\n"
    made = [Call(name, {}) for name in names or ["shell"] * 4]
    made[-1] = Call(made[-1].name, {}, recorded["result"])

    def says(job: Any) -> str:
        prompts.append(model.tokenizer.decode(job.prompt_token_ids, skip_special_tokens=False))
        return script.says(prompts[-1])

    front.worker.script = says
    script.plays(made, _ANSWER, result=mark)
    answer = await _ask(http, recorded, notices)
    assert (answer.text, answer.calls, answer.reason) == (_ANSWER, [], "end")
    told_names = re.findall(r'<tool_call>\n\{"name": "(\w+)"', prompts[-1].partition("</tools>")[2])
    assert told_names == names

    script.plays([*made, Call(made[0].name, {"path": "notes.txt"})], _ANSWER, result=mark)
    answer = await _ask(http, recorded, notices)
    assert answer.calls == [(made[0].name, '{"path": "notes.txt"}')]
    assert (answer.text, answer.reason) == ("", "tool")
    hidden = recorded["body"].get("thinking", {}).get("display") == "omitted"
    thinks = "messages" not in recorded["url"] or "thinking" in recorded["body"]
    assert answer.thoughts == ("One at a time." if thinks and not hidden else "")


async def _ask(
    http: httpx.AsyncClient, recorded: Mapping[str, Any], notices: Sequence[Sequence[str]]
) -> Told:
    answer = await http.post(recorded["url"], json=recorded["body"], headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    notice = answer.headers.get(NOTICE_NAME, "")
    assert re.findall(r'(\w+);param="([^"]+)"', notice) == [tuple(one) for one in notices]
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
