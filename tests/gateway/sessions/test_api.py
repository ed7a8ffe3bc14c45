"""Sessions as clients meet them: over HTTP and WebSocket, on one gateway or several."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect

from millrace.bus.redis_keys import session_key
from millrace.gateway.models import LoadedModels
from millrace.registry.served import ServedModel
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.frames import Failed
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.websocket import SUBPROTOCOL
from tests.gateway.sessions.fronts import LONG, SESSION, assistant, user
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually


@pytest.fixture
def models(model: ServedModel) -> LoadedModels:
    return LoadedModels(
        {MODEL: ModelCard(id=MODEL, created=0, max_model_len=None)}, lambda _: model
    )


@pytest.fixture
def redis_config(redis: Redis, redis_server: RedisServer) -> RedisConfig:
    return RedisConfig(url=redis_server.url)


@pytest.fixture
async def front(models: LoadedModels, redis_config: RedisConfig) -> AsyncIterator[RunningGateway]:
    async with running_gateway(models=models, redis=redis_config) as running:
        running.worker.script = lambda _job: ["Well", ", ", "yes."]
        yield running


@pytest.fixture
async def http(front: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as client:
        yield client


async def request(http: httpx.AsyncClient, text: str, **fields: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "session_id": SESSION,
        "max_tokens": 50,
    } | fields
    return await http.post("/v1/chat/completions", json=body)


async def test_a_cut_call_is_not_kept(
    front: RunningGateway, http: httpx.AsyncClient, redis: Redis
) -> None:
    front.worker.script = lambda _job: 'Hm.<tool_call>{"name": "f", "arguments": {"a": 1'
    front.worker.stop_reason = "}"
    tool = {"type": "function", "function": {"name": "f"}}
    answer = (await request(http, "q1", tools=[tool], stop="}")).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    messages = (await http.get(f"/v1/sessions/{SESSION}")).json()["messages"]
    assert [(one["role"], one["content"], one.get("tool_calls")) for one in messages] == [
        ("user", "q1", None),
        ("assistant", "Hm.", None),
    ]


async def test_a_conversation_over_http(
    front: RunningGateway, http: httpx.AsyncClient, model: ServedModel
) -> None:
    first = (await request(http, "q1")).json()
    assert first["choices"][0]["message"]["content"] == "Well, yes."
    assert first["session"]["num_messages"] == 0
    second = (await request(http, "q2")).json()
    assert second["session"] == {
        "session_id": SESSION,
        "version": 1,
        "num_messages": 2,
        "num_dropped": 0,
        "num_summarised": 0,
    }
    whole = [user("q1"), assistant("Well, yes."), user("q2")]
    assert front.worker.jobs[-1].prompt_token_ids == tuple(model.tokenizer.encode_chat(whole))

    streamed = await request(http, "q3", stream=True, session_keep=2)
    assert '"session":{' in streamed.text
    found = (await http.get(f"/v1/sessions/{SESSION}")).json()
    assert [message["content"] for message in found["messages"]] == [
        *("q1", "Well, yes."),
        *("q3", "Well, yes."),
    ]
    assert found["messages"][0] == {"role": "user", "content": "q1"}
    assert (found["session_id"], found["version"], found["num_summarised"]) == (SESSION, 3, 0)
    assert 3_590 < found["expires_in_s"] <= 3_600


async def test_deleting_over_http(http: httpx.AsyncClient) -> None:
    await request(http, "q")
    gone = await http.delete(f"/v1/sessions/{SESSION}")
    assert gone.json() == {"id": SESSION, "object": "session", "deleted": True}
    for answer in (
        await http.get(f"/v1/sessions/{SESSION}"),
        await http.delete(f"/v1/sessions/{SESSION}"),
        await http.get("/v1/sessions/a%2Fb"),
        await http.get("/v1/sessions/" + "x" * 300),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "session_not_found"
    bad = await http.get(f"/v1/sessions/{SESSION}", headers={"authorization": "Bearer mr-x-y"})
    assert bad.status_code == 401


async def test_what_is_refused(http: httpx.AsyncClient, redis: Redis) -> None:
    long = await request(http, LONG * 100)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    keep = await request(http, "q", session_keep=-1)
    assert (keep.status_code, keep.json()["error"]["param"]) == (400, "session_keep")
    await redis.hset(session_key("local", SESSION), mapping={"version": 1, "data": "x"})
    unreadable = await request(http, "q")
    assert (unreadable.status_code, unreadable.json()["error"]["param"]) == (409, "session_id")


async def test_a_request_that_is_refused_later_leaves_nothing(
    http: httpx.AsyncClient, redis: Redis
) -> None:
    """A request that no limit has counted must not pile up in Redis."""

    async def is_empty() -> bool:
        return not await redis.keys("ctx*")

    too_long = await request(http, LONG * 200)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    await eventually(is_empty)


async def test_a_failed_answer_adds_nothing(front: RunningGateway, http: httpx.AsyncClient) -> None:
    front.worker.stop_before, front.worker.end_with = 1, Failed(code="engine_failed", message="no")
    assert (await request(http, "q")).status_code == 500
    assert (await http.get(f"/v1/sessions/{SESSION}")).status_code == 404


async def test_a_stopped_answer_keeps_what_was_said(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    front.worker.stop_before = 1
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as socket:  # type: ignore[list-item]
        message = {"type": "generate", "id": "g", "model": MODEL, "session_id": SESSION}
        message["messages"] = [{"role": "user", "content": "q"}]  # type: ignore[assignment]
        await socket.send(json.dumps(message))
        while (said := json.loads(await socket.recv()))["type"] != "delta":
            if said["type"] == "accepted":
                assert said["session"]["session_id"] == SESSION
        await socket.send('{"type": "cancel", "id": "g"}')
        while (said := json.loads(await socket.recv()))["type"] != "done":
            pass
        assert said["finish_reason"] == "cancelled"
    found = (await http.get(f"/v1/sessions/{SESSION}")).json()
    assert [message["content"] for message in found["messages"]] == ["q", "Well"]


async def test_another_gateway_goes_on(
    front: RunningGateway, http: httpx.AsyncClient, models: LoadedModels, redis_config: RedisConfig
) -> None:
    await request(http, "q1")
    async with (
        running_gateway(
            models=models, redis=redis_config, broker=front.broker, gateway_id="gw-2"
        ) as other,
        httpx.AsyncClient(base_url=other.url, timeout=10) as there,
    ):
        second = (await request(there, "q2")).json()
        assert second["session"]["num_messages"] == 2
    assert len((await http.get(f"/v1/sessions/{SESSION}")).json()["messages"]) == 4


async def test_without_redis(models: LoadedModels) -> None:
    async with (
        running_gateway(models=models) as running,
        httpx.AsyncClient(base_url=running.url, timeout=10) as http,
    ):
        running.worker.script = lambda _job: ["yes"]
        refused = await request(http, "q")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "state_unavailable"
        assert (await request(http, "q", session_id=None)).status_code == 200
        assert (await http.get(f"/v1/sessions/{SESSION}")).status_code == 503


async def test_a_summary_is_a_job_of_its_own(
    models: LoadedModels, redis_config: RedisConfig
) -> None:
    config = GatewayConfig(session_summary_share=0.1)
    async with (
        running_gateway(config, models=models, redis=redis_config) as running,
        httpx.AsyncClient(base_url=running.url, timeout=10) as http,
    ):
        running.worker.script = lambda job: [
            "They talked." if job.request_id.startswith("sum-") else "Well, yes."
        ]
        for number in range(8):
            assert (await request(http, f"{number} {LONG}")).status_code == 200

        async def is_summarised() -> bool:
            found = (await http.get(f"/v1/sessions/{SESSION}")).json()
            return bool(found["summary"] == "They talked.")

        await eventually(is_summarised)
        after = (await request(http, "and now?")).json()
        assert after["session"]["num_summarised"] > 0
        assert after["session"]["num_messages"] >= 16
