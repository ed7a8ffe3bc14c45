"""Device time of earlier attempts, in the next attempt or in the job's record."""

from __future__ import annotations

from decimal import Decimal

import pytest
from msgspec.structs import replace

from millrace.bus.running_requests import RunningRequest
from millrace.scheduler.jobs.scheduled_job import MAX_ATTEMPTS_KEPT, AttemptHistory
from millrace.schemas.control import Served
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Attempt, Status, sum_pulled
from tests.scheduler.world import CONFIG, PRICES, FakeModel, World, job

_NS = 1_000_000_000


def _told(epoch: int, device_us: int) -> Served:
    return Served(
        request_id="r1",
        tenant="t",
        tier=Tier.FREE,
        epoch=epoch,
        started_ns=5,
        device_us=device_us,
    )


async def test_a_killed_worker_s_run_is_a_life_of_unknown_device_time(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    sent_ns = first.running["r1"].sent_ns
    assert 0 < sent_ns <= world.clock.now_ns()
    assert first.running["r1"].attempts == ()
    await first.kill()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running, within_s=2.5)
    again = second.running["r1"]
    (life,) = again.attempts
    assert (life.epoch, life.worker_id, life.started_ns) == (1, first.worker_id, sent_ns)
    assert sent_ns < life.ended_ns <= again.sent_ns
    assert life.device_us == 0


async def test_a_returned_job_carries_its_device_time(world: World) -> None:
    first, second = await world.add_worker("a"), await world.add_worker("b")
    second.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    second.rejection, first.rejection, first.device_us = "", "draining", 1_234
    await world.pass_s(0.6)
    sent_ns = first.running["r1"].sent_ns
    await first.return_job("r1")
    await world.until(lambda: "r1" in second.running)
    (life,) = second.running["r1"].attempts
    assert (life.epoch, life.worker_id, life.device_us) == (1, first.worker_id, 1_234)
    assert (life.started_ns, life.ended_ns > sent_ns) == (sent_ns + 1, True)


@pytest.mark.parametrize("last_word_after_s", [0.0, 0.01])
async def test_a_moved_job_waits_for_the_report_of_its_former_worker(
    world: World, last_word_after_s: float
) -> None:
    first, second = await world.add_worker("a"), await world.add_worker("b")
    second.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    second.rejection, first.device_us, first.last_word_after_s = "", 777, last_word_after_s
    await world.pass_s(0.6)
    first.draining = True
    await first.announce()
    await world.until(lambda: "r1" in second.running)
    (life,) = second.running["r1"].attempts
    assert (life.worker_id, life.device_us) == (first.worker_id, 777)


async def test_a_worker_that_says_nothing_is_not_waited_for_long(world: World) -> None:
    first, second = await world.add_worker("a"), await world.add_worker("b")
    second.rejection = "full"
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    second.rejection, first.draining = "", True
    await world.pass_s(0.6)
    await first.announce()
    await world.until(lambda: "r1" in second.running)
    (life,) = second.running["r1"].attempts
    assert (life.worker_id, life.device_us) == (first.worker_id, 0)


async def test_a_job_that_no_worker_ends_has_its_lives_in_its_record() -> None:
    world = World(CONFIG)
    await world.open()
    first = await world.add_worker("a")
    first.device_us = 2_000_000
    await world.client.jobs.publish(job("r1", deadline_ns=world.clock.now_ns() + 2 * _NS))
    await world.until(lambda: "r1" in first.running)
    first.rejection = "draining"
    await first.return_job("r1")
    await world.pass_s(3.0)
    (record,) = world.records()
    assert record.status is Status.EXPIRED
    assert record.device_us == 2_000_000
    assert record.device_cost == Decimal(2)
    assert (record.price_version, record.cost) == ("v1", Decimal(0))
    assert [life.device_us for life in record.attempts] == [2_000_000]
    await world.close()


