"""HTTP mistakes of clients: reported where they matter, accepted where they do not."""

from __future__ import annotations

import json

import httpx
import pytest

from millrace.gateway.openapi.document import openapi_document
from millrace.schemas.config import GatewayConfig
from tests.support.running_gateway import MODEL, running_gateway

_BODY = {"model": MODEL, "prompt": "hi"}
_ORIGIN = "https://app.example"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/tokenize"])
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 200),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/xml", 415),
    ],
)
async def test_a_body_is_said_to_be_json(
    http: httpx.AsyncClient, path: str, kind: str, status: int
) -> None:
    body = json.dumps(_BODY)
    answer = await http.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code == status
    if status == 415:
        error = answer.json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert kind.partition(";")[0] in error["message"]
    assert (await http.post(path, content=body)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions/"), ("GET", "/v1/models/"), ("POST", "/v1/tokenize/")],
)
async def test_a_slash_at_the_end_changes_nothing(
    http: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await http.request(method, path, json=_BODY if method == "POST" else None)
    assert answer.status_code == 200


async def test_pages_may_read_why_they_were_refused_and_what_is_left() -> None:
    config = GatewayConfig(allowed_origins=(_ORIGIN,), max_body_bytes=1_000)
    async with (
        running_gateway(config) as front,
        httpx.AsyncClient(base_url=front.url, headers={"origin": _ORIGIN}) as http,
    ):
        answers = [
            await http.post("/v1/completions", json=_BODY),
            await http.post("/v1/completions", json=_BODY | {"n": 0}),
            await http.post("/v1/completions", content=b"x" * 2_000),
            await http.post("/v1/completions", content="x", headers={"content-type": "text/xml"}),
            await http.post("/v1/tokenize", json={"model": "absent", "prompt": "x"}),
            await http.get("/v1/completions"),
            await http.delete("/v1/models"),
            await http.get("/absent"),
        ]
    assert [one.status_code for one in answers] == [200, 400, 413, 415, 404, 405, 405, 404]
    limits = {name for name in openapi_document()["components"]["headers"] if "ratelimit" in name}
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == _ORIGIN
        assert limits <= set(answer.headers["access-control-expose-headers"].split(", "))
