"""Versions of a model at every endpoint, and rollouts run by administrators."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from websockets.asyncio.client import connect

from millrace.bus.fleet.rollouts import RolloutStore
from millrace.bus.memory import MemoryBus
from millrace.gateway.models import LoadedModels
from millrace.registry.routing.router import Route, Router
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.jobs import Job
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.models.rollouts import Rollout, RolloutState
from tests.gateway.doors import DOORS, MESSAGES, WITHOUT_JOBS
from tests.support.echo_worker import EchoWorker
from tests.support.running_gateway import ByteModel, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

OLD, NEW = "chat", "chat@v2"
CHAT = "/v1/chat/completions"
CANARY = Rollout(model=OLD, stable=OLD, candidate=NEW, state=RolloutState.RUNNING, percent=50.0)


class Fronts:
    """A gateway that serves two versions of a model, with a worker of each."""

    def __init__(self, running: RunningGateway, workers: list[EchoWorker], link: RedisLink) -> None:
        self.running = running
        self.store = RolloutStore(link)
        self._workers = workers

    @property
    def jobs(self) -> list[Job]:
        return [job for worker in self._workers for job in worker.jobs]

    async def put(self, **changes: Any) -> Rollout:
        """Have the rollout be so, and the gateway know."""
        stored = await self.store.change(await self.store.find(OLD), replace(CANARY, **changes))
        assert stored is not None
        await self.running.gateway.rollouts.look()
        return stored


@pytest.fixture
async def fronts(redis_server: RedisServer) -> AsyncIterator[Fronts]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    redis = RedisConfig(url=redis_server.url)
    cards = {
        name: ModelCard(id=name, created=created, max_model_len=None)
        for created, name in enumerate((OLD, NEW))
    }
    router = Router({"auto": Route(small=NEW, large=OLD)})
    models = LoadedModels(cards, lambda _name: ByteModel(), router)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_gateway(GatewayConfig(), models, redis=redis)
        )
        link = RedisLink(redis)
        stack.push_async_callback(link.close)
        workers = []
        for name in (OLD, NEW):
            worker = EchoWorker(MemoryBus(running.broker), name, worker_id=name)
            await worker.start()
            stack.push_async_callback(worker.close)
            workers.append(worker)
        fleet = running.gateway.fleet
        await eventually(lambda: all(map(fleet.live_workers, (OLD, NEW))), timeout_s=5)
        yield Fronts(running, workers, link)


@pytest.fixture
async def http(fronts: Fronts) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fronts.running.url, timeout=10) as client:
        yield client


async def _ask(http: httpx.AsyncClient, model: str, **fields: Any) -> str:
    """Return the version that answers a chat."""
    answer = await http.post(CHAT, json=DOORS[CHAT] | {"model": model} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-millrace-model"] == answer.json()["model"]
    return str(answer.json()["model"])


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(("name", "version"), [(OLD, NEW), ("chat@stable", NEW), (NEW, NEW)])
async def test_each_door_takes_every_name(
    fronts: Fronts, http: httpx.AsyncClient, path: str, name: str, version: str
) -> None:
    await fronts.put(state=RolloutState.COMPLETED, stable=NEW, percent=0.0)
    answer = await http.post(path, json=DOORS[path] | {"model": name})
    assert answer.status_code == 200, answer.text
    assert bool(fronts.jobs) == (path not in WITHOUT_JOBS)
    for job in fronts.jobs:
        assert (job.model, job.model_requested) == (version, name)
        assert job.route_reason == ("" if name == version else "version")


@pytest.mark.parametrize("path", DOORS)
async def test_the_version_that_was_there_before_others_has_a_name_of_its_own(
    fronts: Fronts, http: httpx.AsyncClient, path: str
) -> None:
    await fronts.put(state=RolloutState.COMPLETED, stable=NEW, percent=0.0)
    answer = await http.post(path, json=DOORS[path] | {"model": "chat@initial"})
    assert answer.status_code == 200, answer.text
    assert {job.model for job in fronts.jobs} <= {OLD}


async def test_a_share_of_requests_gets_the_canary_and_a_session_one_of_both(
    fronts: Fronts, http: httpx.AsyncClient
) -> None:
    assert {await _ask(http, OLD) for _ in range(8)} == {OLD}
    await fronts.put()
    answered = [await _ask(http, OLD) for _ in range(40)]
    assert 6 <= answered.count(NEW) <= 34
    assert {(job.model_requested, job.route_reason) for job in fronts.jobs} == {(OLD, "version")}
    for session in ("a", "b", "c"):
        of_session = {await _ask(http, OLD, session_id=session) for _ in range(4)}
        assert len(of_session) == 1
    assert await _ask(http, "chat@canary") == NEW
    assert await _ask(http, "chat@stable") == OLD


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (
            "/v1/messages",
            {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        ),
        ("/v1/responses", {"truncation": "auto"}),
    ],
)
async def test_a_version_is_chosen_once_for_each_request(
    fronts: Fronts,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
) -> None:
    models, chosen = fronts.running.gateway.models, []
    choose = models.version

    def noted(name: str, key: str) -> str | None:
        chosen.append(choose(name, key))
        return chosen[-1]

    monkeypatch.setattr(models, "version", noted)
    await fronts.put()
    for _ in range(12):
        answer = await http.post(path, json=DOORS[path] | {"model": OLD} | fields)
        assert answer.status_code == 200, answer.text
    assert sorted(job.model for job in fronts.jobs) == sorted(map(str, chosen))


async def test_a_socket_gets_a_version_and_is_told_which(fronts: Fronts) -> None:
    await fronts.put(percent=100.0)
    asked = {"type": "generate", "id": "a", "messages": MESSAGES, "max_tokens": 3, "model": OLD}
    async with connect(fronts.running.ws_url) as socket:
        await socket.send(json.dumps(asked))
        message = json.loads(await socket.recv())
        while message["type"] != "accepted":
            message = json.loads(await socket.recv())
    assert (message["model"], message["route_reason"]) == (NEW, "version")


async def test_a_route_leads_to_a_version(fronts: Fronts, http: httpx.AsyncClient) -> None:
    await fronts.put(state=RolloutState.COMPLETED, stable=NEW, percent=0.0)
    hard = [{"role": "user", "content": "Prove that 7 + 5 = 12, step by step."}]
    assert await _ask(http, "auto", messages=hard) == NEW
    (job,) = fronts.jobs
    assert (job.model_requested, job.model) == ("auto", NEW)
    assert job.route_reason.startswith("reason")


async def test_a_route_sees_the_version_that_answers_and_goes_on_with_it(
    fronts: Fronts, http: httpx.AsyncClient
) -> None:
    models, fleet = fronts.running.gateway.models, fronts.running.gateway.fleet
    models.router = Router({"auto": Route(small="other", large=OLD)})
    models._cards["other"] = ModelCard(id="other", created=2, max_model_len=None)
    await fronts.put(state=RolloutState.COMPLETED, stable=NEW, percent=0.0)
    # The first version's workers are gone, as after it was retired; the small model has none.
    (old,) = fleet.live_workers(OLD)
    fleet.on_worker(replace(old, retired=True))
    hard = [{"role": "user", "content": "Prove that 7 + 5 = 12, step by step."}]
    assert await _ask(http, "auto", messages=hard, session_id="s") == NEW
    # A turn of few words is no reason to leave it.
    assert await _ask(http, "auto", messages=MESSAGES, session_id="s") == NEW
    assert fronts.jobs[-1].route_reason.startswith("session")


async def test_models_tell_their_versions(fronts: Fronts, http: httpx.AsyncClient) -> None:
    await fronts.put(percent=25.0)
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert set(cards) == {OLD, NEW, "auto"}
    assert cards[OLD]["versions"] == {OLD: 75.0, NEW: 25.0}
    assert (cards[OLD]["parent"], cards[NEW]["parent"]) == (None, OLD)
    assert (await http.get(f"/v1/models/{NEW}")).json()["versions"] == {}
    stable = (await http.get("/v1/models/chat@stable")).json()
    assert (stable["id"], stable["parent"]) == ("chat@stable", OLD)
    await fronts.put(state=RolloutState.ABORTED, percent=0.0)
    refused = await http.post(CHAT, json=DOORS[CHAT] | {"model": "chat@canary"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_lines_of_a_batch_go_to_the_stable_version(
    fronts: Fronts, http: httpx.AsyncClient
) -> None:
    await fronts.put(percent=99.0)
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": path,
                "body": DOORS[path] | {"model": OLD},
            }
        )
        for number, path in enumerate([CHAT] * 4)
    ]
    files = {"file": ("a.jsonl", "\n".join(lines)), "purpose": (None, "batch")}
    file = await http.post("/v1/files", files=files)
    asked = {
        "input_file_id": file.json()["id"],
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    assert (await http.post("/v1/batches", json=asked)).status_code == 200
    await eventually(lambda: len(fronts.jobs) == 4, timeout_s=10)
    assert {job.model for job in fronts.jobs} == {OLD}


async def test_a_rollout_is_started_looked_at_and_turned_back(
    fronts: Fronts, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/v1/rollouts")).json()["data"] == []
    assert (await http.get(f"/v1/rollouts/{OLD}")).status_code == 404
    asked = {"version": NEW, "canary_percent": 10, "abort_if": "error_rate>1%"}
    started = await http.post("/v1/rollouts", json=asked)
    assert started.status_code == 200, started.text
    rollout = started.json()["rollout"]
    assert (rollout["model"], rollout["candidate"]) == (OLD, NEW)
    again = await http.post("/v1/rollouts", json=asked)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "rollout_conflict")
    (listed,) = (await http.get("/v1/rollouts")).json()["data"]
    assert listed == (await http.get(f"/v1/rollouts/{OLD}")).json()
    (shown,) = (await http.get("/ops/api/rollouts")).json()
    # Of more digits than a browser's numbers have.
    assert shown["rollout"]["started_ns"] == str(listed["rollout"]["started_ns"])
    assert shown["rollout"]["candidate"] == NEW
    back = await http.post(f"/v1/rollouts/{OLD}/rollback")
    assert back.json()["rollout"]["state"] == "aborted"
    twice = await http.post(f"/v1/rollouts/{OLD}/rollback")
    assert twice.status_code == 409
    never = await http.post("/v1/rollouts/other/rollback")
    assert (never.status_code, never.json()["error"]["code"]) == (404, "rollout_not_found")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"version": NEW, "canary_percent": 0}, 400, "canary_percent"),
        ({"version": NEW, "abort_if": "slow"}, 400, "abort_if"),
        ({"version": NEW, "canary": 3}, 400, "canary"),
        ({}, 400, "version"),
        ({"version": "chat@v9"}, 404, "model"),
        ({"version": OLD}, 409, None),
    ],
)
async def test_what_is_no_rollout_is_refused(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, param: str | None
) -> None:
    refused = await http.post("/v1/rollouts", json=body)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"] == param
