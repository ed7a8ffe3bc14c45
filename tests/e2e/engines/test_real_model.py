"""System with a real model, as ``millrace up --model smollm2`` serves it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.clients import Answer, ask_sse
from tests.e2e.interruptions import assert_streams_survive_the_worker
from tests.support.real_models import SMOLLM2, fetched_smollm2
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="runs a real model of 135M parameters"),
    pytest.mark.timeout(400),
]

_COUNTRIES = ("France", "Italy", "Japan", "Peru", "Kenya", "Norway")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    fetched_smollm2()
    arguments = ("--port", "0", "--model", SMOLLM2)
    running = System(tmp_path_factory.mktemp("smollm2"), arguments=arguments).start()
    yield running
    assert running.stop() == 0


async def test_the_capital_of_france(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as http:
        models = (await http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [SMOLLM2]
        answer = await ask_sse(http, "What is the capital of France?", model=SMOLLM2)
    assert answer.text == "The capital of France is Paris."


async def _ask(http: httpx.AsyncClient, number: int) -> Answer:
    """Ask for a greedy or a drawn answer."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    question = f"Tell me of {_COUNTRIES[number]}."
    return await ask_sse(http, question, model=SMOLLM2, max_tokens=150, ignore_eos=True, **drawn)


async def test_streams_are_the_same_when_the_worker_is_killed(system: System) -> None:
    async with httpx.AsyncClient(base_url=system.http, timeout=120.0) as http:
        await assert_streams_survive_the_worker(
            system, http, lambda number: _ask(http, number), len(_COUNTRIES)
        )
