"""Tools of models whose engines constrain no calls, at each endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from millrace.gateway.models import LoadedModels
from millrace.schemas.engines import EngineKind, can_hold_calls
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.notices import NOTICE_NAME
from millrace.schemas.tools import ToolFormat
from tests.gateway.request.test_tool_schemas import DOORS
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway

UNHELD = [kind for kind in EngineKind if not can_hold_calls(kind)]
NOT_ENFORCED = {
    "code": "strict_not_enforced",
    "param": "tools",
    "detail": "the openai engine of this model does not support grammars for calls",
}
VIOLATED = {
    "code": "strict_violated",
    "param": "tools",
    "detail": "look: $.at: 7 is not of type 'string'",
}
FITS = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
FITS_NOT = FITS.replace('"sky"', "7")


def models_of(kind: EngineKind) -> LoadedModels:
    model = ByteModel()
    model.engine_kind = kind
    card = ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)
    return LoadedModels({MODEL: card}, lambda _name: model)


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway(models=models_of(EngineKind.OPENAI)) as running:
        yield running


def test_which_engines_hold_calls_that_are_not_demanded() -> None:
    held = {EngineKind.REAL, EngineKind.VLLM, EngineKind.SGLANG, EngineKind.LLAMACPP}
    assert set(UNHELD) == set(EngineKind) - held


def _auto(path: str) -> Any:
    return {"type": "auto"} if path == "/v1/messages" else "auto"


def _last(stream: str) -> dict[str, Any]:
    lines = [line for line in stream.splitlines() if line.startswith("data: {")]
    last: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    return last.get("response", last)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("text", "more"), [(FITS, []), (FITS_NOT, [VIOLATED])])
@pytest.mark.parametrize(("path", "body", "_any", "_one"), DOORS)
async def test_strict_tools_are_served_and_checked_behind(
    front: RunningGateway,
    http: httpx.AsyncClient,
    path: str,
    body: Any,
    _any: Any,
    _one: Any,
    text: str,
    more: list[Any],
) -> None:
    front.worker.script = lambda _job: text
    answer = await http.post(path, json=body(True, _auto(path)))
    assert answer.status_code == 200, answer.text
    assert answer.json()[NOTICE_NAME] == [NOT_ENFORCED, *more]
    assert ("strict_violated" in answer.headers[NOTICE_NAME]) == bool(more)
    streamed = await http.post(path, json=body(True, _auto(path), stream=True))
    assert "strict_not_enforced" in streamed.headers[NOTICE_NAME]
    assert _last(streamed.text)[NOTICE_NAME] == [NOT_ENFORCED, *more]
    loose = await http.post(path, json=body(False, _auto(path)))
    assert (loose.status_code, NOTICE_NAME in loose.headers) == (200, False)
    assert [job.sampling.grammar for job in front.worker.jobs] == [None] * 3


@pytest.mark.parametrize("kind", UNHELD)
async def test_calls_that_are_not_parallel_end_the_answer(kind: EngineKind) -> None:
    _, chat, _, _ = DOORS[0]
    _, responses, _, _ = DOORS[1]
    _, messages, _, _ = DOORS[2]
    asked = [
        ("/v1/chat/completions", chat(False, "auto", parallel_tool_calls=False)),
        ("/v1/responses", responses(False, None, parallel_tool_calls=False)),
        ("/v1/messages", messages(False, {"type": "auto", "disable_parallel_tool_use": True})),
    ]
    async with (
        running_gateway(models=models_of(kind)) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        for path, body in asked:
            answer = await http.post(path, json=body)
            assert (answer.status_code, NOTICE_NAME in answer.headers) == (200, False), answer.text
        for job in front.worker.jobs:
            assert (job.sampling.grammar, job.sampling.one_call) == (None, ToolFormat.HERMES)


async def test_the_socket_tells_what_does_not_fit(front: RunningGateway) -> None:
    front.worker.script = lambda _job: FITS_NOT
    _, chat, _, _ = DOORS[0]
    async with connect(front.ws_url, subprotocols=["millrace.v1"]) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps({"type": "generate", "id": "a", **chat(True, "auto")}))
        while (message := json.loads(await socket.recv()))["type"] not in ("done", "error"):
            pass
    assert message["type"] == "done", message
    assert message[NOTICE_NAME] == [NOT_ENFORCED, VIOLATED]
    assert message["finish_reason"] == "tool_calls"


async def test_an_engine_with_grammars_gets_a_grammar() -> None:
    async with (
        running_gateway(models=models_of(EngineKind.VLLM)) as front,
        httpx.AsyncClient(base_url=front.url) as client,
    ):
        _, chat, _, _ = DOORS[0]
        body = chat(True, "auto", parallel_tool_calls=False)
        body["tools"] = body["tools"][:1]
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, NOTICE_NAME in answer.headers) == (200, False)
        (job,) = front.worker.jobs
    assert job.sampling.grammar is not None
    assert job.sampling.one_call is None


async def test_a_call_that_was_cut_is_not_judged(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    _, chat, _, _ = DOORS[0]
    front.worker.script = lambda _job: FITS_NOT
    answer = (await http.post(DOORS[0][0], json=chat(True, "auto", max_tokens=50))).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer[NOTICE_NAME] == [NOT_ENFORCED]


async def test_a_custom_tool_is_not_held_to_its_grammar(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tool = {"type": "custom", "custom": {"name": "say", "format": grammar}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [one["code"] for one in answer.json()[NOTICE_NAME]] == ["grammar_not_kept"]


# Paths and bodies as openai-agents 0.24.0 (the first five) and pydantic-ai 2.68.0 sent them.
_RECORDED = (Path(__file__).parent / "agents_requests.txt").read_text().splitlines()


@pytest.mark.parametrize("number", range(len(_RECORDED)))
async def test_what_agents_frameworks_send_is_served(
    front: RunningGateway, http: httpx.AsyncClient, number: int
) -> None:
    path, _, body = _RECORDED[number].partition(" ")
    front.worker.script = lambda _job: FITS.replace("look", "work").replace(
        '"at": "sky"', '"step": 1'
    )
    content = body.replace('"model":"demo"', f'"model":"{MODEL}"').encode()
    answer = await http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.json()[NOTICE_NAME] == [NOT_ENFORCED]
    (job,) = front.worker.jobs
    is_single = '"parallel_tool_calls":false' in body
    assert job.sampling.one_call == (ToolFormat.HERMES if is_single else None)
