"""A worker's charge at the end of a job."""

from __future__ import annotations

import pytest

from millrace.bus.tenancy.settling import Settlement
from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason, Reservation
from millrace.schemas.frames import FinishReason
from millrace.schemas.jobs import Job, RequestPart, Source
from millrace.schemas.tenants import to_nano
from tests.workers.scripted import Bench, bench


async def _run(b: Bench, job: Job, reservation: Reservation | None = None) -> Settlement | None:
    """Return the amount charged for the job, which must equal its record's."""
    await b.dispatch(job, reservation=reservation)
    b.engine.step(
        EngineOutput(
            request_id=f"{job.request_id}:1",
            token_ids=(20, 21),
            started=True,
            finish_reason=FinishReason.LENGTH,
        )
    )
    await b.ended(job.request_id)
    (record,) = await b.records()
    made, b.settlements.made = b.settlements.made, []
    if not made:
        return None
    (settlement,) = made
    assert settlement.cost_nano == to_nano(record.cost) > 0
    assert settlement.currency == record.currency
    return settlement


async def test_a_job_of_a_gateway_charges_its_own_cost(demo: ServedModel) -> None:
    parts = {
        "alone": (None, "alone"),
        "chat.2": (RequestPart(request_id="chat", choice=2, shares_prompt=True), "chat"),
        "chat.2-r1": (RequestPart(request_id="chat", choice=2, round=1), "chat.2-r1"),
        "batch.7.1": (RequestPart(request_id="batch.7", choice=1), "batch.7"),
        "batch.7-2.1": (RequestPart(request_id="batch.7", choice=1, attempt=2), "batch.7-2"),
    }
    async with bench(demo) as b:
        for job_id, (part, reservation_id) in parts.items():
            charged = await _run(b, b.job(job_id, part=part, source=Source.HTTP))
            assert charged is not None
            assert (charged.request_id, charged.job_id) == (reservation_id, job_id)
            assert (charged.spent_keys, charged.remember) == ((), False)


async def test_a_job_of_a_service_settles_its_reservation(demo: ServedModel) -> None:
    reservation = Reservation(reservation_id="job:7:r1", spent_key="spent:t:acme:202611")
    async with bench(demo) as b:
        charged = await _run(b, b.job(source=Source.NATS), reservation)
        assert charged is not None
        assert (charged.request_id, charged.job_id) == ("job:7:r1", "")
        assert (charged.num_tokens, charged.spent_keys) == (5, ("spent:t:acme:202611",))
        assert charged.remember


async def test_a_service_cannot_charge_what_a_gateway_reserved(demo: ServedModel) -> None:
    async with bench(demo) as b:
        part = RequestPart(request_id="chat")
        assert await _run(b, b.job(part=part, source=Source.NATS)) is None


@pytest.mark.parametrize("is_computed", [False, True])
async def test_a_cancelled_job_charges_what_was_computed(
    demo: ServedModel, *, is_computed: bool
) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(source=Source.HTTP))
        if is_computed:
            b.engine.step(EngineOutput(request_id="r1:1", token_ids=(20, 21), started=True))
        await b.command(Cancel(request_id="r1", reason=CancelReason.ORPHANED))
        await b.ended()
        (record,) = await b.records()
        charged = [one.cost_nano for one in b.settlements.made]
        assert charged == ([to_nano(record.cost)] if is_computed else [])
        assert (record.cost > 0) == is_computed
