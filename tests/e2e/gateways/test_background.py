"""Background answers: they continue and are followed token for token after kills."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.gateways.names import GATEWAYS
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

NUM_TOKENS = 250


def _client(system: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=5)


def _request() -> dict[str, Any]:
    return {
        "model": "demo",
        "input": "What is TTFT?",
        "temperature": 0,
        "max_output_tokens": NUM_TOKENS,
        "extra_body": {"ignore_eos": True},
    }


async def _follow(client: openai.AsyncOpenAI, response_id: str) -> str:
    """Read the text over several streams, each after the last event of the previous one."""
    text, after = "", 0
    while True:
        try:
            stream = await client.responses.retrieve(response_id, stream=True, starting_after=after)
            async for event in stream:
                after = event.sequence_number
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    assert event.response.output_text == text
                    return text
        except (openai.APIError, httpx.TransportError):
            await eventually(lambda: _answers(client), timeout_s=30.0, what="a gateway")


async def _answers(client: openai.AsyncOpenAI) -> bool:
    """Return whether a gateway answers."""
    try:
        await client.models.list()
    except openai.APIError:
        return False
    return True


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(GATEWAYS, id="gateways"),
        pytest.param(("worker-1",), id="worker"),
        pytest.param(
            (*GATEWAYS, "worker-1"),
            id="gateways-and-worker",
            marks=pytest.mark.slow(reason="the other cases kill each part"),
        ),
    ],
)
async def test_a_background_answer_continues_when_parts_are_killed(
    pair: System, parts: tuple[str, ...]
) -> None:
    async with _client(pair) as client:
        undisturbed = await client.responses.create(**_request())
    async with _client(pair) as client:
        stream = await client.responses.create(**_request(), background=True, stream=True)
        response_id = ""
        async for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        ended = {part: pair.kill(part) for part in parts}
        await stream.close()
    async with _client(pair) as client:
        followers = [_follow(client, response_id) for _ in range(2)]
        texts = await asyncio.wait_for(asyncio.gather(*followers), timeout=90.0)
        assert texts == [undisturbed.output_text] * 2
        stored = await client.responses.retrieve(response_id)
    assert (stored.status, stored.output_text) == ("incomplete", undisturbed.output_text)
    assert stored.usage is not None
    assert stored.usage.output_tokens == NUM_TOKENS
    query = (
        "SELECT count() AS num_rows, any(completion_tokens) AS completion_tokens "
        f"FROM requests FINAL WHERE request_id = '{response_id}'"
    )

    def recorded() -> bool:
        (row,) = pair.sql(query)
        return (int(row["num_rows"]), int(row["completion_tokens"])) == (1, NUM_TOKENS)

    await eventually(recorded)
    await eventually(
        lambda: all(pair.pid(part) != pid for part, pid in ended.items()), timeout_s=30.0
    )
