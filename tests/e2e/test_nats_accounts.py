"""The whole system on a nats-server where each part may do its own work only, and the service of a
tenant that publishes jobs there with nothing but nats-py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal
from typing import Any

import httpx
import msgspec
import nats
import openai
import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from millrace.bus import subjects
from millrace.bus.nats.permissions import service_inbox
from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.jobs import Tier
from millrace.schemas.records import RequestRecord
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.e2e.guarded_system import GuardedSystem, guarded_system
from tests.e2e.nats_service import WITHIN_S, Service
from tests.support.nats.users import ACME
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuardedSystem]:
    async with guarded_system(tmp_path_factory.mktemp("guarded")) as made:
        yield made
        assert made.forbidden() == []


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(system: GuardedSystem) -> AsyncIterator[Service]:
    client = await nats.connect(
        system.nats.url_of(ACME.user), inbox_prefix=service_inbox(ACME.tenant)
    )
    yield await Service(client, ACME.tenant).open()
    await client.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def redis(system: GuardedSystem) -> AsyncIterator[RedisLink]:
    link = RedisLink(system.config.redis)
    yield link
    await link.close()


@pytest_asyncio.fixture(loop_scope="module")
async def limits(redis: RedisLink) -> Callable[..., Awaitable[None]]:
    """Set limits of the tenant and reset its usage."""

    async def give(**limits: Any) -> None:
        for name in ("lim", "run", "hold"):
            await redis.call("DEL", f"{name}:t:{ACME.tenant}")
        record = TenantRecord(tier=Tier.PRO, limits=LimitOverrides(**limits))
        await TenantStore(redis).change_tenant(ACME.tenant, lambda _known: record)

    await give()
    return give


async def spent(redis: RedisLink) -> Decimal:
    keys: list[bytes] = await redis.call("KEYS", f"spent:t:{ACME.tenant}:*")
    amounts = [int(await redis.call("GET", key.decode())) for key in keys]
    return Decimal(sum(amounts)).scaleb(-9)


async def records(system: GuardedSystem, request_id: str) -> list[RequestRecord]:
    """Return the request's records in the outbox."""
    client = await nats.connect(system.nats.url_of("operator"), inbox_prefix="_INBOX.operator")
    try:
        manager = client.jsm()
        last = (await manager.stream_info(subjects.OUTBOX_STREAM)).state.last_seq
        found = []
        for sequence in range(1, last + 1):
            message = await manager.get_msg(subjects.OUTBOX_STREAM, sequence)
            if message.subject == subjects.REQUEST_RECORD:
                record = msgspec.msgpack.decode(message.data or b"", type=RequestRecord)
                if record.request_id == request_id:
                    found.append(record)
        return found
    finally:
        await client.close()


async def one_record(system: GuardedSystem, request_id: str) -> RequestRecord:
    async def is_there() -> bool:
        return bool(await records(system, request_id))

    await eventually(is_there, WITHIN_S, f"{request_id}'s record")
    (record,) = await records(system, request_id)
    return record


async def until_spent(redis: RedisLink, amount: Decimal) -> None:
    async def is_spent() -> bool:
        return await spent(redis) >= amount

    await eventually(is_spent, WITHIN_S, "the charge")
    # To the billionth, rounded up.
    assert amount <= await spent(redis) < amount + Decimal("0.000000002")


# --- each part does its work -----------------------------------------------------------------


async def test_a_job_is_answered_kept_recorded_and_charged(
    system: GuardedSystem, service: Service, redis: RedisLink, limits: Callable[..., Any]
) -> None:
    before = await spent(redis)
    await service.publish("whole-1")
    assert (await service.ended("whole-1"))["type"] == "done"
    assert len(service.token_ids("whole-1")) == 20
    assert (await service.result("whole-1"))["status"] == "done"
    record = await one_record(system, "whole-1")
    assert (record.tenant, record.completion_tokens) == (ACME.tenant, 20)
    assert record.cost > 0
    await until_spent(redis, before + record.cost)

    async def is_in_clickhouse() -> bool:
        async with httpx.AsyncClient(base_url=system.http, timeout=20.0) as http:
            page = await http.get("/ops/api/requests_page", params={"from_s": -3600})
            return "whole-1" in page.text

    await eventually(is_in_clickhouse, WITHIN_S, "the row")


