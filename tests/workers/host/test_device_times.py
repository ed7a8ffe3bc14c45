"""Device time in a request's record, however late the engine reports it."""

from __future__ import annotations

from decimal import Decimal

import pytest

from millrace.engine.types import DeviceTime, EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason, Ended
from millrace.schemas.frames import FinishReason
from millrace.schemas.records import Attempt, RequestRecord, Status
from millrace.workers.host.endings import device_times
from tests.support.waiting import eventually
from tests.workers.scripted import Bench, bench

_S = 1_000_000_000
_BEFORE = Attempt(epoch=1, worker_id="gone", started_ns=5, ended_ns=9, device_us=400)
_KILLED = Attempt(epoch=2, worker_id="killed", started_ns=10, ended_ns=12)


def _end(b: Bench, device_us: float, engine_id: str = "r1:1", *, owes: bool = False) -> None:
    b.engine.step(
        EngineOutput(
            request_id=engine_id,
            token_ids=(20,),
            started=engine_id not in b.engine.started,
            finish_reason=FinishReason.LENGTH,
            device_us=device_us,
            owes=owes,
        )
    )


async def _record(b: Bench) -> RequestRecord:
    await b.ended()
    (record,) = await b.records()
    return record


async def test_a_last_output_says_what_it_took(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(sent_ns=77)
        _end(b, 1_800_000.4)
        record = await _record(b)
        assert (record.device_us, record.dispatched_ns, record.attempts) == (1_800_000, 77, ())
        assert record.device_cost == Decimal("0.000025"), "an hour costs 0.05"


async def test_all_lives_together_are_the_request_s(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(epoch=3, attempts=(_KILLED, _BEFORE))
        _end(b, 600.0, "r1:3")
        record = await _record(b)
        assert record.attempts == (_BEFORE, _KILLED)
        assert record.device_us == 1_000


async def test_all_devices_of_a_group_are_the_request_s(demo: ServedModel) -> None:
    """The time of an attempt elsewhere includes all of its devices already."""
    async with bench(demo, num_devices=4) as b:
        await b.dispatch(epoch=3, attempts=(_BEFORE,))
        _end(b, 1_800_000.2, "r1:3")
        record = await _record(b)
        assert (record.num_devices, record.device_us) == (4, 4 * 1_800_000 + 1 + 400)
        assert record.device_cost == Decimal("0.000100005569"), "an hour of one costs 0.05"
        assert b.statuses[-1].num_devices == 4


async def test_an_attempt_that_goes_on_has_taken_all_devices_of_its_group(
    demo: ServedModel,
) -> None:
    async with bench(demo, num_devices=2) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.engine.took_us["r1:1"] = 150.0
        await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(30,))
        _end(b, 100.0, "r1:65")
        record = await _record(b)
        assert [life.device_us for life in record.attempts] == [300]
        assert record.device_us == 500


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (CancelReason.CLIENT, Status.CANCELLED),
        (CancelReason.DEADLINE, Status.EXPIRED),
    ],
)
async def test_the_record_of_a_cancelled_request_waits_for_the_engine(
    demo: ServedModel, reason: CancelReason, status: Status
) -> None:
    async with bench(demo) as b:
        b.engine.silent = True
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        await b.peer.control.cancel(Cancel(request_id="r1", reason=reason))
        await eventually(
            lambda: b.kinds()[-1:] in (["Cancelled"], ["Expired"]), what="the last frame"
        )
        await b.settle(0.1)
        assert b.worker.requests.num_ending == 1
        assert not await b.records()
        b.engine.took_us["r1:1"] = 250.0
        b.engine.tell("r1:1")
        record = await _record(b)
        assert (record.status, record.device_us) == (status, 250)


async def test_an_end_that_crosses_the_cancel_is_not_forgotten(demo: ServedModel) -> None:
    async with bench(demo) as b:
        b.engine.silent = True
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        await b.command(Cancel(request_id="r1"))
        _end(b, 300.0)
        b.engine.tell("r1:1")  # it knows no such request any more
        assert (await _record(b)).device_us == 300


