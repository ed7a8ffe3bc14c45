"""Batches of tenants: within their limits, and out of each other's sight."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import openai
import pytest

from millrace.bus.tenancy.tenants import TenantStore
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.batches.batch_system import (
    CHAT,
    BatchGateway,
    batch_gateway,
    batch_worker,
    chat_line,
    in_memory,
)
from tests.support.waiting import eventually

DEMANDING = GatewayConfig(auth="required")


async def key(front: BatchGateway, tenant: str, limits: LimitOverrides | None = None) -> str:
    """A new key of a tenant, which the client uses from now on."""
    assert front.gateway.redis is not None
    store = TenantStore(front.gateway.redis)
    _, token = await store.create_key(tenant, 0, limits=limits or LimitOverrides())
    front.client.api_key = token
    return token


async def test_over_a_limit_requests_wait(redis: RedisConfig) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis, DEMANDING) as front, batch_worker(connect) as worker:
        await key(front, "acme", LimitOverrides(concurrent_requests=2))
        worker.gate.clear()
        batch = await front.begin([chat_line(f"c{number}", "hi") for number in range(6)])
        await eventually(lambda: worker.num_running == 2)
        worker.release()
        batch = await front.end(batch)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 6
        assert {job.tenant for job in worker.jobs} == {"acme"}


async def test_a_request_over_a_limit_by_itself_is_refused(redis: RedisConfig) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis, DEMANDING) as front, batch_worker(connect):
        await key(front, "acme", LimitOverrides(tokens_per_minute=100))
        lines = [chat_line("small", "hi", max_tokens=9), chat_line("large", "hi", max_tokens=200)]
        batch = await front.end(await front.begin(lines))
        (good,) = await front.lines(batch.output_file_id)
        (bad,) = await front.lines(batch.error_file_id)
        assert (good["custom_id"], bad["custom_id"]) == ("small", "large")
        assert bad["response"]["status_code"] == 429
        assert bad["response"]["body"]["error"]["code"] == "tokens_per_minute"


async def test_what_was_reserved_is_settled(redis: RedisConfig) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis, DEMANDING) as front, batch_worker(connect):
        token = await key(front, "acme", LimitOverrides(tokens_per_minute=1_000_000))
        batch = await front.begin([chat_line(f"c{number}", "hello") for number in range(5)])
        await front.end(batch)
        headers = {"authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{front.server.port}/v1/limits"
        link = front.gateway.redis
        assert link is not None

        async def is_settled() -> bool:
            return not await link.call("KEYS", "hold:*") and not await link.call("KEYS", "run:*")

        await eventually(is_settled)
        async with httpx.AsyncClient(headers=headers) as http:
            assert (await http.get(url)).status_code == 200


async def test_nobody_sees_another_tenants_batches_and_files(redis: RedisConfig) -> None:
    async with batch_gateway(in_memory(), redis, DEMANDING) as front:
        owner = await key(front, "acme")
        batch = await front.begin([chat_line("a", "x")])
        stranger = await key(front, "other")
        base = f"http://127.0.0.1:{front.server.port}/v1"
        batch_path, file_path = f"/batches/{batch.id}", f"/files/{batch.input_file_id}"
        body = {
            "input_file_id": batch.input_file_id,
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        async with httpx.AsyncClient() as http:
            as_stranger = {"authorization": f"Bearer {stranger}"}
            for method, path in (
                ("GET", batch_path),
                ("POST", f"{batch_path}/cancel"),
                ("GET", file_path),
                ("GET", f"{file_path}/content"),
                ("DELETE", file_path),
            ):
                answer = await http.request(method, base + path, headers=as_stranger)
                assert answer.status_code == 404, path
                assert (await http.request(method, base + path)).status_code == 401, path
            for path in ("/batches", "/files"):
                listed = await http.get(base + path, headers=as_stranger)
                assert listed.json()["data"] == []
                own = await http.get(base + path, headers={"authorization": f"Bearer {owner}"})
                assert len(own.json()["data"]) == 1
            refused = await http.post(f"{base}/batches", json=body, headers=as_stranger)
            assert refused.json()["error"]["param"] == "input_file_id"


async def test_batches_that_wait_do_not_keep_other_tenants_out(redis: RedisConfig) -> None:
    config = msgspec.structs.replace(DEMANDING, max_batches_at_once=2, batch_scan_s=0.05)
    connect = in_memory()
    async with batch_gateway(connect, redis, config) as front, batch_worker(connect) as worker:
        await key(front, "acme")
        worker.gate.clear()
        greedy = [await front.begin([chat_line(f"a{number}", "hi")]) for number in range(3)]
        await eventually(lambda: worker.num_running == 2)
        await key(front, "other")
        modest = await front.begin([chat_line("o", "hi")])
        await eventually(lambda: [job.tenant for job in worker.jobs].count("other") == 1)
        worker.release()
        assert (await front.end(modest)).status == "completed"
        await key(front, "acme")
        for batch in greedy:
            ended = await front.end(batch)
            assert ended.request_counts is not None
            assert (ended.status, ended.request_counts.completed) == ("completed", 1)
        assert len({job.request_id for job in worker.jobs}) == len(worker.jobs) == 4


async def test_a_tenant_has_so_many_open_batches(redis: RedisConfig) -> None:
    config = msgspec.structs.replace(DEMANDING, max_open_batches=2)
    connect = in_memory()
    async with batch_gateway(connect, redis, config) as front, batch_worker(connect) as worker:
        await key(front, "acme")
        worker.gate.clear()
        lines = [chat_line("a", "hi")]
        batches = [await front.begin(lines) for _ in range(2)]
        file_id = batches[0].input_file_id
        begun = await asyncio.gather(
            *(
                front.client.batches.create(
                    input_file_id=file_id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )
                for _ in range(3)
            ),
            return_exceptions=True,
        )
        for error in begun:
            assert isinstance(error, openai.RateLimitError)
            assert error.code == "too_many_batches"
            assert error.response.headers["retry-after"] == "60"
        await key(front, "other")
        await front.begin(lines)
        worker.release()
        await key(front, "acme")
        for batch in batches:
            assert (await front.end(batch)).status == "completed"
        await front.end(await front.begin(lines))


@pytest.mark.parametrize("keeps", [False, True])
async def test_transcripts_of_a_batch_are_kept_if_its_tenant_asked_for_it(
    redis: RedisConfig, keeps: bool
) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis, DEMANDING) as front, batch_worker(connect) as worker:
        assert front.gateway.redis is not None
        await TenantStore(front.gateway.redis).change_tenant(
            "acme", lambda _known: TenantRecord(keep_transcripts=keeps)
        )
        await key(front, "acme")
        await front.end(await front.begin([chat_line("c", "hi"), chat_line("d", "ho")]))
        assert [job.keep_transcript for job in worker.jobs] == [keeps, keeps]
