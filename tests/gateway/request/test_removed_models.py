"""A model that is taken away under requests that were accepted is the server's fault everywhere."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from millrace.gateway.errors import refusal_of_end
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.frames import Failed
from tests.support.running_gateway import MODEL, RunningGateway

_GONE = Failed(code=ModelNotFoundError.code, message="The model 'echo' is no longer served.")
_SAID: Any = {"messages": [{"role": "user", "content": "hello"}]}
_BODIES: dict[str, Any] = {
    "/v1/chat/completions": _SAID,
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**_SAID, "max_tokens": 9},
    "/v1/embeddings": {"input": "hello"},
}


@pytest.mark.parametrize("path", _BODIES)
async def test_a_model_removed_before_the_first_token_is_a_503(
    front: RunningGateway, http: httpx.AsyncClient, path: str
) -> None:
    front.worker.end_with = _GONE
    answer = await http.post(path, json={"model": MODEL, **_BODIES[path]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "model_not_found")
    kind = "overloaded_error" if path == "/v1/messages" else "server_error"
    assert error["type"] == kind
    # A name that no model has is the caller's mistake.
    unknown = await http.post(path, json={"model": "absent", **_BODIES[path]})
    error = unknown.json()["error"]
    assert (unknown.status_code, error["code"]) == (404, "model_not_found")
    kind = "not_found_error" if path == "/v1/messages" else "invalid_request_error"
    assert error["type"] == kind


@pytest.mark.parametrize("path", [path for path in _BODIES if path != "/v1/embeddings"])
async def test_a_model_removed_during_a_stream_is_an_error_event(
    front: RunningGateway, http: httpx.AsyncClient, path: str
) -> None:
    front.worker.stop_before, front.worker.end_with = 3, _GONE
    answer = await http.post(path, json={"model": MODEL, **_BODIES[path], "stream": True})
    assert answer.status_code == 200
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    if path == "/v1/responses":
        error, failed = events[-2:]
        assert (error["type"], error["code"]) == ("error", "model_not_found")
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "server_error"
        return
    kind = "overloaded_error" if path == "/v1/messages" else "server_error"
    assert events[-1]["error"]["type"] == kind


async def test_a_model_removed_during_a_websocket_stream_is_an_error(front: RunningGateway) -> None:
    front.worker.end_with = _GONE
    async with connect(front.ws_url, subprotocols=["millrace.v1"]) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps({"type": "generate", "id": "a", "model": MODEL, **_SAID}))
        error = json.loads(await socket.recv())
        while error["type"] != "error":
            error = json.loads(await socket.recv())
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("code", "in_responses"),
    [
        ("grammar_invalid", "invalid_prompt"),
        ("context_length_exceeded", "context_length_exceeded"),
        ("payload_too_large", "invalid_prompt"),
        ("queue_full", "rate_limit_exceeded"),
        ("invalid_api_key", "server_error"),
        ("worker_failed", "server_error"),
        ("taken_over", "server_error"),
    ],
)
async def test_an_end_is_the_requests_fault_or_the_servers(
    front: RunningGateway, http: httpx.AsyncClient, code: str, in_responses: str
) -> None:
    front.worker.stop_before = 3
    front.worker.end_with = Failed(code=code, message="It ends.")
    body = {"model": MODEL, "input": "hello", "stream": True}
    answer = await http.post("/v1/responses", json=body)
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["response"]["error"]["code"] == in_responses
    status = refusal_of_end(front.worker.end_with).status
    is_request_at_fault = in_responses in ("invalid_prompt", "context_length_exceeded")
    assert (status in (400, 413)) == is_request_at_fault
