"""Long prompts over HTTP: other requests are served meanwhile, and refused prompts count."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.models import LoadedModels
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.running_gateway import (
    MODEL,
    ByteModel,
    ByteTokenizer,
    RunningGateway,
    running_gateway,
)
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

LONG = "many words " * 10_000


class HeldTokenizer(ByteTokenizer):
    """Long texts wait to be let go."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.go = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 4_096:
            self.threads.append(threading.get_ident())
            assert self.go.wait(30)
        return super().encode(text, add_special_tokens)


def models_of(tokenizer: ByteTokenizer) -> LoadedModels:
    model = ByteModel()
    model.tokenizer = tokenizer
    return LoadedModels(
        {MODEL: ModelCard(id=MODEL, created=0, max_model_len=None)}, lambda _name: model
    )


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {"prompt": LONG}, 400),
        ("/v1/tokenize", {"prompt": LONG}, 200),
        ("/v1/embeddings", {"input": LONG}, 400),
    ],
)
async def test_others_are_served_while_a_long_prompt_is_read(
    path: str, fields: dict[str, Any], status: int
) -> None:
    tokenizer = HeldTokenizer()
    async with (
        running_gateway(models=models_of(tokenizer)) as front,
        httpx.AsyncClient(base_url=front.url, timeout=30) as client,
    ):
        body = {"model": MODEL, **fields}
        asking = [asyncio.create_task(client.post(path, json=body)) for _ in range(3)]
        await eventually(lambda: len(tokenizer.threads) == 1)
        await eventually(lambda: front.gateway.prompts.num_works == 3)
        assert (await client.get("/healthz")).json()["status"] == "ok"
        short = {"model": MODEL, "prompt": "short", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=short)).status_code == 200
        # One at a time of one tenant, and never in the event loop's thread.
        assert len(tokenizer.threads) == 1
        tokenizer.go.set()
        assert [(await asked).status_code for asked in asking] == [status] * 3
        assert threading.get_ident() not in tokenizer.threads


async def test_what_cannot_fit_is_refused_and_not_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demo = ServedModel.load(load_catalogue(""), "demo")
    texts: list[str] = []
    encode = demo.tokenizer._encode

    def counted(text: str, add_special_tokens: bool) -> list[int]:
        texts.append(text)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(demo.tokenizer, "_encode", counted)
    card = ModelCard(id="demo", created=0, max_model_len=None)
    async with (
        running_gateway(models=LoadedModels({"demo": card}, lambda _name: demo)) as front,
        httpx.AsyncClient(base_url=front.url, timeout=30) as client,
    ):
        message = {"role": "user", "content": "word " * 700_000}
        for path, fields in (
            ("/v1/completions", {"prompt": message["content"]}),
            ("/v1/chat/completions", {"messages": [message]}),
            ("/v1/responses", {"input": [message]}),
        ):
            refused = await client.post(path, json={"model": "demo", **fields})
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            said = refused.json()["error"]["message"]
            assert ("at least" in said) or ("tokens or more" in said)
    assert texts == []


class KeyedFront:
    """A gateway that demands keys, and the client of a tenant with limits."""

    def __init__(self, front: RunningGateway, client: httpx.AsyncClient) -> None:
        self.front = front
        self._client = client

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self._client.post(path, json={"model": MODEL, **fields})

    async def left(self) -> int:
        answer = (await self._client.get("/v1/limits")).json()
        found: int = answer["accounts"][0]["remaining"]["requests_per_minute"]
        return found


@pytest.fixture
async def keyed(redis_server: RedisServer) -> AsyncIterator[KeyedFront]:
    config = RedisConfig(url=redis_server.url)
    clock = SystemClock()
    link = RedisLink(config, clock)
    store = TenantStore(link)
    limits = LimitOverrides(requests_per_minute=6, concurrent_requests=1)
    await store.change_tenant("acme", lambda _known: TenantRecord(limits=limits))
    _, token = await store.create_key("acme", clock.now_ns())
    await link.close()
    headers = {"authorization": f"Bearer {token}"}
    async with (
        running_gateway(GatewayConfig(auth="required"), redis=config) as front,
        httpx.AsyncClient(base_url=front.url, headers=headers, timeout=30) as client,
    ):
        yield KeyedFront(front, client)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "no_such_field": 1}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/chat/completions", {"messages": "none"}),
    ("/v1/embeddings", {"input": []}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp-none"}),
]


async def test_refused_requests_count_against_the_limit(keyed: KeyedFront) -> None:
    for number, (path, fields) in enumerate(BAD):
        answer = await keyed.post(path, **fields)
        assert answer.status_code in {400, 404}, answer.text
        await eventually(_has_left(keyed, 5 - number))
    good = {"prompt": "hello", "max_tokens": 2}
    assert (await keyed.post("/v1/completions", **good)).status_code == 200
    for path, fields in BAD:
        answer = await keyed.post(path, **fields)
        assert answer.status_code == 429, answer.text
        assert answer.json()["error"]["code"] == "requests_per_minute"


async def test_a_long_request_counts_once(keyed: KeyedFront) -> None:
    spaced = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}) + " " * 100_000
    answer = await keyed._client.post("/v1/completions", content=spaced)
    assert answer.status_code == 200, answer.text
    await eventually(_has_left(keyed, 5))


async def test_tokenize_counts_against_the_limit(keyed: KeyedFront) -> None:
    for number in range(6):
        path, fields = (
            ("/v1/tokenize", {"prompt": "hello"})
            if number % 2
            else ("/v1/detokenize", {"tokens": [65]})
        )
        assert (await keyed.post(path, **fields)).status_code == 200
        await eventually(_has_left(keyed, 5 - number))
    for path in ("/v1/tokenize", "/v1/detokenize"):
        answer = await keyed.post(path, prompt="hello")
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "requests_per_minute"


async def test_over_the_limit_a_long_request_is_not_even_read(keyed: KeyedFront) -> None:
    for _ in range(6):
        await keyed.post("/v1/tokenize", prompt="hello")
    # The body is no JSON, and the gateway does not parse it.
    answer = await keyed._client.post("/v1/completions", content=b"{" * 100_000)
    assert answer.status_code == 429


def _has_left(keyed: KeyedFront, expected: int) -> Any:
    """A settlement is not waited for."""

    async def has() -> bool:
        return await keyed.left() == expected

    return has
