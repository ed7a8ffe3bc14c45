"""Sampling options: each API applies them, and they survive a killed worker."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from millrace.bus.api import Bus
from tests.e2e.clients import ask_nats, ask_sse, ask_websocket, chat_body
from tests.e2e.interruptions import assert_streams_survive_the_worker
from tests.support.system import System

pytestmark = pytest.mark.e2e

NUM_STREAMS = 6
QUESTION = "What is TTFT?"


async def test_every_door_heeds_the_same_options(
    system: System, http: httpx.AsyncClient, bus: Bus
) -> None:
    plain = await ask_sse(http, QUESTION)
    word = max(plain.text.split(), key=len).strip(".,")
    options: dict[str, Any] = {
        "bad_words": (word,),
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 40,
        "max_tokens": 60,
    }
    answers = [
        await ask_sse(http, QUESTION, **options),
        await ask_websocket(system.websocket, QUESTION, **options),
        await ask_nats(bus, f"options-{uuid.uuid4().hex[:8]}", QUESTION, **options),
    ]
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].text != plain.text
    assert word not in answers[0].text.split()
    assert all(answer.completion_tokens >= 40 for answer in answers)


async def test_a_bias_decides(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/v1/tokenize", json={"model": "demo", "prompt": "x"})).json()
    bias = {str(tokens["tokens"][-1]): 100}
    answer = await ask_sse(http, QUESTION, logit_bias=bias, max_tokens=7)
    assert answer.text.count("x") == 7
    beyond = chat_body(QUESTION, stream=False, logit_bias={"1000000": 1})
    response = await http.post("/v1/chat/completions", json=beyond)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"


async def test_penalties_go_on_when_the_worker_is_killed(
    system: System, http: httpx.AsyncClient
) -> None:
    options: dict[str, Any] = {
        "temperature": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "typical_p": 0.9,
        "min_tokens": 250,
        "max_tokens": 300,
    }

    await assert_streams_survive_the_worker(
        system,
        http,
        lambda i: ask_sse(http, f"{QUESTION} {i}", **options | {"seed": i}),
        NUM_STREAMS,
    )
