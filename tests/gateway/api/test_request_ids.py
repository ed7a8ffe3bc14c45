"""X-Request-Id of a client: every answer returns it."""

from __future__ import annotations

import httpx
import openai
import pytest

from millrace.schemas.config import GatewayConfig
from tests.support.running_gateway import MODEL, running_gateway

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
_OURS = "x-millrace-request-id"


async def test_the_clients_id_is_on_what_the_sdk_reads(client: openai.AsyncOpenAI) -> None:
    own = {"X-Request-Id": "job-7/attempt-1"}
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], extra_headers=own
    )
    assert answer._request_id == own["X-Request-Id"]
    assert answer.id.startswith("chatcmpl-")
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(
            model="absent", messages=[{"role": "user", "content": "hi"}], extra_headers=own
        )
    assert refused.value.request_id == own["X-Request-Id"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", _CHAT, 200),
        ("POST", "/v1/chat/completions", _CHAT | {"stream": True}, 200),
        ("POST", "/v1/chat/completions", _CHAT | {"top_p": 7}, 400),
        ("GET", "/v1/chat/completions", None, 405),
        ("POST", "/v1/embeddings", {"model": MODEL}, 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/absent", None, 404),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "x" * 9_000}, 413),
        ("POST", "/v1/tokenize", {"model": MODEL, "prompt": "x" * 9_000}, 413),
    ],
)
async def test_the_clients_id_is_on_every_answer(
    method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    async with (
        running_gateway(GatewayConfig(max_body_bytes=8_000)) as front,
        httpx.AsyncClient(base_url=front.url) as http,
    ):
        answer = await http.request(method, path, json=body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert len(answer.headers.get_list(_OURS)) == 1


async def test_one_id_for_two_requests_makes_two_answers(http: httpx.AsyncClient) -> None:
    answers = [
        await http.post("/v1/chat/completions", json=_CHAT, headers={"X-Request-Id": "mine"})
        for _ in range(2)
    ]
    assert [one.status_code for one in answers] == [200, 200]
    ids = [one.headers[_OURS] for one in answers]
    assert ids == [one.json()["id"] for one in answers]
    assert ids[0] != ids[1]


async def test_the_clients_id_is_on_the_refusal_of_another_origin(http: httpx.AsyncClient) -> None:
    headers = {"X-Request-Id": "mine", "Origin": "https://elsewhere.example"}
    answer = await http.post("/v1/chat/completions", json=_CHAT, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (403, "mine")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\tb"])
async def test_an_id_of_another_form_is_ours_instead(http: httpx.AsyncClient, given: str) -> None:
    headers = {b"X-Request-Id": given.encode()}
    answer = await http.post("/v1/chat/completions", json=_CHAT, headers=headers)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == [answer.json()["id"]]
    assert _OURS not in answer.headers
