"""System with int8 weights: answers, answers within a schema, and streams of a killed worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.clients import Answer, ask_sse, chat_body
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a system for one option of the engine"),
]

_QUESTIONS = (
    "What is Millrace?",
    "What is TTFT?",
    "What is continuous batching?",
    "What is a KV cache?",
    "What is speculative decoding?",
    "What is SSE?",
    "What is a lease?",
    "What is JetStream?",
)
_MAX_TOKENS = 300
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = ("--port", "0", "--quantization", "int8")
    running = System(tmp_path_factory.mktemp("quantized"), arguments=arguments).start()
    yield running
    assert running.stop() == 0


async def _ask_all(http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    """Start one stream per question; each continues long after its answer."""
    tasks = [
        asyncio.create_task(ask_sse(http, question, max_tokens=_MAX_TOKENS, ignore_eos=True))
        for question in _QUESTIONS
    ]

    async def all_run() -> bool:
        return bool((await http.get("/healthz")).json()["open_streams"] >= len(_QUESTIONS))

    await eventually(all_run)
    return tasks


async def test_streams_go_on_when_the_worker_is_killed(quantized: System) -> None:
    async with httpx.AsyncClient(base_url=quantized.http, timeout=60.0) as http:
        undisturbed = await asyncio.gather(*[ask_sse(http, question) for question in _QUESTIONS])
        assert "event-driven LLM serving system" in undisturbed[0].text
        tasks = await _ask_all(http)
        killed = quantized.kill("worker-1")
        answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
        assert [answer.completion_tokens for answer in answers] == [_MAX_TOKENS] * len(_QUESTIONS)
        for answer, whole in zip(answers, undisturbed, strict=True):
            assert answer.text.startswith(whole.text)
        await eventually(lambda: quantized.pid("worker-1") != killed)


async def test_an_answer_keeps_to_a_schema(quantized: System) -> None:
    schema: dict[str, Any] = {"name": "thing", "schema": _SCHEMA, "strict": True}
    body = chat_body(
        "Who are you?",
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    async with httpx.AsyncClient(base_url=quantized.http, timeout=60.0) as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()
    made = json.loads(answer["choices"][0]["message"]["content"])
    assert set(made) == {"name", "year"}
    assert isinstance(made["year"], int)
