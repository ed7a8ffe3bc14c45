"""The work queue and its leases, on memory and on nats-server alike."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from millrace.bus import codec
from millrace.bus.api import Bus
from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.schemas.errors import PayloadTooLargeError, QueueFullError
from millrace.schemas.frames import Failed, Frame
from millrace.schemas.jobs import DeadJob, Job, Source, Tier
from millrace.schemas.records import RequestRecord, Status
from tests.bus.conftest import ACK_WAIT_S, MAX_DELIVER, Broker
from tests.support.waiting import eventually

MODEL = "demo/1.5 b"
TENANT_QUEUE = TenantQueue(MODEL, Tier.FREE, "local")
OTHER = TenantQueue("other", Tier.FREE, "local")
BY_HAND = TenantQueue("demo", Tier.FREE, None)


def job(number: int, **fields: object) -> Job:
    return Job(request_id=f"r{number}", model=MODEL, prompt="hi", **fields)  # type: ignore[arg-type]


async def pull_one(bus: Bus, tenant_queue: TenantQueue = TENANT_QUEUE) -> LeasedJob:
    (leased,) = await bus.jobs.pull(tenant_queue, 1, 5.0)
    return leased


class TestPublish:
    async def test_arrives_as_it_was(self, bus: Bus) -> None:
        sent = job(1, tier=Tier.PRO, reply="g1", received_ns=7, store_result=True)
        published = await bus.jobs.publish(sent)
        assert not published.duplicate
        leased = await pull_one(bus, TenantQueue.of(sent))
        assert leased.job == sent
        assert leased.tenant_queue == TenantQueue(MODEL, Tier.PRO, "local")
        assert leased.num_deliveries == 1
        assert leased.stream_sequence == published.stream_sequence

    @pytest.mark.parametrize("source", [Source.HTTP, Source.WEBSOCKET, Source.BENCH])
    async def test_only_a_gateway_s_job_came_over_http(self, bus: Bus, source: Source) -> None:
        """A service may copy the field from a request that it received over HTTP."""
        sent = [job(number, source=source) for number in (1, 2)]
        await bus.jobs.publish(sent[0])
        await bus.jobs.publish(sent[1], reserved=True)
        of_service = await pull_one(bus)
        of_gateway = await pull_one(bus, TenantQueue.of(sent[1], reserved=True))
        is_bench = source is Source.BENCH
        assert of_service.job.source is (Source.BENCH if is_bench else Source.NATS)
        assert of_gateway.job.source is source

    async def test_the_same_id_is_stored_once(self, bus: Bus) -> None:
        first = await bus.jobs.publish(job(1))
        again = await bus.jobs.publish(job(1))
        assert again.duplicate
        assert again.stream_sequence == first.stream_sequence
        leased = await pull_one(bus)
        await bus.jobs.ack(leased.lease)
        assert (await bus.jobs.publish(job(1))).duplicate
        assert await bus.jobs.pull(TENANT_QUEUE, 1, 0.05) == []

    async def test_what_is_dropped_for_its_id_is_stored_anew(
        self, bus: Bus, broker: Broker
    ) -> None:
        """Another reader, a corrected job, a copy after the end; not a copy before it."""
        recovery = await bus.jobs.recover_dropped()
        other = await broker.connect("other")
        others = await other.jobs.recover_dropped()
        headers = {"Content-Type": "application/json", "Nats-Msg-Id": "m1"}

        async def publish(**fields: object) -> None:
            payload = msgspec.json.encode({"request_id": "r1", "model": "demo", **fields})
            await broker.store("jobs.demo.free", payload, headers)

        await publish(prompt="hi", reply="a")
        await publish(prompt="hi", reply="a")
        await publish(prompt="hi", reply="b")

        async def has_two() -> bool:
            return (await bus.jobs.depth(BY_HAND)).num_queued == 2

        await eventually(has_two)
        first, second = await bus.jobs.pull(BY_HAND, 4, 5.0)
        assert first.job.reply == "a"
        assert (second.job.reply, second.job.frames_as_json) == ("b", True)
        for one in (first, second):
            await bus.jobs.ack(one.lease)
        await publish(prompt="hi", reply="a")
        third = await pull_one(bus, BY_HAND)
        assert third.job.reply == "a"
        await bus.jobs.ack(third.lease)
        await recovery.close()
        await others.close()
        await publish(prompt="hi", reply="c")
        assert await bus.jobs.pull(BY_HAND, 1, 1.5) == []

    async def test_what_the_server_refuses_is_not_stored_anew(
        self, bus: Bus, broker: Broker
    ) -> None:
        recovery = await bus.jobs.recover_dropped()
        for number in range(broker.config.max_stored_jobs):
            await bus.jobs.publish(job(number))
        with pytest.raises(QueueFullError):
            await bus.jobs.publish(job(1_000_000))
        gone = await pull_one(bus)
        await bus.jobs.ack(gone.lease)
        # Checked after the refused job.
        await bus.jobs.publish(job(1, reply="other"))

        async def is_full_again() -> bool:
            queued = (await bus.jobs.tenant_queues())[TENANT_QUEUE]
            return queued == broker.config.max_stored_jobs

        await eventually(is_full_again)
        pulled = await bus.jobs.pull(TENANT_QUEUE, broker.config.max_stored_jobs, 5.0)
        assert [one.job.reply for one in pulled if one.job.reply] == ["other"]
        assert "r1000000" not in {one.job.request_id for one in pulled}
        await recovery.close()

    async def test_a_full_queue_refuses(self, bus: Bus, broker: Broker) -> None:
        for number in range(broker.config.max_stored_jobs):
            await bus.jobs.publish(job(number))
        with pytest.raises(QueueFullError) as refused:
            await bus.jobs.publish(job(999))
        assert refused.value.retry_after_s > 0
        leased = await pull_one(bus)
        await bus.jobs.ack(leased.lease)
        await bus.jobs.publish(job(999))

    async def test_too_large_is_refused_with_both_sizes(self, bus: Bus) -> None:
        text = "x" * bus.max_payload_bytes
        with pytest.raises(PayloadTooLargeError) as refused:
            await bus.jobs.publish(Job(request_id="big", model=MODEL, prompt=text))
        assert refused.value.limit_bytes == bus.max_payload_bytes
        assert refused.value.size_bytes > bus.max_payload_bytes
        assert bus.connected

    async def test_the_largest_payload_passes(self, bus: Bus) -> None:
        text = "x" * (bus.max_payload_bytes - 500)
        await bus.jobs.publish(Job(request_id="big", model=MODEL, prompt=text))
        assert (await pull_one(bus)).job.prompt == text


class TestPull:
    async def test_ends_empty_after_its_timeout(self, bus: Bus) -> None:
        started_s = time.monotonic()
        assert await bus.jobs.pull(TENANT_QUEUE, 4, 0.1) == []
        assert 0.09 < time.monotonic() - started_s < 2.0

    async def test_a_pull_returns_as_soon_as_there_is_a_job(self, bus: Bus, broker: Broker) -> None:
        other = await broker.connect("other")
        waiting = asyncio.ensure_future(bus.jobs.pull(TENANT_QUEUE, 8, 10.0))
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
        await other.jobs.publish(job(1))
        assert [leased.job.request_id for leased in await waiting] == ["r1"]
        assert time.monotonic() - started_s < 1.0

    async def test_takes_what_is_there_in_order(self, bus: Bus) -> None:
        for number in range(5):
            await bus.jobs.publish(job(number))
        pulled = await bus.jobs.pull(TENANT_QUEUE, 3, 1.0)
        assert [leased.job.request_id for leased in pulled] == ["r0", "r1", "r2"]
        pulled = await bus.jobs.pull(TENANT_QUEUE, 10, 1.0)
        assert [leased.job.request_id for leased in pulled] == ["r3", "r4"]

    async def test_models_do_not_mix(self, bus: Bus) -> None:
        await bus.jobs.publish(job(1))
        await bus.jobs.publish(Job(request_id="o", model="other", prompt="hi"))
        assert [leased.job.request_id for leased in await bus.jobs.pull(OTHER, 5, 1.0)] == ["o"]
        assert [leased.job.request_id for leased in await bus.jobs.pull(TENANT_QUEUE, 5, 1.0)] == [
            "r1"
        ]

    async def test_each_job_goes_to_one_of_many(self, bus: Bus, broker: Broker) -> None:
        async def take(one: Bus, max_jobs: int, timeout_s: float) -> list[str]:
            pulled = await one.jobs.pull(TENANT_QUEUE, max_jobs, timeout_s)
            await asyncio.gather(*(one.jobs.ack(leased.lease) for leased in pulled))
            return [leased.job.request_id for leased in pulled]

        others = [bus, *[await broker.connect(f"p{number}") for number in range(2)]]
        pulls = [asyncio.ensure_future(take(one, 2, 0.2)) for one in others * 3]
        for number in range(6):
            await bus.jobs.publish(job(number))
        ids = [request_id for pull in pulls for request_id in await pull]
        ids += await take(bus, 10, 0.05)
        assert sorted(ids) == [f"r{number}" for number in range(6)]

    async def test_a_cancelled_pull_keeps_nothing(self, bus: Bus, broker: Broker) -> None:
        waiting = asyncio.ensure_future(bus.jobs.pull(TENANT_QUEUE, 4, 30.0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        started_s = time.monotonic()
        await bus.jobs.publish(job(1))
        assert (await pull_one(await broker.connect("other"))).job.request_id == "r1"
        assert time.monotonic() - started_s < ACK_WAIT_S


class TestLeases:
    async def test_an_expired_lease_is_delivered_again(self, bus: Bus, broker: Broker) -> None:
        await bus.jobs.publish(job(1))
        first = await pull_one(bus)
        other = await broker.connect("other")
        second = await pull_one(other)
        assert second.job.request_id == first.job.request_id
        assert second.num_deliveries == 2
        assert second.stream_sequence == first.stream_sequence

    async def test_another_connection_extends_by_the_lease(self, bus: Bus, broker: Broker) -> None:
        await bus.jobs.publish(job(1))
        leased = await pull_one(bus)
        holder = await broker.connect("holder")
        for _ in range(6):
            await holder.jobs.extend(leased.lease)
            assert await bus.jobs.pull(TENANT_QUEUE, 1, ACK_WAIT_S / 3) == []
        assert (await pull_one(bus)).num_deliveries == 2

    async def test_another_connection_acks_by_the_lease(self, bus: Bus, broker: Broker) -> None:
        await bus.jobs.publish(job(1))
        leased = await pull_one(bus)
        await bus.close()
        holder = await broker.connect("holder")
        await holder.jobs.ack(leased.lease)
        depth = await holder.jobs.depth(TENANT_QUEUE)
        assert (depth.num_queued, depth.num_leased) == (0, 0)
        assert await holder.jobs.pull(TENANT_QUEUE, 1, ACK_WAIT_S * 1.5) == []

    async def test_ack_twice_and_by_an_earlier_delivery(self, bus: Bus) -> None:
        await bus.jobs.publish(job(1))
        first = await pull_one(bus)
        await pull_one(bus)
        await bus.jobs.ack(first.lease)
        await bus.jobs.ack(first.lease)
        assert await bus.jobs.pull(TENANT_QUEUE, 1, ACK_WAIT_S * 1.5) == []

    async def test_a_released_job_comes_at_once(self, bus: Bus) -> None:
        await bus.jobs.publish(job(1))
        leased = await pull_one(bus)
        started_s = time.monotonic()
        await bus.jobs.release(leased.lease)
        assert (await pull_one(bus)).num_deliveries == 2
        assert time.monotonic() - started_s < ACK_WAIT_S / 2

    async def test_a_released_job_comes_after_its_delay(self, bus: Bus) -> None:
        await bus.jobs.publish(job(1))
        leased = await pull_one(bus)
        started_s = time.monotonic()
        await bus.jobs.release(leased.lease, delay_s=ACK_WAIT_S * 1.5)
        assert (await pull_one(bus)).num_deliveries == 2
        assert time.monotonic() - started_s > ACK_WAIT_S * 1.4

    async def test_many_acks_at_once(self, bus: Bus) -> None:
        for number in range(20):
            await bus.jobs.publish(job(number))
        pulled = await bus.jobs.pull(TENANT_QUEUE, 20, 1.0)
        await asyncio.gather(*(bus.jobs.ack(leased.lease) for leased in pulled))
        depth = await bus.jobs.depth(TENANT_QUEUE)
        assert (depth.num_queued, depth.num_leased) == (0, 0)


class TestDepthAndShedding:
    async def test_depth(self, bus: Bus) -> None:
        depth = await bus.jobs.depth(TENANT_QUEUE)
        assert (depth.num_queued, depth.num_leased) == (0, 0)
        for number in range(5):
            await bus.jobs.publish(job(number))
        await bus.jobs.pull(TENANT_QUEUE, 2, 1.0)
        depth = await bus.jobs.depth(TENANT_QUEUE)
        assert (depth.num_queued, depth.num_leased) == (3, 2)

    async def test_the_newest_waiting_jobs_are_shed(self, bus: Bus) -> None:
        for number in range(6):
            await bus.jobs.publish(job(number))
        await bus.jobs.publish(Job(request_id="o", model="other", prompt="hi"))
        await bus.jobs.publish(job(7, tenant="other"))
        held = await bus.jobs.pull(TENANT_QUEUE, 2, 1.0)
        shed = await bus.jobs.shed_newest(TENANT_QUEUE, 3)
        assert [one.request_id for one in shed] == ["r5", "r4", "r3"]
        shed = await bus.jobs.shed_newest(TENANT_QUEUE, 9)
        assert [one.request_id for one in shed] == ["r2"]
        assert [leased.job.request_id for leased in held] == ["r0", "r1"]
        depth = await bus.jobs.depth(TENANT_QUEUE)
        assert (depth.num_queued, depth.num_leased) == (0, 2)
        assert len(await bus.jobs.pull(OTHER, 5, 1.0)) == 1
        assert len(await bus.jobs.pull(TenantQueue(MODEL, Tier.FREE, "other"), 5, 1.0)) == 1

    async def test_deliveries_go_on_after_shedding(self, bus: Bus) -> None:
        await bus.jobs.publish(job(1))
        assert len(await bus.jobs.shed_newest(TENANT_QUEUE, 1)) == 1
        await bus.jobs.publish(job(2))
        started_s = time.monotonic()
        assert (await pull_one(bus)).job.request_id == "r2"
        assert time.monotonic() - started_s < 1.0

    async def test_a_job_is_open_until_it_is_acknowledged(self, bus: Bus) -> None:
        published = await bus.jobs.publish(job(1))
        leased = await pull_one(bus)
        assert await bus.jobs.is_open(published.stream_sequence)
        await bus.jobs.ack(leased.lease)
        assert not await bus.jobs.is_open(published.stream_sequence)

    async def test_each_job_is_shed_to_one_or_pulled(self, bus: Bus, broker: Broker) -> None:
        other = await broker.connect("other")
        for number in range(20):
            await bus.jobs.publish(job(number))
        first, second, pulled = await asyncio.gather(
            bus.jobs.shed_newest(TENANT_QUEUE, 8),
            other.jobs.shed_newest(TENANT_QUEUE, 8),
            other.jobs.pull(TENANT_QUEUE, 4, 1.0),
        )
        rest = await bus.jobs.pull(TENANT_QUEUE, 20, 0.1)
        ids = [one.request_id for one in (*first, *second)]
        ids += [leased.job.request_id for leased in (*pulled, *rest)]
        assert sorted(ids) == sorted(f"r{number}" for number in range(20))


class TestDeadLetters:
    async def test_a_job_is_dead_lettered(self, bus: Bus, broker: Broker) -> None:
        await bus.jobs.publish(job(1))
        leased = await pull_one(bus)
        dead = DeadJob(
            reason="no such model",
            message="nobody serves it",
            subject="jobs.x.free",
            payload=codec.encode(leased.job),
            request_id="r1",
        )
        await bus.jobs.dead_letter(dead, leased.lease)
        assert await broker.dead_jobs() == [dead]
        assert await bus.jobs.pull(TENANT_QUEUE, 1, ACK_WAIT_S * 1.5) == []

    @pytest.mark.parametrize(
        ("payload", "content_type"),
        [
            (b"", None),
            (b"\xc1", None),
            (b'["r1","demo","x"]', None),
            (b"{", "application/json"),
            (b"{", None),
            (b'{"model":"demo","prompt":"x"}', "application/json"),
            (b'{"request_id":"r1","model":"other","prompt":"x"}', "application/json"),
            (b'{"request_id":"r1","model":"demo","tier":"pro","prompt":"x"}', "application/json"),
            (b'{"request_id":"r1","model":"demo"}', "application/json"),
            (b'{"request_id":"r1","model":"demo","prompt":"x","colour":1}', "application/json"),
            (b'{"colour":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "application/json"),
            (b"\x81\xa6colour" + b"\x91" * 10_000 + b"\xc0", None),
            (b'{"request_id":"r1","model":"demo","prompt":"x"}', "text/plain"),
        ],
    )
    async def test_what_is_not_a_job_is_buried(
        self, bus: Bus, broker: Broker, payload: bytes, content_type: str | None
    ) -> None:
        await bus.jobs.depth(BY_HAND)
        headers = {"Content-Type": content_type} if content_type else None
        await broker.store("jobs.demo.free", payload, headers)
        good = b'{"request_id":"good","model":"demo","prompt":"x"}'
        await broker.store("jobs.demo.free", good, codec.JSON_HEADERS)
        pulled = await bus.jobs.pull(BY_HAND, 5, 2.0)
        assert [leased.job.request_id for leased in pulled] == ["good"]
        (dead,) = await broker.dead_jobs()
        assert (dead.reason, dead.payload, dead.subject) == ("malformed", payload, "jobs.demo.free")
        assert dead.message
        depth = await bus.jobs.depth(BY_HAND)
        assert (depth.num_queued, depth.num_leased) == (0, 1)

    async def test_its_publisher_is_told(self, bus: Bus, broker: Broker) -> None:
        frames: list[tuple[str, Frame]] = []
        await bus.frames.subscribe("svc", lambda *pair: frames.append(pair))
        body = {
            "request_id": "r1",
            "model": "demo",
            "prompt": "x",
            "reply": "svc",
            "store_result": True,
            "sampling": {"temperature": 9.0},
        }
        payload = msgspec.json.encode(body)
        await broker.store("jobs.demo.free", payload, {"Content-Type": "application/json"})
        assert await bus.jobs.pull(BY_HAND, 1, 0.2) == []
        await eventually(lambda: len(frames) == 1)
        ((request_id, frame),) = frames
        assert request_id == "r1"
        assert isinstance(frame, Failed)
        assert "temperature" in frame.message
        result = await bus.results.fetch("local", "r1")
        assert result is not None
        assert (result.status, result.error_code) == ("failed", "malformed_message")

    @pytest.mark.parametrize(
        "field",
        [
            {"x" * 100_000: 1},
            {"priority": "x" * 100_000},
            {"tier": "x" * 100_000},
            {"sampling": {"grammar": {"kind": "x" * 100_000}}},
        ],
    )
    async def test_its_publisher_is_told_the_beginning_of_a_value(
        self, bus: Bus, broker: Broker, field: dict[str, object]
    ) -> None:
        frames: list[Frame] = []
        await bus.frames.subscribe("svc", lambda _id, frame: frames.append(frame))
        body = {"request_id": "r1", "model": "demo", "prompt": "x", "reply": "svc", **field}
        await broker.store("jobs.demo.free", msgspec.json.encode(body), codec.JSON_HEADERS)
        assert await bus.jobs.pull(BY_HAND, 1, 0.2) == []
        await eventually(lambda: len(frames) == 1)
        assert isinstance(frames[0], Failed)
        assert "x" * 201 not in frames[0].message
        (dead,) = await broker.dead_jobs()
        assert dead.message in frames[0].message

    @pytest.mark.parametrize(
        ("payload", "content_type", "told_as"),
        [
            (b'{"request_id":"","model":"demo","prompt":"x","reply":"svc"}', codec.JSON, ""),
            (b'{"request_id":"","model":"demo","prompt":"x","reply":"svc"}', None, ""),
            (b'{"model":"demo","prompt":"x","reply":"svc"}', codec.JSON, ""),
            (b'{"request_id":7,"model":"demo","prompt":"x","reply":"svc"}', codec.JSON, "7"),
            (b'{"request_id":7.0,"model":"demo","prompt":"x","reply":"svc"}', codec.JSON, "7"),
            (b'{"request_id":null,"model":"demo","prompt":"x","reply":"svc"}', codec.JSON, ""),
            (
                b'{"request_id":"%s","model":"demo","reply":"svc"}' % (b"r" * 200),
                codec.JSON,
                "r" * 200,
            ),
            (b'{"request_id":"%s","model":"demo","reply":"svc"}' % (b"r" * 2_000), codec.JSON, ""),
            (msgspec.msgpack.encode({"request_id": 7, "model": "demo", "reply": "svc"}), None, "7"),
            (
                b'\xef\xbb\xbf{"request_id":"r1","model":3,"reply":"svc"}',
                "application/json",
                "r1",
            ),
            (b'{"request_id":"r1","model":3,"store_result":"no","reply":"svc"}', None, "r1"),
            (b'{"request_id":"r1","reply":"svc","model":"demo","prompt":"x"}', "text/plain", "r1"),
            (
                b'{"request_id":"r1","reply" : "svc","model":"demo","prompt":"cut of',
                codec.JSON,
                "r1",
            ),
            (b'{"prompt":"\\"reply\\":\\"other\\"","reply":"svc",,}', None, ""),
            (msgspec.msgpack.encode({"request_id": "", "model": "demo", "reply": "svc"}), None, ""),
            (msgspec.msgpack.encode({"request_id": "r1", "model": 3, "reply": "svc"}), None, "r1"),
        ],
    )
    async def test_whoever_names_a_listener_is_told(
        self, bus: Bus, broker: Broker, payload: bytes, content_type: str | None, told_as: str
    ) -> None:
        frames: list[tuple[str, Frame]] = []
        await bus.frames.subscribe("svc", lambda *pair: frames.append(pair))
        headers = {"Content-Type": content_type} if content_type else None
        await broker.store("jobs.demo.free", payload, headers)
        assert await bus.jobs.pull(BY_HAND, 1, 0.2) == []
        await eventually(lambda: len(frames) == 1)
        ((request_id, frame),) = frames
        assert request_id == told_as
        assert isinstance(frame, Failed)
        assert frame.code == "malformed_message"

    @pytest.mark.parametrize("is_json", [True, False])
    @pytest.mark.parametrize(
        ("tenant", "reply", "told"),
        [
            ("a", "a", "a"),
            ("a", "a/svc", "a/svc"),
            ("a", "b", "a"),
            ("a", "ab", "a"),
            ("a", "b/a", "a"),
            ("a", "local", "a"),
            ("a", 7, "a"),
            ("a", "r" * 200, "a"),
            ("local", "b/svc", "local"),
            ("local", "local/svc", "local/svc"),
            ("local", "svc", "svc"),
        ],
    )
    @pytest.mark.parametrize("is_job", [True, False])
    async def test_the_tenant_s_own_listener_is_told_and_no_other(
        self,
        bus: Bus,
        broker: Broker,
        *,
        is_json: bool,
        tenant: str,
        reply: object,
        told: str,
        is_job: bool,
    ) -> None:
        frames: list[tuple[str, str, Frame]] = []
        for name in dict.fromkeys((told, tenant, str(reply)[:120], "b", "local")):
            await bus.frames.subscribe(name, lambda *pair, name=name: frames.append((name, *pair)))
        body = {"request_id": "r1", "model": "demo", "reply": reply, "store_result": True}
        body |= {"prompt": "x"} if is_job else {"tenant": "b"}
        encode = msgspec.json.encode if is_json else msgspec.msgpack.encode
        await broker.store(f"jobs.demo.free.{tenant}", encode(body))
        pulled = await bus.jobs.pull(TenantQueue("demo", Tier.FREE, tenant), 5, 0.2)
        if is_job and reply == told:
            assert [one.job.reply for one in pulled] == [told]
            return
        assert pulled == []
        await eventually(lambda: len(frames) == 1)
        ((name, request_id, frame),) = frames
        assert (name, request_id) == (told, "r1")
        assert isinstance(frame, Failed)
        is_named = is_job and isinstance(reply, str) and len(reply) < 128
        assert frame.code == ("reply_forbidden" if is_named else "malformed_message")
        if is_named:
            assert frame.param == "reply"
        assert frame.message.endswith("Its request_id is free: a corrected job may use it.")
        result = await bus.results.fetch(tenant, "r1")
        assert result is not None
        assert (result.error_code, result.error_message) == (frame.code, frame.message)

    async def test_a_bare_reply_name_may_belong_to_a_known_tenant(
        self, bus: Bus, broker: Broker
    ) -> None:
        """The keyless tenant may name any listener but another tenant's."""

        async def is_foreign(tenant: str, reply: str) -> bool:
            return (tenant, reply) == ("local", "acme")

        bus.jobs.guard_replies(is_foreign)
        frames: list[str] = []
        for name in ("acme", "local", "svc"):
            await bus.frames.subscribe(name, lambda *_, name=name: frames.append(name))
        for reply in ("acme", "svc"):
            body = {"request_id": "r1", "model": "demo", "reply": reply}
            await broker.store("jobs.demo.free", msgspec.json.encode(body))
        assert await bus.jobs.pull(BY_HAND, 5, 0.2) == []
        await eventually(lambda: len(frames) == 2)
        assert sorted(frames) == ["local", "svc"]

    @pytest.mark.parametrize("content_type", [codec.JSON, None])
    async def test_a_json_job_has_a_json_dead_letter(
        self, bus: Bus, broker: Broker, content_type: str | None
    ) -> None:
        headers = {"Content-Type": content_type} if content_type else None
        payload = b' {"request_id":"r1","model":"demo"}'
        await broker.store("jobs.demo.free", payload, headers)
        packed = msgspec.msgpack.encode({"request_id": "r2", "model": "demo"})
        await broker.store("jobs.demo.free", packed)
        assert await bus.jobs.pull(BY_HAND, 2, 0.2) == []
        json_dead, packed_dead = await broker.dead_jobs()
        assert (json_dead.payload, json_dead.content_type) == (payload, codec.JSON)
        assert (packed_dead.payload, packed_dead.content_type) == (packed, codec.MSGPACK)

    @pytest.mark.parametrize(
        "fields",
        [
            {"reply": "r" * 5_000},
            {"tenant": "t" * 5_000, "store_result": True},
            {"user": "u" * 300_000},
            {"received_ns": 2**70},
            {"received_ns": -1},
            {"deadline_ns": 2**63},
            {"sampling": {"top_k": 2**70}},
        ],
    )
    async def test_what_could_not_be_carried_to_its_end_is_buried(
        self, bus: Bus, broker: Broker, fields: dict[str, object]
    ) -> None:
        body = {"request_id": "r1", "model": "demo", "prompt": "x", **fields}
        await broker.store("jobs.demo.free", msgspec.json.encode(body), codec.JSON_HEADERS)
        good = b'{"request_id":"good","model":"demo","prompt":"x"}'
        await broker.store("jobs.demo.free", good, codec.JSON_HEADERS)
        pulled = await bus.jobs.pull(BY_HAND, 5, 2.0)
        assert [leased.job.request_id for leased in pulled] == ["good"]
        (dead,) = await broker.dead_jobs()
        assert dead.reason == "malformed"

    async def test_a_job_that_nobody_finishes_is_given_up(self, bus: Bus, broker: Broker) -> None:
        frames: list[tuple[str, Frame]] = []
        await bus.frames.subscribe("g1", lambda *pair: frames.append(pair))
        await bus.jobs.publish(job(1, reply="g1"))
        for number in range(MAX_DELIVER):
            leased = await pull_one(bus)
            assert leased.num_deliveries == number + 1
            await bus.jobs.release(leased.lease)
        assert await bus.jobs.pull(TENANT_QUEUE, 1, 0.3) == []
        (dead,) = await broker.dead_jobs()
        assert (dead.reason, dead.request_id) == ("too_many_deliveries", "r1")
        await eventually(lambda: len(frames) == 1)
        assert isinstance(frames[0][1], Failed)
        (message,) = await bus.outbox.pull(5, 1.0)
        record = codec.RECORD.decode(message.payload)
        assert isinstance(record, RequestRecord)
        assert (record.request_id, record.status) == ("r1", Status.FAILED)
        depth = await bus.jobs.depth(TENANT_QUEUE)
        assert (depth.num_queued, depth.num_leased) == (0, 0)

    async def test_the_largest_malformed_job_is_buried_too(self, bus: Bus, broker: Broker) -> None:
        await bus.jobs.depth(BY_HAND)
        await broker.store("jobs.demo.free", b"\xc1" * bus.max_payload_bytes)
        assert await bus.jobs.pull(BY_HAND, 1, 0.2) == []
        assert len(await broker.dead_jobs()) == 1
        depth = await bus.jobs.depth(BY_HAND)
        assert (depth.num_queued, depth.num_leased) == (0, 0)


class TestJson:
    @pytest.mark.parametrize("before", [b"", b"\n  "])
    async def test_a_json_job_is_recognised_by_its_first_byte(
        self, bus: Bus, broker: Broker, before: bytes
    ) -> None:
        payload = before + b'{"request_id":"r1","model":"demo","tier":"free","prompt":"x"}'
        await broker.store("jobs.demo.free", payload)
        leased = await pull_one(bus, BY_HAND)
        assert (leased.job.prompt, leased.job.frames_as_json) == ("x", True)

    async def test_a_json_job(self, bus: Bus, broker: Broker) -> None:
        before_ns = time.time_ns()
        await broker.store(
            "jobs.demo.batch",
            b'{"request_id":"r1","model":"demo","messages":[{"role":"user","content":"hi"}]}',
            {"Content-Type": "application/json; charset=utf-8", "Nats-Msg-Id": "r1"},
        )
        leased = await pull_one(bus, TenantQueue("demo", Tier.BATCH, None))
        assert leased.job.tier is Tier.BATCH
        assert leased.job.frames_as_json
        assert before_ns <= leased.job.received_ns <= time.time_ns()
        assert (await bus.jobs.publish(Job(request_id="r1", model="demo", prompt=""))).duplicate
