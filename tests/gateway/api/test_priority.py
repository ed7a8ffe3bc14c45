"""vLLM's ``priority`` of a request, from each endpoint that takes it to the jobs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.resuming.clients import opened, send, until
from tests.support.running_gateway import MODEL, RunningGateway

_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one. two"}]}
_ASKS: list[tuple[str, dict[str, Any]]] = [
    ("v1/chat/completions", _CHAT | {"n": 2}),
    ("v1/completions", {"model": MODEL, "prompt": ["ab", "cd"]}),
    ("v1/responses", {"model": MODEL, "input": "ab", "store": False}),
    ("v1/embeddings", {"model": MODEL, "input": ["ab", "cd"]}),
    ("pooling", {"model": MODEL, "input": "ab"}),
    ("v1/rerank", {"model": MODEL, "query": "ab", "documents": ["cd"]}),
    ("v1/score", {"model": MODEL, "text_1": "ab", "text_2": "cd"}),
]


@pytest.mark.parametrize(("path", "body"), _ASKS)
async def test_jobs_have_the_priority_of_their_request(
    front: RunningGateway, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for given, expected in ((-(2**63), -(2**63)), (7, 7), (None, 0)):
        front.worker.jobs.clear()
        answer = await http.post(f"/{path}", json=body | {"priority": given})
        assert answer.status_code == 200
        assert {job.priority for job in front.worker.jobs} == {expected}


@pytest.mark.parametrize(("path", "body"), _ASKS)
@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, "high", 0.5])
async def test_a_priority_that_no_job_can_have(
    front: RunningGateway, http: httpx.AsyncClient, path: str, body: dict[str, Any], priority: Any
) -> None:
    refused = await http.post(f"/{path}", json=body | {"priority": priority})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert not front.worker.jobs


async def test_a_generation_over_a_websocket_has_a_priority(front: RunningGateway) -> None:
    async with opened(front) as socket:
        await send(socket, "generate", id="a", **_CHAT, priority=-3)
        await until(socket, "done")
    assert [job.priority for job in front.worker.jobs] == [-3]
