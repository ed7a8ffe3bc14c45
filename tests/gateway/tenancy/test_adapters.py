"""LoRA adapters at every endpoint: their names, owners, addition and removal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect

from millrace.bus.fleet.adapters import AdapterStore
from millrace.bus.memory import MemoryBroker
from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.models.adapters import Adapter
from millrace.schemas.tenants import TenantRecord
from tests.gateway.doors import DOORS, MESSAGES, WITHOUT_JOBS
from tests.support.adapters import write_adapter
from tests.support.running_gateway import ADAPTABLE, MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually


@pytest.fixture
async def redis_config(redis_server: RedisServer) -> RedisConfig:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    return RedisConfig(url=redis_server.url)


@pytest.fixture
async def link(redis_config: RedisConfig) -> AsyncIterator[RedisLink]:
    link = RedisLink(redis_config)
    yield link
    await link.close()


@pytest.fixture
async def running(redis_config: RedisConfig) -> AsyncIterator[RunningGateway]:
    config = GatewayConfig(auth="required")
    async with running_gateway(config, redis=redis_config) as running:
        yield running


@pytest.fixture
async def http(running: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=10) as client:
        yield client


class Keys:
    """A key of each tenant; ``ops`` is an administrator's."""

    def __init__(self, tokens: dict[str, str]) -> None:
        self._tokens = tokens

    def of(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._tokens[tenant]}"}


@pytest.fixture
async def keys(link: RedisLink) -> Keys:
    store, tokens = TenantStore(link), {}
    for tenant in ("ops", "acme", "other"):
        await store.change_tenant(tenant, lambda _known: TenantRecord())
        _, tokens[tenant] = await store.create_key(tenant, 0, is_admin=tenant == "ops")
    return Keys(tokens)


async def _load(
    http: httpx.AsyncClient, keys: Keys, folder: Path, name: str, **fields: Any
) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    return await http.post("/v1/load_lora_adapter", json=body, headers=keys.of("ops"))


async def _adapter(link: RedisLink, name: str) -> Adapter:
    found = await AdapterStore(link).find(name)
    assert found is not None
    return found


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("name", ["sql", f"{MODEL}:sql"])
async def test_each_door_takes_both_names(
    running: RunningGateway,
    http: httpx.AsyncClient,
    keys: Keys,
    link: RedisLink,
    tmp_path: Path,
    path: str,
    name: str,
) -> None:
    loaded = await _load(http, keys, write_adapter(tmp_path / "sql", ADAPTABLE), "sql")
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    answer = await http.post(path, json=DOORS[path] | {"model": name}, headers=keys.of("acme"))
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", name) == name
    jobs = running.worker.jobs
    assert bool(jobs) == (path not in WITHOUT_JOBS)
    version = (await _adapter(link, "sql")).version
    for job in jobs:
        assert (job.model, job.adapter, job.adapter_version) == (MODEL, "sql", version)
        assert job.model_requested == name


async def _over_socket(running: RunningGateway, headers: dict[str, str], model: str) -> str:
    asked = {"type": "generate", "id": "a", "messages": MESSAGES, "max_tokens": 3, "model": model}
    async with asyncio.timeout(10), connect(running.ws_url, additional_headers=headers) as socket:
        await socket.send(json.dumps(asked))
        while (message := json.loads(await socket.recv()))["type"] not in ("done", "error"):
            pass
    return str(message.get("code", message["type"]))