async def test_the_index_tells_of_runs_that_another_scheduler_sent(world: World) -> None:
    first = await world.add_worker("a")
    await world.client.jobs.publish(job("r1"))
    await world.until(lambda: "r1" in first.running)
    await world.kill_scheduler()
    await first.kill()
    world.running_requests.known["r1"] = RunningRequest(worker_id="gone", epoch=1, finished=False)
    await world.add_scheduler()
    second = await world.add_worker("b")
    await world.until(lambda: "r1" in second.running, within_s=10.0)
    assert [(life.epoch, life.worker_id) for life in second.running["r1"].attempts] == [(1, "gone")]


# --- the book itself --------------------------------------------------------------------------


def test_a_run_that_goes_on_under_another_epoch_is_one_life() -> None:
    attempts = AttemptHistory()
    attempts.epoch = 1
    attempts.add_sent("a", 10, is_accepted=True)
    attempts.epoch = 2
    attempts.add_sent("a", 20, is_accepted=True)
    assert attempts.earlier("a") == ()
    attempts.add_report(_told(2, 50), "a", 30)
    reported = Attempt(epoch=2, worker_id="a", started_ns=5, ended_ns=30, device_us=50)
    assert attempts.earlier("b") == attempts.earlier("a") == (reported,)


def test_what_attempts_pulled_is_kept_and_added_up() -> None:
    attempts = AttemptHistory()
    for epoch in range(1, MAX_ATTEMPTS_KEPT + 2):
        report = replace(_told(epoch, 50), pulled_tokens=32, kv_source=f"w-{epoch}")
        attempts.add_report(report, "a", 30)
    earlier = attempts.earlier()
    assert [one.pulled_tokens for one in earlier] == [64] + [32] * (MAX_ATTEMPTS_KEPT - 1)
    assert earlier[0].kv_source == "w-2"
    assert sum_pulled(earlier) == (32 * (MAX_ATTEMPTS_KEPT + 1), f"w-{MAX_ATTEMPTS_KEPT + 1}")
    assert sum_pulled((*earlier, Attempt(epoch=99, worker_id="b")))[1] == earlier[-1].kv_source
    assert sum_pulled(()) == (0, "")


def test_a_late_report_is_added_to_its_attempt() -> None:
    attempts = AttemptHistory()
    attempts.epoch = 1
    attempts.add_sent("a", 10, is_accepted=True)
    attempts.close(15)
    attempts.epoch = 2
    attempts.add_sent("b", 20, is_accepted=True)
    attempts.add_report(_told(1, 50), "a", 30)
    assert [(life.epoch, life.device_us) for life in attempts.earlier()] == [(1, 50), (2, 0)]
    attempts.add_report(_told(0, 99), "b", 40)  # a worker of before there were epochs
    assert [life.device_us for life in attempts.earlier()] == [50, 0]


def test_attempts_are_bounded_without_losing_device_time() -> None:
    attempts = AttemptHistory()
    for number in range(1, 3 * MAX_ATTEMPTS_KEPT):
        attempts.add_report(_told(number, number), f"w{number}", number)
    earlier = attempts.earlier()
    assert len(earlier) == MAX_ATTEMPTS_KEPT
    assert sum(life.device_us for life in earlier) == sum(range(1, 3 * MAX_ATTEMPTS_KEPT))
    assert (earlier[0].epoch, earlier[0].ended_ns) == (1, earlier[1].epoch - 1)


async def test_a_request_that_no_worker_began_has_its_model_s_currency(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    euros = replace(PRICES, currency="EUR")
    monkeypatch.setattr(FakeModel, "prices", euros)
    worker = await world.add_worker("a")
    worker.rejection = "draining"
    await world.client.jobs.publish(job("r1", deadline_ns=world.clock.now_ns() + 2 * _NS))
    await world.pass_s(3.0)
    await world.until(lambda: world.record("r1") is not None)
    record = world.record("r1")
    assert record is not None
    assert (record.cost, record.currency, record.price_version) == (Decimal(0), "EUR", "")
