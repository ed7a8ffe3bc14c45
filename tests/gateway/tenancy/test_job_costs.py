"""The cost of a job counts once, whether or not the gateway that reserved for it survives."""

from __future__ import annotations

from decimal import Decimal

import pytest

from millrace.bus.tenancy.settling import Settlement, Settlements
from millrace.schemas.tenants import to_nano
from tests.support.limit_bench import LimitBench, reserve, used


def _cost_of(bench: LimitBench, job_id: str, cost: str, currency: str = "USD") -> Settlement:
    """Charge a job of the reservation r1 at its end, as a worker does."""
    return Settlement(
        request_id="r1",
        num_tokens=None,
        cost_nano=to_nano(Decimal(cost)),
        currency=currency,
        since_s=bench.clock.monotonic(),
        job_id=job_id,
    )


@pytest.mark.parametrize("currency", ["USD", "EUR"])
@pytest.mark.parametrize("end", ["gateway", "other gateway", "lapse", "release"])
async def test_jobs_count_once_whether_or_not_their_gateway_settles(
    bench: LimitBench, end: str, currency: str
) -> None:
    """The first of two jobs ends before the gateway settles or dies, the second one afterwards."""
    await bench.tenant("acme", monthly_budget={"USD": Decimal(9), "EUR": Decimal(9)})
    caller = await bench.caller("acme")
    worker = Settlements(bench.link, bench.clock, redis_time=False)
    await reserve(bench.limiter, caller, "r1", cost="0.5", currency=currency, deadline_s=30)
    first, second = (_cost_of(bench, job, "0.1", currency) for job in ("r1", "r1.1"))
    assert await worker.settle(first)
    assert not await worker.settle(first)
    usages = await bench.limiter.usage(caller)
    assert [one.spend(currency) for _, one in usages] == [(100_000_000, 400_000_000)] * 2
    spent = 200_000_000
    if end == "lapse":
        await bench.clock.advance(30.0)
        await reserve(bench.limiter, caller, "r2", currency="CHF")
        assert (await bench.limiter.usage(caller))[0][1].spend(currency) == (100_000_000, 0)
        assert await worker.settle(second)
    elif end == "release":
        await bench.limiter.settle("r1", None, None)
        spent = 100_000_000
    else:
        limiter = bench.limiter if end == "gateway" else bench.new_limiter()
        assert await limiter.settle("r1", used(5, 5), Decimal("0.2"), currency)
    assert not await worker.settle(second)
    usages = await bench.limiter.usage(caller)
    assert [one.spend(currency) for _, one in usages] == [(spent, 0)] * 2
    if end != "lapse":
        left = await bench.keys()
        assert not {key for key in left if key.startswith(("resv:", "booked:"))}


async def test_a_job_may_cost_more_than_is_held(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget=Decimal(9))
    caller = await bench.caller("acme")
    await reserve(bench.limiter, caller, "r1", cost="0.5")
    await bench.limiter.settlements.settle(_cost_of(bench, "r1", "0.7"))
    # The prices have changed meanwhile: a gateway that knows a lower cost takes nothing back.
    assert (await bench.limiter.usage(caller))[0][1].spend() == (700_000_000, 0)
    await bench.limiter.settle("r1", used(5, 5), Decimal("0.6"))
    assert (await bench.limiter.usage(caller))[0][1].spend() == (700_000_000, 0)