async def test_record_waits_for_outstanding_device_time(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        _end(b, 100.0, owes=True)
        await b.settle(0.1)
        assert (b.kinds()[-1], b.worker.requests.num_ending) == ("Done", 1)
        b.engine.took_us["r1:1"] = 140.0
        b.engine.tell("r1:1")
        assert (await _record(b)).device_us == 140


async def test_an_engine_that_says_nothing_is_not_waited_for_for_ever(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_times, "PATIENCE_S", 0.05)
    async with bench(demo) as b:
        b.engine.silent = True
        b.engine.took_us["r1:1"] = 90.0
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.engine.tell("r1:1", over=False)
        await b.command(Cancel(request_id="r1"))
        assert (await _record(b)).device_us == 90


async def test_device_time_reported_by_a_lost_engine_counts(demo: ServedModel) -> None:
    async with bench(demo) as b:
        for name in ("r1", "cancelled"):
            await b.dispatch(b.job(name))
            b.engine.emit(f"{name}:1", [20])
        b.engine.silent = True
        b.engine.took_us = {"r1:1": 500.0, "cancelled:1": 60.0}
        for engine_id in b.engine.took_us:
            b.engine.tell(engine_id, over=False)
        await b.command(Cancel(request_id="cancelled"))
        b.engine.fail("exit code -9")
        await b.settle(1.0)
        await b.ended("cancelled")
        b.engine.emit("r1:1", [21])
        b.engine.took_us["r1:1"] = 30.0
        b.engine.tell("r1:1", over=False)
        _end(b, 45.0)
        await b.ended()
        took = {record.request_id: record.device_us for record in await b.records()}
        assert took == {"r1": 545, "cancelled": 60}


async def test_a_superseded_run_is_told_of_with_what_it_took(demo: ServedModel) -> None:
    ended: list[Ended] = []
    async with bench(demo) as b:
        await b.peer.control.subscribe_ended(ended.append)
        await b.dispatch()
        started_ns = b.clock.now_ns()
        b.engine.emit("r1:1", [20])
        b.engine.took_us["r1:1"] = 70.0
        await b.command(Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2))
        await eventually(lambda: bool(ended))
        (served,) = ended[0].served
        assert (served.epoch, served.started_ns, served.device_us) == (1, started_ns, 70)
        assert not await b.records()


@pytest.mark.parametrize("device_us", [70.0, 0.0])
async def test_device_time_without_a_first_token_is_reported(
    demo: ServedModel, device_us: float
) -> None:
    """A request superseded during its first step has used the device; another was only queued."""
    ended: list[Ended] = []
    async with bench(demo) as b:
        await b.peer.control.subscribe_ended(ended.append)
        await b.dispatch()
        b.engine.took_us["r1:1"] = device_us
        await b.command(Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2))
        await eventually(lambda: bool(ended))
        served = [(one.started_ns, one.device_us, one.prompt_tokens) for one in ended[0].served]
        assert served == ([(0, 70, 0)] if device_us else [])


async def test_a_replaced_run_without_a_first_token_keeps_its_device_time(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.took_us["r1:1"] = 33.0
        await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(30,))
        _end(b, 7.0, "r1:65")
        record = await _record(b)
        assert [(one.epoch, one.device_us) for one in record.attempts] == [(1, 33)]
        assert record.device_us == 40


async def test_what_is_given_back_is_told_of_with_what_it_took(demo: ServedModel) -> None:
    ended: list[Ended] = []
    async with bench(demo, drain_timeout_s=0.5) as b:
        await b.peer.control.subscribe_ended(ended.append)
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.engine.took_us["r1:1"] = 80.0
        await b.stop()
        (notice,) = ended
        assert (notice.released, notice.served[0].device_us) == (("r1",), 80)


async def test_a_run_that_another_replaces_here_is_a_life_of_it(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(attempts=(Attempt(epoch=0, worker_id="gone", device_us=1),))
        started_ns = b.clock.now_ns()
        b.engine.emit("r1:1", [20, 21])
        b.engine.took_us["r1:1"] = 33.0
        await b.settle(1.0)
        await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(30,))
        _end(b, 7.0, "r1:65")
        record = await _record(b)
        assert [(life.epoch, life.device_us) for life in record.attempts] == [(0, 1), (1, 33)]
        life = record.attempts[1]
        assert life.worker_id == record.worker_id == b.worker.worker_id
        assert (life.started_ns, life.ended_ns) == (started_ns, started_ns + _S)
        assert record.device_us == 41


async def test_a_run_that_goes_on_under_another_epoch_is_no_life_of_itself(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.dispatch(epoch=3)
        b.engine.emit("r1:3", [20])
        attempts = (
            _BEFORE,
            Attempt(epoch=2, worker_id=b.worker.worker_id, device_us=5),
            Attempt(epoch=3, worker_id=b.worker.worker_id),
        )
        await b.dispatch(epoch=65, lease="$ACK.demo.2.1", resume_token_ids=(20,), attempts=attempts)
        _end(b, 11.0, "r1:3")
        record = await _record(b)
        assert [life.epoch for life in record.attempts] == [1, 2]
        assert record.device_us == 400 + 5 + 11


async def test_device_time_of_unknown_requests_is_dropped(demo: ServedModel) -> None:
    async with bench(demo) as b:
        b.engine.on_device_times([DeviceTime("unknown", 0, 5.0, over=True)])
        await b.dispatch()
        _end(b, 3.0)
        assert (await _record(b)).device_us == 3
