"""Worker that was taken for dead and returns: it answers no request that another worker owns by
now."""

from __future__ import annotations

import pytest

from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason, Ended
from millrace.schemas.frames import Done, FinishReason
from millrace.workers.host.leases import SETTLE_S
from tests.support.waiting import eventually
from tests.workers.scripted import Bench, bench, line_of

_SUPERSEDED = Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2)


def _finish(b: Bench, engine_id: str = "r1:1") -> None:
    b.engine.emit(engine_id, [21], FinishReason.LENGTH)


async def _elsewhere(b: Bench, epoch: int = 2) -> None:
    """Enter the request in the index as another worker's."""
    await b.index.start("r1", "other", epoch)


async def _begin(b: Bench) -> None:
    await b.dispatch(b.job(store_result=True))
    b.engine.emit("r1:1", [20])
    await b.settle(0.5)


async def test_an_undisturbed_end_waits_for_nothing(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await _begin(b)
        b.index.away = True
        _finish(b)
        await b.settle()
        assert await b.num_queued() == 0
        assert len(await b.records()) == 1


@pytest.mark.parametrize("stopped_s", [1.5, 10.0])
async def test_a_worker_that_stood_still_ends_nothing_before_it_heard_the_news(
    demo: ServedModel, stopped_s: float
) -> None:
    """The worker wakes with the last token and the cancel both unread, in the worst order."""
    async with bench(demo) as b:
        await _begin(b)
        b.clock.skip(stopped_s)
        _finish(b)
        await b.settle(0.2)
        assert isinstance(b.of()[-1], Done), "readers know the epoch"
        assert await b.num_queued() == 1
        await b.peer.control.cancel(_SUPERSEDED)
        await b.settle(2 * SETTLE_S)
        assert b.worker.requests.num_ending == 0
        assert await b.num_queued() == 1, "the job is the other run's to acknowledge"
        assert not await b.records()
        assert await b.peer.results.fetch("local", "r1") is None


async def test_a_worker_that_stood_still_and_was_not_missed_ends_what_it_runs(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await _begin(b)
        b.clock.skip(1.5)
        b.index.away = True  # the connection held, so no news was lost
        _finish(b)
        await b.settle(1.9)
        assert not await b.records()
        await b.settle(0.3)
        assert (len(await b.records()), await b.num_queued()) == (1, 0)


async def test_a_cut_off_worker_asks_the_index_before_it_ends_anything(
    demo: ServedModel,
) -> None:
    """The cancel was published while the worker was cut off."""
    ended: list[Ended] = []
    async with bench(demo) as b:
        await b.peer.control.subscribe_ended(ended.append)
        await _begin(b)
        b.broker.stop()
        await b.settle(3.0)
        await _elsewhere(b)
        b.broker.start()
        _finish(b)
        await b.settle(2 * SETTLE_S)
        assert b.worker.requests.num_ending == 0
        assert await b.num_queued() == 1
        assert not await b.records()
        assert await b.peer.results.fetch("local", "r1") is None
        assert [notice.request_ids for notice in ended] == [("r1",)]


async def test_a_cut_off_worker_drops_what_runs_elsewhere_though_nobody_told_it(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await _begin(b)
        await b.dispatch(b.job("r2"))
        b.broker.stop()
        await b.settle(3.0)
        await _elsewhere(b)
        b.broker.start()
        await b.settle(2 * SETTLE_S)
        assert b.engine.cancelled == ["r1:1"]
        assert b.worker.requests.num_running == 1


async def test_unconfirmed_lease_lapses_and_the_next_delivery_makes_the_end(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await _begin(b)
        b.broker.stop()
        await b.settle(3.0)
        b.broker.start()
        b.index.away = True
        _finish(b)
        await b.settle(SETTLE_S + 0.5)
        assert b.worker.requests.num_ending == 0
        assert not await b.records()
        await b.settle(7.0)
        (again,) = await b.peer.jobs.pull(line_of(b.job()), 1, 0.0)
        assert again.num_deliveries == 2
        await b.dispatch(again.job, epoch=65, lease=again.lease, resume_token_ids=(20, 21))
        await b.settle()
        assert b.of()[-1] == Done(epoch=65, finish_reason=FinishReason.LENGTH, num_tokens=2)
        assert list(b.engine.added) == ["r1:1"], "it was not run again"
        assert await b.num_queued() == 0
        (record,) = await b.records()
        assert record.completion_tokens == 2


async def test_a_dispatch_that_lay_unread_while_the_worker_stood_still_is_in_doubt(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        lease = await b.lease(b.job())
        await b.settle(0.5)
        b.clock.skip(5.0)
        # All of its tokens are there already, so it ends at once.
        await b.dispatch(b.job(sampling={"max_tokens": 1}), lease=lease, resume_token_ids=(20,))
        await b.peer.control.cancel(_SUPERSEDED)
        await b.settle(2 * SETTLE_S)
        assert not await b.records()
        assert await b.num_queued() == 1


async def test_a_gap_between_the_record_and_the_ack_is_seen(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(demo) as b:
        await _begin(b)
        publish = b.bus.outbox.publish

        async def then_stand_still(record: object) -> None:
            await publish(record)  # type: ignore[arg-type]
            b.clock.skip(8.0)

        monkeypatch.setattr(b.bus.outbox, "publish", then_stand_still)
        _finish(b)
        await b.settle()
        assert await b.num_queued() == 1
        await b.peer.control.cancel(_SUPERSEDED)
        await b.settle(2 * SETTLE_S)
        assert await b.num_queued() == 1


async def test_another_gap_while_it_asks_is_another_doubt(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await _begin(b)
        lookup = b.index.lookup
        asked: list[str] = []

        async def slow(request_id: str) -> object:
            asked.append(request_id)
            found = await lookup(request_id)
            if len(asked) == 1:
                b.clock.skip(5.0)
            return found

        b.index.lookup = slow  # type: ignore[assignment, method-assign]
        b.clock.skip(5.0)
        _finish(b)
        await b.settle(SETTLE_S + 0.2)
        assert len(asked) >= 1
        assert not await b.records()
        await b.settle(SETTLE_S + 0.2)
        assert (len(await b.records()), await b.num_queued()) == (1, 0)


async def test_a_doubtful_lease_is_not_given_back(demo: ServedModel) -> None:
    ended: list[Ended] = []
    async with bench(demo, drain_timeout_s=0.3) as b:
        await b.peer.control.subscribe_ended(ended.append)
        await _begin(b)
        b.clock.skip(4.0)
        await b.stop()
        await eventually(lambda: bool(ended))
        assert ended[0].request_ids == ("r1",)
        assert ended[0].released == ()


async def test_a_new_lease_is_certain_again(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await _begin(b)
        b.broker.stop()
        await b.settle(3.0)
        b.broker.start()
        b.index.away = True
        await b.settle(SETTLE_S + 1.0)
        await b.dispatch(epoch=65, lease="$ACK.demo.2.1", resume_token_ids=(20,))
        _finish(b)
        await b.settle()
        assert (len(await b.records()), await b.num_queued()) == (1, 0)
