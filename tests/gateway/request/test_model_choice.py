"""``model: auto`` through a running gateway: the model that answers, and its disclosure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace
from websockets.asyncio.client import connect

from millrace.bus.memory import MemoryBus
from millrace.gateway.__main__ import models_of
from millrace.gateway.batches.lines import GenerationBatchEndpoint, LineAttempt
from millrace.gateway.endpoints import CHAT_COMPLETIONS
from millrace.registry.catalogue import BUILT_IN, load_catalogue
from millrace.schemas.config import (
    Config,
    GatewayConfig,
    RedisConfig,
    SchedulerConfig,
    TierPolicies,
    TierPolicy,
)
from millrace.schemas.control import QueueStatus
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.echo_worker import EchoWorker
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

EASY: Any = [{"role": "user", "content": "Hello"}]
HARD: Any = [{"role": "user", "content": "Prove that 7 + 5 = 12, step by step."}]
SMALL, LARGE = "demo-small", "demo-large"
POLICIES = TierPolicies(
    enterprise=TierPolicy(weight=8, ttft_bound_ms=1_000),
    free=TierPolicy(weight=1, ttft_bound_ms=1_000, degrade=True),
)


class Fronts:
    """A gateway that serves the demo model under two names and ``auto``, with a worker of each."""

    def __init__(self, running: RunningGateway, workers: dict[str, EchoWorker]) -> None:
        self.running = running
        self.workers = workers

    @property
    def jobs(self) -> list[Job]:
        return [job for worker in self.workers.values() for job in worker.jobs]

    def queue(self, model: str, **fields: Any) -> None:
        """Publish a queue status of the model, as the scheduler does."""
        status = QueueStatus(model=model, num_queued=0, bound=100)
        self.running.gateway.fleet.on_queue(replace(status, **fields))


def _catalogue(folder: Path) -> str:
    source = BUILT_IN.parent / "demo" / "model"
    file = folder / "models.yaml"
    file.write_text(
        f"models:\n  {SMALL}: {{source: {source}}}\n  {LARGE}: {{source: {source}}}\n"
        f"routes:\n  auto: {{small: {SMALL}, large: {LARGE}, description: Whatever fits}}\n"
    )
    return str(file)


@asynccontextmanager
async def two_models(folder: Path, redis: RedisConfig | None = None) -> AsyncIterator[Fronts]:
    models = models_of(
        load_catalogue(_catalogue(folder)), Config(scheduler=SchedulerConfig(tiers=POLICIES))
    )
    for name in (SMALL, LARGE):
        await models.get(name)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_gateway(GatewayConfig(), models, redis=redis)
        )
        workers = {}
        for name in (SMALL, LARGE):
            worker = EchoWorker(
                MemoryBus(running.broker), name, worker_id=name, script=lambda _job: "fine"
            )
            await worker.start()
            stack.push_async_callback(worker.close)
            workers[name] = worker
        fleet = running.gateway.fleet
        await eventually(lambda: all(fleet.live_workers(name) for name in workers), timeout_s=5)
        yield Fronts(running, workers)


@pytest.fixture
async def fronts(tmp_path: Path) -> AsyncIterator[Fronts]:
    async with two_models(tmp_path) as made:
        yield made


@pytest.fixture
async def client(fronts: Fronts) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{fronts.running.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as made:
        yield made


def _said(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    return headers.get("x-millrace-model"), headers.get("x-millrace-route-reason")


async def test_the_model_that_answers_is_told_with_why(
    client: openai.AsyncOpenAI, fronts: Fronts
) -> None:
    create = client.chat.completions.with_raw_response.create
    easy = await create(model="auto", messages=EASY)
    assert easy.parse().model == SMALL
    assert _said(easy.headers) == (SMALL, "short")
    hard = await create(model="auto", messages=HARD)
    assert hard.parse().model == LARGE
    assert _said(hard.headers) == (LARGE, "reason+maths+tier")
    named = await create(model=LARGE, messages=EASY)
    assert _said(named.headers) == (LARGE, None)
    small, large, plain = sorted(fronts.jobs, key=lambda job: job.received_ns)
    assert (small.model, small.model_requested, small.route_reason) == (SMALL, "auto", "short")
    assert (large.model, large.model_requested) == (LARGE, "auto")
    assert (plain.model_requested, plain.route_reason) == (LARGE, "")


async def test_each_endpoint_tells_it_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.with_streaming_response.create(
        model="auto", messages=HARD, stream=True
    ) as streamed:
        assert _said(streamed.headers)[0] == LARGE
        lines = [line async for line in streamed.iter_lines() if line.startswith("data: {")]
        assert {json.loads(line[6:])["model"] for line in lines} == {LARGE}
    texts = client.completions.with_raw_response
    text = await texts.create(model="auto", prompt=["Hello", "Prove it, step by step: 7 + 5"])
    assert (text.parse().model, _said(text.headers)[0]) == (LARGE, LARGE)
    responses = client.responses.with_raw_response
    response = await responses.create(model="auto", input="Hello", truncation="auto", store=False)
    assert (response.parse().model, _said(response.headers)[0]) == (SMALL, SMALL)


async def test_a_socket_is_told_when_it_is_accepted(fronts: Fronts) -> None:
    async with connect(fronts.running.ws_url, subprotocols=[SUBPROTOCOL]) as socket:  # type: ignore[list-item]
        await socket.send(
            json.dumps({"type": "generate", "id": "a", "model": "auto", "messages": HARD})
        )
        accepted = json.loads(await socket.recv())
    assert (accepted["type"], accepted["model"]) == ("accepted", LARGE)
    assert accepted["route_reason"] == "reason+maths+tier"


async def test_models_lists_what_chooses(client: openai.AsyncOpenAI) -> None:
    cards = {card.id: card for card in (await client.models.list()).data}
    assert list(cards) == [SMALL, LARGE, "auto"]
    auto: Any = cards["auto"]
    assert auto.description == "Whatever fits"
    assert auto.max_model_len == cards[SMALL].max_model_len  # type: ignore[attr-defined]
    assert (await client.models.retrieve("auto")).id == "auto"


async def test_without_a_route_auto_is_no_model(front: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=front.url) as http:
        refused = await http.post("/v1/completions", json={"model": "auto", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {"prompt": "x"}, "model"),
        ("/v1/detokenize", {"tokens": [1]}, "model"),
        ("/v1/embeddings", {"input": "x"}, "model"),
        ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "y"], "logit_bias": {"3": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": EASY, "stop_token_ids": [3]}, "stop_token_ids"),
    ],
)
async def test_what_needs_one_model_is_refused_by_name(
    fronts: Fronts, path: str, body: dict[str, Any], param: str
) -> None:
    async with httpx.AsyncClient(base_url=fronts.running.url) as http:
        refused = await http.post(path, json={"model": "auto"} | body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert "auto" in error["message"]
    assert not fronts.jobs


async def test_who_may_be_degraded_does_not_wait_for_a_saturated_model(
    client: openai.AsyncOpenAI, fronts: Fronts
) -> None:
    async def served(tier: Tier) -> tuple[str | None, str | None]:
        create = client.chat.completions.with_raw_response.create
        answer = await create(model="auto", messages=HARD, extra_body={"service_tier": tier.value})
        return _said(answer.headers)

    fronts.queue(LARGE, ttft_ms={Tier.FREE: 5_000.0, Tier.ENTERPRISE: 5_000.0})
    assert await served(Tier.FREE) == (SMALL, "reason+maths:saturated")
    assert await served(Tier.ENTERPRISE) == (LARGE, "reason+maths+tier")
    fronts.queue(LARGE, num_queued=100)
    assert await served(Tier.FREE) == (SMALL, "reason+maths:saturated")
    fronts.queue(LARGE)
    assert await served(Tier.FREE) == (LARGE, "reason+maths")
    soon = {Tier.FREE: 100.0}
    fronts.queue(LARGE, ttft_ms=soon, tenant_ttft_ms={Tier.FREE: {"local": 5_000.0}})
    assert await served(Tier.FREE) == (SMALL, "reason+maths:saturated"), "its own jobs count"
    fronts.queue(LARGE, ttft_ms=soon, tenant_ttft_ms={Tier.FREE: {"other": 5_000.0}})
    assert await served(Tier.FREE) == (LARGE, "reason+maths"), "another tenant's do not"


async def test_a_model_whose_workers_went_gives_way(
    client: openai.AsyncOpenAI, fronts: Fronts
) -> None:
    fleet = fronts.running.gateway.fleet
    worker = fronts.workers[LARGE]
    await worker.close()
    await worker.announce(retired=True)
    await eventually(lambda: not fleet.live_workers(LARGE), timeout_s=5)
    answer = await client.chat.completions.with_raw_response.create(model="auto", messages=HARD)
    assert _said(answer.headers) == (SMALL, "reason+maths+tier:absent")


async def test_a_conversation_stays_with_the_large_model(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with (
        two_models(tmp_path, RedisConfig(url=redis_server.url)) as fronts,
        openai.AsyncOpenAI(base_url=f"{fronts.running.url}/v1", api_key="none") as client,
    ):

        async def turn(messages: Any, session_id: str, **more: Any) -> tuple[str | None, ...]:
            answer = await client.chat.completions.with_raw_response.create(
                model="auto", messages=messages, extra_body={"session_id": session_id} | more
            )
            return _said(answer.headers)

        assert await turn(EASY, "one") == (SMALL, "short")
        assert (await turn(HARD, "one"))[0] == LARGE
        assert await turn(EASY, "one") == (LARGE, "session")
        assert await turn(EASY, "another") == (SMALL, "short")
        assert await turn(EASY, "one", session_keep=0) == (SMALL, "short")

        first = await client.responses.create(model="auto", input="Prove it, step by step: 7 + 5")
        then = await client.responses.with_raw_response.create(
            model="auto", input="Thanks", previous_response_id=first.id
        )
        assert (first.model, _said(then.headers)[0]) == (LARGE, LARGE)


async def test_an_answer_that_goes_on_elsewhere_keeps_its_model(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with (
        two_models(tmp_path, RedisConfig(url=redis_server.url)) as fronts,
        httpx.AsyncClient(base_url=fronts.running.url) as http,
    ):
        body = {"model": "auto", "messages": HARD}
        headers = {"idempotency-key": "k"}
        first = await http.post("/v1/chat/completions", json=body, headers=headers)
        fronts.queue(LARGE, num_queued=100)
        again = await http.post("/v1/chat/completions", json=body, headers=headers)
        assert again.json() == first.json()
        assert _said(again.headers) == _said(first.headers) == (LARGE, "reason+maths+tier")
        assert len(fronts.jobs) == 1


async def test_a_line_of_a_batch_has_its_model_by_what_it_asks_alone(fronts: Fronts) -> None:
    gateway = fronts.running.gateway
    caller = await gateway.identity.caller({"type": "http", "headers": []})
    kind = GenerationBatchEndpoint(gateway, CHAT_COMPLETIONS)
    fronts.queue(LARGE, num_queued=100)
    for messages, model in ((EASY, SMALL), (HARD, LARGE)):
        body = json.dumps({"model": "auto", "messages": messages}).encode()
        order = await kind.order(body, caller, LineAttempt("batch-1", 0), 1, 2**62)
        (job,) = order.jobs
        assert (job.model, job.model_requested) == (model, "auto")
        assert job.route_reason
    body = json.dumps({"model": "auto", "messages": EASY, "stop_token_ids": [3]}).encode()
    with pytest.raises(ParameterError, match="stop_token_ids"):
        await kind.order(body, caller, LineAttempt("batch-1", 0), 1, 2**62)
