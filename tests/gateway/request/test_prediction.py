"""Predicted outputs: they go with the job, and usage counts proposed tokens."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from millrace.gateway.rendering.rendering import usage_info
from millrace.gateway.streams.stream import total_usage
from millrace.schemas.frames import Usage
from tests.support.running_gateway import MODEL, RunningGateway

_MESSAGES: Any = [{"role": "user", "content": "mill"}]


@pytest.mark.parametrize(
    "content",
    ["def race():", [{"type": "text", "text": "def "}, {"type": "text", "text": "race():"}]],
)
async def test_a_prediction_goes_with_the_job(
    front: RunningGateway, client: openai.AsyncOpenAI, content: Any
) -> None:
    prediction: Any = {"type": "content", "content": content}
    answer = await client.chat.completions.create(
        model=MODEL, messages=_MESSAGES, prediction=prediction, n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["mill", "mill"]
    assert [job.prediction for job in front.worker.jobs] == ["def race():"] * 2


@pytest.mark.parametrize(
    "prediction",
    ["text", {"type": "image", "content": "x"}, {"type": "content"}, {"content": "x", "more": 1}],
)
async def test_what_is_no_prediction_is_refused_by_name(
    http: httpx.AsyncClient, prediction: Any
) -> None:
    body = {"model": MODEL, "messages": _MESSAGES, "prediction": prediction}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "prediction" in answer.json()["error"]["message"]


def test_usage_tells_proposed_tokens_where_there_were_any() -> None:
    one = Usage(prompt_tokens=2, completion_tokens=9, proposed_tokens=7, accepted_tokens=5)
    other = Usage(prompt_tokens=2, completion_tokens=4, proposed_tokens=1)
    details: Any = usage_info(total_usage([one, None, other])).completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 3)
    assert not usage_info(Usage(completion_tokens=4)).completion_tokens_details
