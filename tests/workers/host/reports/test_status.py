"""Heartbeats and samples of a worker."""

from __future__ import annotations

from decimal import Decimal

import pytest

from millrace.registry.served import ServedModel
from millrace.schemas.control import AnswerTimes, Ended, QueueStatus, Served
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import FinishReason
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Record, Status
from millrace.workers.engine_like import EngineFailedError
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually
from tests.workers.scripted import CONTEXT_WINDOW_TOKENS, bench, line_of


async def test_heartbeats_tell_capacity_and_load(demo: ServedModel) -> None:
    async with bench(demo, heartbeat_s=0.5, name="w", max_num_waiting=3) as b:
        await b.settle()
        first = b.statuses[0]
        assert first.worker_id == b.worker.worker_id
        assert (first.name, first.model, first.max_num_sequences) == ("w", "demo", 4)
        assert (first.max_num_waiting, first.num_blocks, first.num_free_blocks) == (3, 100, 100)
        assert first.max_tokens_per_request == CONTEXT_WINDOW_TOKENS
        await b.dispatch()
        await b.dispatch(b.job("r2", tier=Tier.BATCH))
        b.engine.step(num_running=1, num_free_blocks=90, outstanding_tokens=50, decode_tokens=100)
        num_before = len(b.statuses)
        await b.settle(0.5)
        assert len(b.statuses) == num_before + 1
        status = b.statuses[-1]
        assert (status.num_running, status.num_waiting) == (1, 1)
        assert (status.num_free_blocks, status.outstanding_tokens) == (90, 50)
        assert status.num_held_by_tier == {Tier.FREE: 1, Tier.BATCH: 1}
        b.engine.emit("r2:1", [20], FinishReason.LENGTH)
        await b.settle(0.5)
        assert b.statuses[-1].num_held_by_tier == {Tier.FREE: 1}


async def test_a_worker_at_rest_beats_half_as_often(demo: ServedModel) -> None:
    async with bench(demo, heartbeat_s=0.5) as b:
        await b.settle()

        async def beats_in(seconds: float) -> int:
            num_before = len(b.statuses)
            await b.settle(seconds)
            return len(b.statuses) - num_before

        await beats_in(3.0)
        assert await beats_in(10.0) == 10
        await b.dispatch()
        assert await beats_in(10.0) == 20
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await beats_in(3.0)
        assert await beats_in(10.0) == 10


async def test_much_room_that_came_free_is_told_at_once_but_not_too_often(
    demo: ServedModel,
) -> None:
    async with bench(demo, heartbeat_s=5.0, max_num_sequences=4, max_num_waiting=0) as b:
        for i in range(4):
            await b.dispatch(b.job(f"r{i}"))
        await b.settle(5.0)
        num_before = len(b.statuses)
        b.engine.emit("r0:1", [20], FinishReason.LENGTH)
        await b.settle()
        assert len(b.statuses) == num_before + 1
        assert b.statuses[-1].num_waiting == 3
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        b.engine.emit("r2:1", [20], FinishReason.LENGTH)
        await b.settle(0.01)
        assert len(b.statuses) == num_before + 1
        await b.settle(0.05)
        assert len(b.statuses) == num_before + 2
        assert b.statuses[-1].num_waiting == 1


async def test_ends_are_told_once_the_job_has_left_the_queue(demo: ServedModel) -> None:
    ended: list[Ended] = []
    async with bench(demo) as b:
        await b.peer.control.subscribe_ended(ended.append)
        await b.dispatch(b.job(tenant="t", tier=Tier.PRO))
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        await eventually(lambda: bool(ended))
        served = Served(
            request_id="r1",
            tenant="t",
            tier=Tier.PRO,
            epoch=1,
            started_ns=b.clock.now_ns(),
            prompt_tokens=3,
            completion_tokens=1,
            answer=AnswerTimes(status=Status.DONE),
        )
        assert ended == [Ended(worker_id=b.worker.worker_id, request_ids=("r1",), served=(served,))]


async def test_leases_are_extended_in_time(demo: ServedModel) -> None:
    async with bench(demo, lease_extend_s=2.0) as b:
        for i in range(3):
            await b.dispatch(b.job(f"r{i}"))
        for _ in range(10):
            await b.settle(2.0)
            assert not await b.peer.jobs.pull(line_of(b.job()), 8, 0.0)


async def test_leases_are_extended_as_soon_as_the_bus_is_back(demo: ServedModel) -> None:
    async with bench(demo, lease_extend_s=2.0) as b:
        await b.dispatch()
        b.broker.stop()
        await b.settle(5.5)
        b.broker.start()
        await b.settle(0.4)
        await b.settle(0.3)
        assert not await b.peer.jobs.pull(line_of(b.job()), 8, 0.0)