async def test_a_service_cancels_its_job_and_asks_for_its_result(
    service: Service, limits: Callable[..., Any]
) -> None:
    client, tenant = service.client, ACME.tenant

    async def ask(request_id: str) -> dict[str, Any]:
        answer = await client.request(f"ctl.result.{tenant}.{request_id}", b"", timeout=5.0)
        found: dict[str, Any] = json.loads(answer.data)
        return found

    await service.publish("stopped-1", 2_000)
    await eventually(lambda: len(service.token_ids("stopped-1")) > 2, WITHIN_S, "first tokens")
    assert (await ask("stopped-1"))["error"]["code"] == "result_not_ready"
    await client.publish(f"ctl.cancel.{tenant}.stopped-1", b"")
    assert (await service.ended("stopped-1"))["type"] == "cancelled"
    await service.result("stopped-1")
    found = await ask("stopped-1")
    assert (found["status"], found["tenant"]) == ("cancelled", tenant)
    # The cancel may come first.
    await client.publish(f"ctl.cancel.{tenant}.stopped-2", b"")
    await service.publish("stopped-2", store_result=False)
    assert (await service.ended("stopped-2"))["type"] == "cancelled"

    async def has_ended() -> bool:
        return bool((await ask("stopped-2"))["error"]["code"] == "result_not_stored")

    await eventually(has_ended, WITHIN_S, "the note of its end")
    assert (await ask("stopped-3"))["error"]["code"] == "result_not_found"