async def test_a_private_adapter_is_there_for_its_tenant_alone(
    running: RunningGateway, http: httpx.AsyncClient, keys: Keys, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql", ADAPTABLE)
    assert (await _load(http, keys, folder, "sql", tenants=["acme"])).status_code == 200
    for path, body in DOORS.items():
        for name in ("sql", f"{MODEL}:sql", "no-such-adapter"):
            asked = body | {"model": name}
            refused = await http.post(path, json=asked, headers=keys.of("other"))
            assert refused.status_code == 404, (path, name, refused.text)
            assert "model_not_found" in refused.text or path.startswith("/v1/messages")
            assert name in refused.text
    assert not running.worker.jobs
    assert await _over_socket(running, keys.of("other"), "sql") == "model_not_found"
    assert await _over_socket(running, keys.of("acme"), "sql") == "done"
    seen = {
        tenant: [
            (card["id"], card["parent"], card["adapters"])
            for card in (await http.get("/v1/models", headers=keys.of(tenant))).json()["data"]
        ]
        for tenant in ("acme", "other")
    }
    assert seen["other"] == [(MODEL, None, [])]
    assert seen["acme"] == [(MODEL, None, ["sql"]), ("sql", MODEL, [])]
    for tenant, status in (("acme", 200), ("other", 404)):
        version = {"anthropic-version": "2023-06-01"}
        theirs = await http.get("/v1/models", headers=keys.of(tenant) | version)
        assert [one["id"] for one in theirs.json()["data"]] == [one[0] for one in seen[tenant]]
        answer = await http.get("/v1/models/sql", headers=keys.of(tenant))
        assert answer.status_code == status


async def test_a_batch_may_name_one(http: httpx.AsyncClient, keys: Keys, tmp_path: Path) -> None:
    await _load(http, keys, write_adapter(tmp_path / "sql", ADAPTABLE), "sql", tenants=["acme"])
    body = DOORS["/v1/chat/completions"] | {"model": "sql"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    for tenant, counts in (("acme", (1, 0)), ("other", (0, 1))):
        headers = keys.of(tenant)
        files = {"file": ("a.jsonl", json.dumps(line)), "purpose": (None, "batch")}
        file = await http.post("/v1/files", files=files, headers=headers)
        asked = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        made = (await http.post("/v1/batches", json=asked, headers=headers)).json()
        path = f"/v1/batches/{made['id']}"

        async def ended(path: str = path, headers: dict[str, str] = headers) -> bool:
            batch = (await http.get(path, headers=headers)).json()
            return batch["status"] in ("completed", "failed")

        await eventually(ended, 20.0, "the batch's end")
        batch = (await http.get(path, headers=headers)).json()
        found = batch["request_counts"]
        assert (found["completed"], found["failed"]) == counts, batch


async def test_who_may_add_and_what_is_refused(
    http: httpx.AsyncClient, keys: Keys, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql", ADAPTABLE)
    body: dict[str, Any] = {"lora_name": "sql", "lora_path": str(folder)}
    for path, asked in (
        ("/v1/load_lora_adapter", body),
        ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
    ):
        answer = await http.post(path, json=asked, headers=keys.of("acme"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            403,
            "insufficient_permissions",
        )
    assert (await http.get("/v1/adapters", headers=keys.of("acme"))).status_code == 403
    wrong = write_adapter(
        tmp_path / "wrong", ADAPTABLE.__class__(**_fields(ADAPTABLE) | {"hidden_size": 64})
    )
    for fields, status, message in (
        ({"lora_path": str(tmp_path)}, 400, "adapter_config.json cannot be read"),
        ({"lora_path": "./relative/folder"}, 400, "absolute path"),
        ({"lora_path": str(tmp_path / "nowhere")}, 400, "cannot be found"),
        ({"lora_path": str(wrong)}, 400, "another model"),
        ({"lora_name": "a b"}, 400, "An adapter's name must be"),
        ({"lora_name": "auto"}, 400, "The adapter name auto is reserved"),
        ({"lora_name": ".."}, 400, "The adapter name .. is reserved"),
        ({"lora_name": "."}, 400, "The adapter name . is reserved"),
        ({"lora_name": f"{MODEL}:sql"}, 400, "An adapter's name must be"),
        ({"lora_name": MODEL}, 409, "is taken"),
        ({"base_model_name": "nope"}, 404, "no model 'nope'"),
        ({"tenants": ["x" * 200]}, 400, "tenant"),
        ({"prices": {"version": "1"}}, 400, "not a price book"),
        ({"lora_rank": 3}, 400, "not a field"),
    ):
        asked = body | fields
        answer = await http.post("/v1/load_lora_adapter", json=asked, headers=keys.of("ops"))
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]
    answer = await http.get("/v1/adapters", headers=keys.of("ops"))
    assert answer.json() == {"data": [], "object": "list"}


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


async def test_a_name_is_given_once_replaced_on_request_and_given_back(
    http: httpx.AsyncClient, keys: Keys, link: RedisLink, tmp_path: Path
) -> None:
    first = write_adapter(tmp_path / "a", ADAPTABLE)
    second = write_adapter(tmp_path / "b", ADAPTABLE, seed=1)
    assert (await _load(http, keys, first, "sql")).status_code == 200
    version = (await _adapter(link, "sql")).version
    taken = await _load(http, keys, second, "sql")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "adapter_exists")
    assert (await _load(http, keys, second, "sql", load_inplace=True)).status_code == 200
    assert (await _adapter(link, "sql")).version != version
    gone = await http.post(
        "/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=keys.of("ops")
    )
    assert gone.status_code == 200
    again = await http.post(
        "/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=keys.of("ops")
    )
    assert (again.status_code, again.json()["error"]["code"]) == (404, "adapter_not_found")
    asked = DOORS["/v1/completions"] | {"model": "sql"}
    refused = await http.post("/v1/completions", json=asked, headers=keys.of("acme"))
    assert refused.status_code == 404


async def test_another_gateway_knows_at_once_and_a_new_one_too(
    running: RunningGateway,
    http: httpx.AsyncClient,
    keys: Keys,
    redis_config: RedisConfig,
    tmp_path: Path,
) -> None:
    config = GatewayConfig(auth="required")
    broker: MemoryBroker = running.broker
    async with (
        running_gateway(config, redis=redis_config, broker=broker, gateway_id="two") as other,
        httpx.AsyncClient(base_url=other.url, timeout=10) as there,
    ):
        await _load(http, keys, write_adapter(tmp_path / "sql", ADAPTABLE), "sql")
        asked = DOORS["/v1/completions"] | {"model": "sql"}
        answer = await there.post("/v1/completions", json=asked, headers=keys.of("acme"))
        assert answer.status_code == 200, answer.text
