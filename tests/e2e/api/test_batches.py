"""Batch on the whole system, whose gateway is killed in the middle."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

NUM_LINES = 200


def _line(number: int) -> str:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"What is TTFT? {number}"}],
        "max_tokens": 12,
        "n": 2,
    }
    return json.dumps(
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }
    )


@pytest.mark.slow(reason="25 s of CPU; tests/gateway/batches kills a gateway, too")
async def test_every_line_is_answered_once_though_the_gateway_is_killed(system: System) -> None:
    base_url = f"{system.http}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=20) as client:
        data = "\n".join(map(_line, range(NUM_LINES))).encode()
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def has_begun() -> bool:
            found = await client.batches.retrieve(batch.id)
            return found.request_counts is not None and found.request_counts.completed > 0

        async def is_over() -> bool:
            return (await client.batches.retrieve(batch.id)).status == "completed"

        await eventually(has_begun, 30.0, "the first answer")
        assert not await is_over()
        system.kill("gateway-1")
        await eventually(is_over, 60.0, "the batch's end")
        batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        content = await client.files.content(batch.output_file_id)
    answers: list[dict[str, Any]] = [json.loads(line) for line in content.text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(
        f"c{number}" for number in range(NUM_LINES)
    )
    for answer in answers:
        assert len(answer["response"]["body"]["choices"]) == 2

    async def are_recorded() -> bool:
        [row] = system.sql(
            "SELECT count() AS num_rows, sum(num_generations) AS num_generations "
            f"FROM requests FINAL WHERE batch_id = '{batch.id}'"
        )
        assert int(row["num_rows"]) <= NUM_LINES
        return int(row["num_generations"]) == 2 * NUM_LINES

    await eventually(are_recorded, 30.0, "a row for each line, of two choices")
