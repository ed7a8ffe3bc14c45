"""Embeddings and prompt log-probabilities of services on the bus, through worker's deaths."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from millrace.bus import nats as nats_bus
from millrace.bus.api import Bus
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingParams
from tests.support.engine.checkpoints_made import CONTEXT_WINDOW_TOKENS
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts seven engines; the engine's pooling tests compare embeddings"),
]

NUM_JOBS = 60
_HIDDEN_SIZE = 32


@pytest.fixture
async def jobs(small: System) -> AsyncIterator[Bus]:
    connected = await nats_bus.connect(NatsConfig(url=small.endpoints["nats"]), "e2e")
    yield connected
    await connected.close()


def _ask(number: int, life: str) -> Job:
    """Every third job asks for prompt log-probabilities, the others for embeddings."""
    prompt = tuple(2 + (number * 7 + place) % 60 for place in range(3 + number))
    if number % 3 == 0:
        return Job(
            request_id=f"{life}-{number}",
            model="writer",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_tokens=40, temperature=0.0, prompt_logprobs=2, logprobs=0, ignore_eos=True
            ),
            store_result=True,
        )
    return Job(
        request_id=f"{life}-{number}",
        model="embedder" if number % 2 else "writer",
        prompt_token_ids=prompt,
        pooling=Pooling.MEAN if number % 4 else Pooling.LAST,
        store_result=True,
    )


async def _results(bus: Bus, life: str) -> list[JobResult]:
    found: dict[int, JobResult] = {}

    async def all_there() -> bool:
        for number in set(range(NUM_JOBS)) - found.keys():
            result = await bus.results.fetch("local", f"{life}-{number}")
            if result is not None:
                found[number] = result
        return len(found) == NUM_JOBS

    await eventually(all_there, timeout_s=60.0, what="all results")
    return [found[number] for number in range(NUM_JOBS)]


async def test_killed_workers_change_no_answer(small: System, jobs: Bus) -> None:
    for number in range(NUM_JOBS):
        await jobs.jobs.publish(_ask(number, "calm"))
    calm = await _results(jobs, "calm")
    for number in range(NUM_JOBS):
        await jobs.jobs.publish(_ask(number, "stormy"))
        if number == NUM_JOBS // 2:
            small.kill("worker-1")
            small.kill("worker-2")
    stormy = await _results(jobs, "stormy")
    for number, (expected, got) in enumerate(zip(calm, stormy, strict=True)):
        assert (got.status, got.usage is not None) == ("done", True), got.error_message
        assert got.token_ids == expected.token_ids
        if number % 3:
            numbers = struct.unpack(f"<{_HIDDEN_SIZE}f", got.embedding)
            assert numbers == pytest.approx(
                struct.unpack(f"<{_HIDDEN_SIZE}f", expected.embedding), abs=1e-4
            )
            continue
        assert len(got.token_ids) == len(got.text_ends) == 40
        assert len(got.prompt_logprobs) == 3 + number
        for one, other in zip(got.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)

    async def has_records() -> bool:
        rows = small.sql(
            "SELECT count() AS n, uniqExact(request_id) AS m FROM requests FINAL "
            "WHERE request_id LIKE 'stormy-%'"
        )
        return [(int(row["n"]), int(row["m"])) for row in rows] == [(NUM_JOBS, NUM_JOBS)]

    await eventually(has_records, timeout_s=30.0, what="one record each")


async def test_a_request_over_http_outlives_its_worker(small: System) -> None:
    inputs = [[2 + (number * 3 + place) % 60 for place in range(20)] for number in range(400)]
    async with (
        openai.AsyncOpenAI(
            base_url=f"{small.http}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
        httpx.AsyncClient(base_url=small.http) as http,
    ):

        async def is_under_way() -> bool:
            return int((await http.get("/healthz")).json()["open_streams"]) > 0

        calm = await client.embeddings.create(model="embedder", input=inputs)
        asking = asyncio.create_task(client.embeddings.create(model="embedder", input=inputs))
        await eventually(is_under_way)
        small.kill("worker-1")
        stormy = await asking
        for one, other in zip(calm.data, stormy.data, strict=True):
            assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-5)
            assert one.embedding == pytest.approx(other.embedding, abs=1e-4)
        assert stormy.usage.prompt_tokens == 400 * 20
        with pytest.raises(openai.BadRequestError, match="embeddings only"):
            await client.completions.create(model="embedder", prompt="x")
        whole = await client.embeddings.create(model="writer", input="mill", dimensions=8)
        assert len(whole.data[0].embedding) == 8


async def test_an_embedding_may_fill_the_window(jobs: Bus) -> None:
    for request_id, num_tokens in (("full", CONTEXT_WINDOW_TOKENS), ("long", 129)):
        await jobs.jobs.publish(
            Job(
                request_id=request_id,
                model="embedder",
                prompt_token_ids=(5,) * num_tokens,
                pooling=Pooling.LAST,
                store_result=True,
            )
        )

    async def both() -> bool:
        return all([await jobs.results.fetch("local", one) for one in ("full", "long")])

    await eventually(both, timeout_s=20.0)
    full, long = [await jobs.results.fetch("local", one) for one in ("full", "long")]
    assert full is not None
    assert long is not None
    assert len(full.embedding) == 4 * _HIDDEN_SIZE
    assert long.error_code == "context_length_exceeded"
