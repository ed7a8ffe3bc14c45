"""Jobs of different tenants wait apart, on memory and on nats-server alike."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from millrace.bus import codec, subjects
from millrace.bus.api import Bus
from millrace.bus.job_queue import TenantQueue
from millrace.schemas.frames import Failed, Frame
from millrace.schemas.jobs import Job, Tier
from tests.bus.conftest import ACK_WAIT_S, Broker
from tests.support.waiting import eventually

ACME = TenantQueue("demo", Tier.FREE, "acme.eu")
OTHER = TenantQueue("demo", Tier.FREE, "other")
ANYBODY = TenantQueue("demo", Tier.FREE, None)


def job(request_id: str, tenant_queue: TenantQueue = ACME) -> Job:
    return Job(
        request_id=request_id,
        model=tenant_queue.model,
        tier=tenant_queue.tier,
        tenant=tenant_queue.tenant or "local",
        prompt="hi",
    )


async def ids(
    bus: Bus, tenant_queue: TenantQueue, max_jobs: int = 20, timeout_s: float = 0.0
) -> list[str]:
    return [
        leased.job.request_id for leased in await bus.jobs.pull(tenant_queue, max_jobs, timeout_s)
    ]


async def store(broker: Broker, subject: str, **body: object) -> None:
    payload = msgspec.json.encode({"request_id": "r1", "model": "demo", "prompt": "x", **body})
    await broker.store(subject, payload, codec.JSON_HEADERS)


class TestTenantQueues:
    async def test_one_backlog_hides_no_other(self, bus: Bus) -> None:
        for number in range(10):
            await bus.jobs.publish(job(f"a{number}"))
        await bus.jobs.publish(job("o", OTHER))
        await bus.jobs.publish(job("p", TenantQueue("demo", Tier.PRO, "acme.eu")))
        assert await ids(bus, OTHER) == ["o"]
        assert await ids(bus, ACME, 2) == ["a0", "a1"]
        assert await ids(bus, TenantQueue("demo", Tier.PRO, "acme.eu")) == ["p"]
        assert await ids(bus, ANYBODY) == []

    async def test_tenant_queues_with_jobs_are_listed(self, bus: Bus, broker: Broker) -> None:
        assert await bus.jobs.tenant_queues() == {}
        for request_id in ("a", "b"):
            await bus.jobs.publish(job(request_id))
        await bus.jobs.publish(job("o", OTHER))
        await store(broker, "jobs.demo.free")
        assert await bus.jobs.tenant_queues() == {ACME: 2, OTHER: 1, ANYBODY: 1}
        (leased,) = await bus.jobs.pull(OTHER, 1, 1.0)
        assert (await bus.jobs.tenant_queues())[OTHER] == 1
        await bus.jobs.ack(leased.lease)
        assert await bus.jobs.tenant_queues() == {ACME: 2, ANYBODY: 1}

    async def test_depth_of_one_that_nobody_pulled_from(self, bus: Bus) -> None:
        await bus.jobs.publish(job("a"))
        depth = await bus.jobs.depth(ACME)
        assert (depth.num_queued, depth.num_leased) == (1, 0)
        depth = await bus.jobs.depth(OTHER)
        assert (depth.num_queued, depth.num_leased) == (0, 0)

    async def test_a_long_name_is_a_line_too(self, bus: Bus) -> None:
        tenant_queue = TenantQueue("m" * 256, Tier.BATCH, "ü" * 128)
        await bus.jobs.publish(job("r1", tenant_queue))
        assert await bus.jobs.tenant_queues() == {tenant_queue: 1}
        assert await ids(bus, tenant_queue) == ["r1"]


class TestTenants:
    async def test_the_subjects_tenant_fills_an_absent_one(self, bus: Bus, broker: Broker) -> None:
        await store(broker, "jobs.demo.pro.acme%2Eeu")
        (leased,) = await bus.jobs.pull(TenantQueue("demo", Tier.PRO, "acme.eu"), 1, 1.0)
        assert (leased.job.tenant, leased.job.tier) == ("acme.eu", Tier.PRO)

    async def test_without_a_tenant_in_the_subject_the_job_is_keyless(
        self, bus: Bus, broker: Broker
    ) -> None:
        await store(broker, "jobs.demo.free")
        (leased,) = await bus.jobs.pull(ANYBODY, 1, 1.0)
        assert (leased.job.tenant, leased.tenant_queue) == ("local", ANYBODY)

    @pytest.mark.parametrize("subject", ["jobs.demo.free", "jobs.demo.free.acme"])
    async def test_a_body_cannot_name_another_tenant_than_its_subject(
        self, bus: Bus, broker: Broker, subject: str
    ) -> None:
        frames: list[tuple[str, Frame]] = []
        reply = "svc" if subject == "jobs.demo.free" else "acme/svc"
        await bus.frames.subscribe(reply, lambda *pair: frames.append(pair))
        await store(broker, subject, tenant="other", reply=reply, store_result=True)
        assert await bus.jobs.pull(subjects.tenant_queue_of(subject), 1, 0.2) == []
        await eventually(lambda: len(frames) == 1)
        ((request_id, frame),) = frames
        assert isinstance(frame, Failed)
        assert (request_id, frame.code, frame.retryable) == ("r1", "tenant_mismatch", False)
        assert frame.param == "tenant"
        assert await bus.results.fetch("other", "r1") is None
        own = await bus.results.fetch(subjects.tenant_queue_of(subject).tenant or "local", "r1")
        assert own is not None
        assert own.error_code == "tenant_mismatch"

    async def test_what_gateways_let_in_waits_apart(self, bus: Bus, broker: Broker) -> None:
        await bus.jobs.publish(job("of a gateway"), reserved=True)
        await store(broker, "jobs.demo.free.acme%2Eeu", request_id="of a service")
        let_in = ACME.twin
        assert await bus.jobs.tenant_queues() == {ACME: 1, let_in: 1}
        (leased,) = await bus.jobs.pull(let_in, 5, 1.0)
        assert (leased.job.request_id, leased.tenant_queue.reserved) == ("of a gateway", True)
        assert leased.job.tenant == "acme.eu"
        (leased,) = await bus.jobs.pull(ACME, 5, 1.0)
        assert (leased.job.request_id, leased.tenant_queue.reserved) == ("of a service", False)

    @pytest.mark.parametrize(
        ("tenant", "body"),
        [("acme", {"tenant": "local"}), ("acme", {"tenant": "other"}), ("t" * 200, {})],
    )
    async def test_nobody_publishes_for_another(
        self, bus: Bus, broker: Broker, tenant: str, body: dict[str, object]
    ) -> None:
        tenant_queue = TenantQueue("demo", Tier.FREE, tenant)
        await store(broker, f"jobs.demo.free.{tenant}", store_result=True, **body)
        assert await bus.jobs.pull(tenant_queue, 1, 0.2) == []
        (dead,) = await broker.dead_jobs()
        assert dead.reason == "malformed"
        assert "tenant" in dead.message
        if body:
            # Their result is refused to them, not put in the place of another's.
            assert await bus.results.fetch("acme", "r1") is not None
            assert await bus.results.fetch(str(body["tenant"]), "r1") is None

    @pytest.mark.parametrize(
        "subject",
        [
            "jobs.demo.gold",
            "jobs.demo.gold.acme",
            "jobs.a%zz.free",
            "jobs.demo.free.%2e",
            "jobs.demo.gold.acme.reserved",
        ],
    )
    async def test_a_job_outside_every_tenant_queue_becomes_a_dead_letter(
        self, bus: Bus, broker: Broker, subject: str
    ) -> None:
        frames: list[tuple[str, Frame]] = []
        reply = "acme/svc" if subject == "jobs.demo.gold.acme" else "svc"
        await bus.frames.subscribe(reply, lambda *pair: frames.append(pair))
        for number in range(3):
            await store(broker, subject, request_id=f"r{number}", reply=reply)
        await store(broker, "jobs.demo.free", request_id="good")
        two = await broker.connect("other scheduler")
        found = await asyncio.gather(bus.jobs.tenant_queues(), two.jobs.tenant_queues())
        assert list(found) == [{ANYBODY: 1}] * 2
        letters = await broker.dead_jobs()
        assert sorted(dead.request_id for dead in letters) == ["r0", "r1", "r2"]
        assert {dead.subject for dead in letters} == {subject}
        await eventually(lambda: len(frames) == 3)
        assert all(isinstance(frame, Failed) for _, frame in frames)
        assert await bus.jobs.tenant_queues() == {ANYBODY: 1}


class TestWatch:
    async def test_each_job_tells_its_line_once(self, bus: Bus, broker: Broker) -> None:
        queues: list[TenantQueue] = []
        watcher = await broker.connect("scheduler")
        subscription = await watcher.jobs.watch(queues.append)
        await bus.jobs.publish(job("a"))
        await bus.jobs.publish(job("a"))
        await bus.jobs.publish(job("o", OTHER))
        await store(broker, "jobs.demo.gold", request_id="of no line")
        await store(broker, "jobs.demo.free")
        await eventually(lambda: len(queues) == 3)
        assert queues == [ACME, OTHER, ANYBODY]
        assert await ids(watcher, ACME) == ["a"]
        await subscription.close()
        await bus.jobs.publish(job("later"))
        await watcher.jobs.tenant_queues()
        assert len(queues) == 3

    async def test_what_is_told_can_be_pulled_at_once(self, bus: Bus, broker: Broker) -> None:
        watcher = await broker.connect("scheduler")
        assert await ids(watcher, ACME) == []
        pulls: list[asyncio.Task[list[str]]] = []

        def on_published(tenant_queue: TenantQueue) -> None:
            pulls.append(asyncio.ensure_future(ids(watcher, tenant_queue, 1)))

        await watcher.jobs.watch(on_published)
        for number in range(10):
            await bus.jobs.publish(job(f"a{number}"))
        await eventually(lambda: len(pulls) == 10)
        pulled = await asyncio.gather(*pulls)
        assert sorted(pulled) == [[f"a{number}"] for number in range(10)]

    async def test_a_watcher_that_fails_is_told_on(self, bus: Bus) -> None:
        queues: list[TenantQueue] = []

        def on_published(tenant_queue: TenantQueue) -> None:
            queues.append(tenant_queue)
            raise RuntimeError("of no concern to the bus")

        await bus.jobs.watch(on_published)
        await bus.jobs.publish(job("a"))
        await bus.jobs.publish(job("b"))
        await eventually(lambda: len(queues) == 2)


class TestForgetting:
    async def test_an_idle_line_is_forgotten(self, bus: Bus) -> None:
        assert await bus.jobs.forget_tenant_queue(ACME)
        await bus.jobs.publish(job("a"))
        (leased,) = await bus.jobs.pull(ACME, 1, 1.0)
        await bus.jobs.ack(leased.lease)
        assert await bus.jobs.forget_tenant_queue(ACME)
        assert await bus.jobs.forget_tenant_queue(ACME)
        await bus.jobs.publish(job("b"))
        assert await ids(bus, ACME) == ["b"]

    async def test_a_queue_with_jobs_is_not_forgotten(self, bus: Bus) -> None:
        await bus.jobs.publish(job("o", OTHER))
        assert not await bus.jobs.forget_tenant_queue(OTHER)
        await bus.jobs.pull(ACME, 1, 0.0)
        await bus.jobs.publish(job("a"))
        assert not await bus.jobs.forget_tenant_queue(ACME)
        (leased,) = await bus.jobs.pull(ACME, 1, 1.0)
        assert not await bus.jobs.forget_tenant_queue(ACME)
        assert await ids(bus, ACME, timeout_s=ACK_WAIT_S * 2) == ["a"]
        await bus.jobs.ack(leased.lease)
        assert await bus.jobs.forget_tenant_queue(ACME)

    async def test_deliveries_go_on_where_there_is_something(self, bus: Bus) -> None:
        await bus.jobs.pull(ACME, 1, 0.0)
        forgetting = asyncio.ensure_future(bus.jobs.forget_tenant_queue(ACME))
        await bus.jobs.publish(job("a"))
        await forgetting
        assert await ids(bus, ACME, timeout_s=1.0) == ["a"]

    async def test_other_schedulers_find_jobs_after_a_queue_was_forgotten(
        self, bus: Bus, broker: Broker
    ) -> None:
        """Also at once, and while they wait."""
        other = await broker.connect("other scheduler")
        assert await ids(other, ACME) == []
        waiting = asyncio.ensure_future(ids(other, OTHER, timeout_s=10.0))
        await bus.jobs.pull(OTHER, 1, 0.05)
        assert await bus.jobs.forget_tenant_queue(ACME)
        assert await bus.jobs.forget_tenant_queue(OTHER)
        await bus.jobs.publish(job("a"))
        await bus.jobs.publish(job("o", OTHER))
        assert await ids(other, ACME) == ["a"]
        assert await waiting == ["o"]


class TestUncertainty:
    async def test_jobs_older_than_what_counts_their_deliveries(self, bus: Bus) -> None:
        await bus.jobs.publish(job("a"))
        (leased,) = await bus.jobs.pull(ACME, 1, 1.0)
        assert leased.uncertain
        await bus.jobs.publish(job("b"))
        (leased,) = await bus.jobs.pull(ACME, 1, 1.0)
        assert leased.job.request_id == "b"
        assert not leased.uncertain

    async def test_a_job_that_others_may_have_held_is_uncertain(
        self, bus: Bus, broker: Broker
    ) -> None:
        await bus.jobs.pull(ACME, 1, 0.0)
        await bus.jobs.publish(job("a"))
        other = await broker.connect("other scheduler")
        (leased,) = await other.jobs.pull(ACME, 1, 1.0)
        assert leased.uncertain
        await bus.jobs.publish(job("b"))
        (leased,) = await other.jobs.pull(ACME, 1, 1.0)
        assert not leased.uncertain

    async def test_a_job_after_its_queue_was_forgotten_is_uncertain(
        self, bus: Bus, broker: Broker
    ) -> None:
        await bus.jobs.pull(ACME, 1, 0.0)
        assert await bus.jobs.forget_tenant_queue(ACME)
        await bus.jobs.publish(job("a"))
        other = await broker.connect("other scheduler")
        (leased,) = await other.jobs.pull(ACME, 1, 1.0)
        assert leased.uncertain