async def test_samples_hold_what_changed_since_the_last(demo: ServedModel) -> None:
    async with bench(demo, sample_interval_s=2.0) as b:
        await b.peer.control.publish_queue_status(QueueStatus(model="demo", num_queued=7, bound=10))
        await b.settle(2.0)
        b.engine.step(decode_tokens=50, prefill_tokens=20, busy_s=0.5, num_running=1)
        later = {"charged_s": 0.9, "prefix_query_tokens": 40, "prefix_hit_tokens": 16}
        later |= {"num_pulled_blocks": 3, "num_served_blocks": 5}
        b.engine.step(decode_tokens=90, prefill_tokens=20, busy_s=1.0, num_running=1, **later)
        await b.settle(2.0)
        _, sample = await b.samples()
        assert (sample.decode_tokens, sample.prefill_tokens, sample.num_steps) == (90, 20, 2)
        assert (sample.period_ms, sample.step_ms_mean, sample.busy_share) == (2000.0, 500.0, 0.5)
        assert (sample.queue_depth, sample.model, sample.num_running) == (7, "demo", 1)
        assert (sample.busy_us, sample.charged_us) == (1_000_000, 900_000)
        assert (sample.prefix_query_tokens, sample.prefix_hit_tokens) == (40, 16)
        assert (sample.role, sample.pulled_tokens, sample.served_tokens) == ("both", 48, 80)
        assert (sample.device_per_hour, sample.currency) == (Decimal("0.05"), "USD")


async def test_a_sample_of_a_group_has_the_time_of_all_its_devices(demo: ServedModel) -> None:
    async with bench(demo, sample_interval_s=2.0, num_devices=4) as b:
        await b.settle(2.0)
        b.engine.step(decode_tokens=50, busy_s=1.0, charged_s=0.9, num_running=1)
        await b.settle(2.0)
        _, sample = await b.samples()
        assert (sample.num_devices, sample.period_ms, sample.busy_share) == (4, 2000.0, 0.5)
        assert (sample.busy_us, sample.charged_us) == (4_000_000, 3_600_000)
        assert sample.step_ms_mean == 1000.0


async def test_a_sample_that_could_not_be_stored_is_part_of_the_next(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(demo, sample_interval_s=2.0) as b:
        publish = b.bus.outbox.publish

        async def refuse(record: Record) -> None:
            raise BusUnavailableError("away")

        monkeypatch.setattr(b.bus.outbox, "publish", refuse)
        b.engine.step(decode_tokens=50, busy_s=1.5, charged_s=1.4)
        await b.settle(2.0)
        assert b.worker.num_samples_lost == 1
        monkeypatch.setattr(b.bus.outbox, "publish", publish)
        b.engine.step(decode_tokens=90, busy_s=2.5, charged_s=2.25)
        await b.settle(2.0)
        await b.settle(2.0)
        both, sample = await b.samples()
        assert (both.period_ms, both.busy_us, both.charged_us) == (4000.0, 2_500_000, 2_250_000)
        assert (both.decode_tokens, both.num_steps, both.busy_share) == (90, 2, 0.625)
        assert (sample.period_ms, sample.busy_us, sample.decode_tokens) == (2000.0, 0, 0)


async def test_a_worker_at_rest_is_sampled_twice_a_minute(demo: ServedModel) -> None:
    async with bench(demo, sample_interval_s=1.0) as b:
        b.engine.step(decode_tokens=50, busy_s=0.5)
        for _ in range(3 * 60):
            await b.settle(1.0)
        busy, told, *rests = await b.samples()
        assert (busy.period_ms, busy.busy_us) == (1_000.0, 500_000)
        assert (told.period_ms, told.busy_us) == (1_000.0, 0)
        assert len(rests) == 6
        assert all(rest.sampled_ns // 10**9 % 30 == 0 for rest in rests)
        assert [rest.period_ms for rest in rests[1:]] == [30_000.0] * 5


async def test_the_end_of_a_rest_is_sampled_apart_from_it(demo: ServedModel) -> None:
    async with bench(demo, sample_interval_s=1.0) as b:
        for _ in range(5):
            await b.settle(1.0)
        b.engine.step(decode_tokens=90, busy_s=0.75, num_running=1)
        await b.settle(1.0)
        told, rest, busy = await b.samples()
        assert (told.period_ms, rest.period_ms, busy.period_ms) == (1_000.0, 4_000.0, 1_000.0)
        assert rest.sampled_ns == busy.sampled_ns - 1_000_000_000
        assert (rest.num_steps, rest.busy_share, rest.num_running) == (0, 0.0, 0)
        assert (busy.num_steps, busy.busy_share, busy.num_running) == (1, 0.75, 1)


async def test_a_request_that_waits_is_no_rest(demo: ServedModel) -> None:
    async with bench(demo, sample_interval_s=1.0) as b:
        for _ in range(3):
            await b.settle(1.0)
        await b.dispatch()
        for _ in range(3):
            await b.settle(1.0)
        assert [s.num_waiting for s in await b.samples()] == [0, 0, 1, 1, 1]


async def test_what_was_left_to_sample_is_told_at_the_end(demo: ServedModel) -> None:
    async with bench(demo, sample_interval_s=60.0, drain_timeout_s=0.1) as b:
        b.engine.step(busy_s=0.25, charged_s=0.25)
        await b.stop()
        (sample,) = await b.samples()
        assert (sample.num_steps, sample.busy_us, sample.charged_us) == (1, 250_000, 250_000)


async def test_an_engine_that_cannot_be_replaced_ends_the_worker(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        assert b.run is not None
        b.no_restart = "out of memory"
        b.engine.fail("exit code -9")
        await b.settle(2.0)
        with pytest.raises(EngineFailedError, match="out of memory"):
            await b.run
        assert b.statuses[-1].retired
        assert await b.num_queued() == 1
        assert not b.deltas()
        assert isinstance(b.clock, ManualClock)
        assert not await b.peer.jobs.pull(line_of(b.job()), 8, 0.0), (
            "nothing is released: the lease lapses"
        )
        await b.settle(6.1)
        assert len(await b.peer.jobs.pull(line_of(b.job()), 8, 0.0)) == 1