async def test_clients_of_the_gateway_notice_nothing(system: GuardedSystem) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none") as client:
        answer = await client.completions.create(model="demo", prompt="What?", max_tokens=8, n=2)
        assert len(answer.choices) == 2
        line = {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "demo", "prompt": "What?", "max_tokens": 4},
        }
        file = await client.files.create(
            file=("in.jsonl", json.dumps(line).encode()), purpose="batch"
        )
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def is_over() -> bool:
            return (await client.batches.retrieve(batch.id)).status == "completed"

        await eventually(is_over, WITHIN_S, "the batch's end")
        await client.files.delete(file.id)
        stream = await client.completions.create(
            model="demo", prompt="What?", max_tokens=2_000, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
    # The client left, which ends it: no worker decodes 2,000 tokens of 20 ms.
    await eventually(
        lambda: all(not status.num_running for status in system.statuses.values()),
        WITHIN_S,
        "the cancel",
    )


async def test_streams_outlive_a_killed_worker_and_move_from_one_that_drains(
    system: GuardedSystem, service: Service
) -> None:
    ids = [f"moved-{number}" for number in range(4)]
    for request_id in ids:
        await service.publish(request_id, 150)
    await eventually(
        lambda: all(len(service.token_ids(one)) > 5 for one in ids), WITHIN_S, "first tokens"
    )
    system.kill("worker-1")
    await asyncio.gather(*(system.start("workers", f"worker-{number}") for number in (3, 4)))
    draining = system.drain("worker-2")
    for request_id in ids:
        assert (await service.ended(request_id))["type"] == "done"
        assert len(service.token_ids(request_id)) == 150
        await one_record(system, request_id)
    await eventually(lambda: draining.poll() is not None, WITHIN_S, "the drained worker's end")


# --- limits of who publishes -----------------------------------------------------------------


async def test_jobs_over_a_limit_wait_and_those_over_the_line_are_told(
    system: GuardedSystem, service: Service, limits: Callable[..., Any]
) -> None:
    await limits(concurrent_requests=1, max_waiting_jobs=3)
    ids = [f"line-{number}" for number in range(7)]
    await service.publish(ids[0], 150)
    await eventually(lambda: bool(service.token_ids(ids[0])), WITHIN_S, "first tokens")
    for request_id in ids[1:]:
        await service.publish(request_id)
    ends = [await service.ended(request_id) for request_id in ids]
    assert [end["type"] for end in ends] == ["done"] * 4 + ["shed"] * 3, "the newest are refused"
    assert ends[-1]["limit"] == "max_waiting_jobs"
    assert ends[-1]["retry_after_s"] > 0
    assert "of tenant acme reached: 3 jobs wait in tier free" in ends[-1]["message"]
    found = [await one_record(system, request_id) for request_id in ids]
    codes = [(record.status.value, record.error_code) for record in found]
    assert codes == [("done", "")] * 4 + [("shed", "max_waiting_jobs")] * 3


async def test_a_budget_that_is_spent_ends_jobs_for_this_month(
    system: GuardedSystem, service: Service, limits: Callable[..., Any]
) -> None:
    await limits(monthly_budget=Decimal("0.000000001"))
    await service.publish("poor-1")
    end = await service.ended("poor-1")
    assert (end["type"], end["code"]) == ("failed", "insufficient_quota")
    assert not end.get("retryable", False)
    record = await one_record(system, "poor-1")
    assert (record.status.value, record.error_code) == ("failed", "insufficient_quota")
    assert (await service.result("poor-1"))["error_code"] == "insufficient_quota"


async def test_a_job_that_names_another_tenant_or_its_listener_is_refused(
    service: Service, limits: Callable[..., Any]
) -> None:
    await service.publish("forged-1", tenant="shop")
    end = await service.ended("forged-1")
    assert (end["type"], end["code"]) == ("failed", "tenant_mismatch")
    await service.publish("forged-2", reply="shop")
    assert (await service.result("forged-2"))["error_code"] == "reply_forbidden"


async def test_a_job_is_charged_once_though_its_scheduler_and_worker_die(
    system: GuardedSystem, service: Service, redis: RedisLink, limits: Callable[..., Any]
) -> None:
    await limits(requests_per_minute=2, concurrent_requests=2)
    before = await spent(redis)
    await service.publish("killed-1", 150)
    await eventually(lambda: len(service.token_ids("killed-1")) > 5, WITHIN_S, "first tokens")
    holder = next(
        frame["worker_id"] for frame in service.frames["killed-1"] if frame["type"] == "started"
    )
    system.kill("scheduler-1")
    system.kill(holder.rpartition("-")[0])
    await asyncio.gather(
        system.start("scheduler", "scheduler-2"), system.start("workers", "worker-5")
    )
    assert (await service.ended("killed-1"))["type"] == "done"
    assert len(service.token_ids("killed-1")) == 150
    record = await one_record(system, "killed-1")
    await until_spent(redis, before + record.cost)
    assert await redis.call("ZCARD", f"run:t:{ACME.tenant}") == 0
    # It took one of the two that it may ask in a minute, though it was delivered twice.
    await service.publish("killed-2")
    assert (await service.ended("killed-2"))["type"] == "done"


async def test_a_refusal_comes_to_the_tenants_own_listener(
    service: Service, limits: Callable[..., Any]
) -> None:
    """A client written from the README reads the refusal."""
    await service.publish("foreign-1", reply="my-go-client")
    end = await service.ended("foreign-1")
    assert (end["type"], end["code"]) == ("failed", "reply_forbidden")
    assert "'acme/mailer'" in end["message"]
    # The id is free: it runs once corrected, and its result takes the place of the refusal.
    await service.publish("foreign-1", store_result=False)
    await eventually(lambda: service.frames["foreign-1"][-1]["type"] == "done", WITHIN_S)
    await service.publish("wrong-1", reply="shop", prompt=None)
    end = await service.ended("wrong-1")
    assert (end["type"], end["code"]) == ("failed", "malformed_message")


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_a_second_publisher_gets_the_answer_too(
    system: GuardedSystem, service: Service, limits: Callable[..., Any], encoding: str
) -> None:
    """The same id with another reader, while it runs and after its end."""
    request_id = f"twice-{encoding}"
    frames: list[dict[str, Any]] = []
    operator = await nats.connect(system.nats.url_of("operator"), inbox_prefix="_INBOX.operator")

    async def on_frame(message: Msg) -> None:
        decode = json.loads if encoding == "json" else msgspec.msgpack.decode
        frames.append(decode(message.data))

    async def publish_again() -> None:
        job = {
            "request_id": request_id,
            "model": "demo",
            "prompt": "What is a lease?",
            "sampling": {"max_tokens": 100, "ignore_eos": True, "seed": 1},
            "reply": f"{ACME.tenant}/second",
        }
        payload = json.dumps(job).encode() if encoding == "json" else msgspec.msgpack.encode(job)
        stored = await service.client.jetstream().publish(
            f"jobs.demo.free.{ACME.tenant}", payload, headers={"Nats-Msg-Id": request_id}
        )
        assert stored.duplicate

    await operator.subscribe(f"tok.{ACME.tenant}%2Fsecond.{request_id}", cb=on_frame)
    await service.publish(request_id, 100)
    await eventually(lambda: len(service.token_ids(request_id)) > 2, WITHIN_S, "first tokens")
    for num_ends in (1, 2):
        await publish_again()
        await eventually(
            lambda num_ends=num_ends: [one["type"] for one in frames].count("done") == num_ends,
            WITHIN_S,
            "the second reader's end",
        )
        token_ids = [one for frame in frames for one in frame.get("token_ids", ())]
        assert token_ids == service.token_ids(request_id) * num_ends
    assert len(token_ids) == 200
    assert (await service.ended(request_id))["type"] == "done"
    assert len(await records(system, request_id)) == 1
    await operator.close()
