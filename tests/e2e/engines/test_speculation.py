"""Speculative decoding in a whole system: the answers are those without speculation.

Usage and rows count proposed and accepted tokens, and streams survive the worker's death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.clients import Answer, ask_sse, chat_body
from tests.e2e.interruptions import assert_streams_survive_the_worker
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a system for one option of the engine"),
]

_TERMS = ("Millrace", "TTFT", "continuous batching", "a KV cache", "a lease", "SSE")


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = ("--port", "0", "--speculation", "ngram")
    running = System(tmp_path_factory.mktemp("speculating"), arguments=arguments).start()
    yield running
    assert running.stop() == 0


async def _ask(http: httpx.AsyncClient, number: int) -> Answer:
    """Greedy and drawn ones, for long behind the answer, where a small model repeats itself."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    question = f"What is {_TERMS[number]}?"
    return await ask_sse(http, question, max_tokens=200, ignore_eos=True, **drawn)


async def test_streams_are_the_same_when_the_worker_is_killed(speculating: System) -> None:
    async with httpx.AsyncClient(base_url=speculating.http, timeout=60.0) as http:
        await assert_streams_survive_the_worker(
            speculating, http, lambda number: _ask(http, number), len(_TERMS)
        )


async def test_a_prediction_changes_no_token_and_is_told_of(speculating: System) -> None:
    async with httpx.AsyncClient(base_url=speculating.http, timeout=60.0) as http:

        async def ask(**options: Any) -> dict[str, Any]:
            body = chat_body("What is TTFT?", **options)
            answer: dict[str, Any] = (await http.post("/v1/chat/completions", json=body)).json()
            return answer

        plain = await ask()
        text = plain["choices"][0]["message"]["content"]
        right, wrong = await asyncio.gather(
            ask(prediction={"type": "content", "content": text}),
            ask(prediction={"type": "content", "content": "Nobody says this of a wheel."}),
        )
        for answer in (right, wrong):
            assert answer["choices"][0]["message"]["content"] == text
        details = right["usage"]["completion_tokens_details"]
        made = right["usage"]["completion_tokens"]
        assert 0.5 * made < details["accepted_prediction_tokens"] < made
