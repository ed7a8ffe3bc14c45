"""Whole system on a GGUF file in Millrace's own engine: answers, and streams of a killed worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.clients import Answer, ask_sse
from tests.support.gguf_files import write_gguf
from tests.support.repository import ROOT
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a system for one format of models"),
]

_QUESTIONS = ("What is Millrace?", "What is TTFT?", "What is a KV cache?", "What is a lease?")
_MAX_TOKENS = 300


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("gguf")
    model = write_gguf(folder / "demo.gguf", ROOT / "registry" / "demo" / "model", "q8_0")
    running = System(folder / "data", ("--port", "0", "--model", str(model))).start()
    yield running
    assert running.stop() == 0


async def test_the_models_engine_is_millraces_own(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as http:
        [card] = (await http.get("/v1/models")).json()["data"]
        assert (card["id"], card["engine"]["kind"]) == ("demo", "real")
        answer = await ask_sse(http, "What is Millrace?")
    assert "event-driven LLM serving system" in answer.text


async def test_streams_go_on_when_the_worker_is_killed(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as http:
        undisturbed = await _ask_all(http)
        asked = asyncio.create_task(_ask_all(http))

        async def all_run() -> bool:
            return bool((await http.get("/healthz")).json()["open_streams"] >= len(_QUESTIONS))

        await eventually(all_run)
        assert system.kill("worker-1")
        answers = await asyncio.wait_for(asked, timeout=90.0)
    assert [one.completion_tokens for one in answers] == [_MAX_TOKENS] * len(_QUESTIONS)
    assert [one.text for one in answers] == [one.text for one in undisturbed]


async def _ask_all(http: httpx.AsyncClient) -> list[Answer]:
    return await asyncio.gather(
        *[
            ask_sse(http, question, max_tokens=_MAX_TOKENS, ignore_eos=True)
            for question in _QUESTIONS
        ]
    )
