"""Endpoints for probes and load generators that were made for vLLM's server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from millrace.schemas.frames import Failed
from tests.support.running_gateway import MODEL, RunningGateway

Json = dict[str, Any]


async def chunks_of(http: httpx.AsyncClient, path: str, body: Json) -> list[Json]:
    answer = await http.post(path, json=body | {"model": MODEL, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
async def test_health_is_told_under_other_names(
    front: RunningGateway, http: httpx.AsyncClient, method: str, path: str
) -> None:
    assert (await http.request(method, path)).status_code == 200
    front.broker.stop()
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["status"]) == (503, "bus_unavailable")


async def test_the_version_is_told(http: httpx.AsyncClient) -> None:
    answer = await http.get("/version")
    assert (answer.status_code, list(answer.json())) == (200, ["version"])


async def test_a_prompt_is_tokenised_and_back(http: httpx.AsyncClient) -> None:
    asked = {"model": MODEL, "prompt": "hi!", "add_special_tokens": False}
    plain = (await http.post("/tokenize", json=asked)).json()
    assert plain == {"tokens": [104, 105, 33], "count": 3, "max_model_len": 4096}
    spelled = (await http.post("/tokenize", json=asked | {"return_token_strs": True})).json()
    assert spelled == plain | {"token_strs": ["h", "i", "!"]}
    back = await http.post("/detokenize", json={"model": MODEL, "tokens": plain["tokens"]})
    assert back.json() == {"prompt": "hi!"}


async def test_messages_are_tokenised(http: httpx.AsyncClient) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "add_generation_prompt": False,
        "add_special_tokens": False,
    }
    assert (await http.post("/tokenize", json=asked)).json()["tokens"] == [104, 105]
    tool = {"type": "function", "function": {"name": "f"}}
    both = {"model": MODEL, "prompt": "hi", "tools": [tool]}
    refused = await http.post("/tokenize", json=both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
async def test_each_chunk_says_what_was_used_by_then(
    http: httpx.AsyncClient, path: str, n: int
) -> None:
    asked: Json = {"messages": [{"role": "user", "content": "Hello"}]}
    if path == "/v1/completions":
        asked = {"prompt": "Hello"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chunks_of(http, path, asked | {"n": n, "stream_options": options})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == n * 5
    for choice in range(n):
        own = [one for one in chunks if one["choices"][0]["index"] == choice]
        usages = [one["usage"] for one in own if one["usage"] is not None]
        assert len(usages) >= len(own) - 1  # the first may come before a worker has begun
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 5
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
        assert usages[-1]["total_tokens"] == usages[-1]["prompt_tokens"] + 5


@pytest.mark.parametrize(
    ("headers", "takes_ids"),
    [
        ({"accept": "*/*"}, False),
        ({"accept": "application/json"}, False),
        ({"accept": "text/event-stream"}, True),
        ({"accept": "application/json, text/event-stream;q=0.9"}, True),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 1}])
async def test_events_have_ids_for_who_takes_them(
    http: httpx.AsyncClient, headers: dict[str, str], takes_ids: bool, fields: Json
) -> None:
    body = {"model": MODEL, "prompt": "hi", "stream": True} | fields
    answer = await http.post("/v1/completions", json=body, headers=headers)
    lines = [line for line in answer.text.splitlines() if line]
    assert any(line.startswith("id: ") for line in lines) == takes_ids
    assert all(line.startswith(("data: ", "id: ")) for line in lines)


async def test_usage_of_each_chunk_goes_with_usage(http: httpx.AsyncClient) -> None:
    body = {
        "model": MODEL,
        "prompt": "hi",
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


async def test_a_stream_that_fails_before_a_worker_began(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    front.worker.end_with = Failed(code="worker_failed", message="it broke", retryable=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": options}
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_failed")
