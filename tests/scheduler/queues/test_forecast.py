"""Forecast of a job's start: jobs before it, here and in the queue, and their durations."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.scheduler.prediction import LOADS, Load, run_load
from millrace.registry.routing.router import Route, Router
from millrace.scheduler.jobs.scheduled_job import Tenant
from millrace.scheduler.queues.fair_queue import FairQueue
from millrace.scheduler.queues.forecast import Forecast, Forecaster, Slots, Waiting
from millrace.scheduler.queues.measurements import ArrivalRates, JobSize
from millrace.schemas.config import SchedulerConfig, TierPolicies, TierPolicy
from millrace.schemas.control import QueueStatus
from millrace.schemas.frames import Queued, Shed
from millrace.schemas.jobs import Tier
from millrace.schemas.sampling import SamplingParams
from tests.scheduler.scheduled_jobs import scheduled_job
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.statuses import status, view
from tests.scheduler.world import CONFIG, World, job

_SIZE = JobSize(prompt_tokens=0, output_tokens=100, tokens=200)
_HARD = "Prove that the wheel turns, step by step."


def forecast(**waiting: tuple[Tier, int, float]) -> Forecast:
    """Forecast for one worker with one slot, where a job takes one second.

    ``waiting`` gives each tenant's tier, number of queued jobs and new jobs per second.
    """
    queue = FairQueue(SchedulerConfig())
    found: dict[Tenant, Waiting] = {}
    for name, (tier, count, per_s) in waiting.items():
        tenant = Tenant(tier, name)
        queue.want(tenant, bool(count))
        found[tenant] = Waiting([], count, _SIZE, per_s)
    worker = view(max_num_sequences=1)
    worker.observe(status(max_num_sequences=1, decode_step_ms=10.0, num_running=1), 0.0)
    worker.observe(status(max_num_sequences=1, prefill_tokens_per_s=1e6), 0.0)
    return Forecaster(queue, found, SchedulerConfig().tiers).run(Slots([worker], 0.0))


def wait_s(found: Forecast, tier: Tier, tenant: str) -> float:
    """Return the wait in seconds of a new job of the tenant."""
    return found.tenants_s.get(Tenant(tier, tenant), found.tiers_s[tier])


def test_a_tenant_waits_for_all_that_it_has_in_the_queue() -> None:
    found = forecast(busy=(Tier.FREE, 12, 0.0))
    assert wait_s(found, Tier.FREE, "busy") == pytest.approx(12.0)
    assert wait_s(found, Tier.FREE, "new") == pytest.approx(1.0), "after a tenant level with it"


def test_tenants_take_turns_so_the_shorter_backlog_is_over_sooner() -> None:
    found = forecast(long=(Tier.FREE, 30, 0.0), short=(Tier.FREE, 5, 0.0))
    assert wait_s(found, Tier.FREE, "short") == pytest.approx(10.0, abs=1.0)
    assert wait_s(found, Tier.FREE, "long") == pytest.approx(35.0)


def test_tiers_share_by_weight() -> None:
    found = forecast(e=(Tier.ENTERPRISE, 16, 0.0), f=(Tier.FREE, 2, 0.0), b=(Tier.BATCH, 3, 0.0))
    assert wait_s(found, Tier.ENTERPRISE, "e") == pytest.approx(18.0, abs=1.0)
    assert wait_s(found, Tier.FREE, "f") == pytest.approx(18.0, abs=2.0)
    assert wait_s(found, Tier.BATCH, "b") == pytest.approx(21.0)
    assert wait_s(found, Tier.PRO, "p") == pytest.approx(0.0)


def test_tenants_that_arrive_meanwhile_get_their_share() -> None:
    """The other tenant gets every second turn because it asks for more than half."""
    alone = forecast(long=(Tier.FREE, 20, 0.0))
    beside = forecast(long=(Tier.FREE, 20, 0.0), other=(Tier.FREE, 0, 3.0))
    little = forecast(long=(Tier.FREE, 20, 0.0), other=(Tier.FREE, 0, 0.25))
    tenant = Tenant(Tier.FREE, "long")
    assert alone.tenants_s[tenant] == pytest.approx(20.0)
    assert beside.tenants_s[tenant] == pytest.approx(40.0, abs=2.0)
    assert little.tenants_s[tenant] == pytest.approx(20.0 / 0.75, abs=2.0)


def test_a_backlog_beyond_what_is_looked_at_is_guessed() -> None:
    found = forecast(busy=(Tier.FREE, 5_000, 0.0), other=(Tier.FREE, 5_000, 0.0))
    assert found.tenants_s[Tenant(Tier.FREE, "busy")] == pytest.approx(10_000, rel=0.1)


def test_a_part_of_very_many_workers_stands_for_all() -> None:
    found = []
    for num_workers in (8, 64):
        workers = [
            view(f"w{number}", max_num_sequences=256, num_running=256, decode_step_ms=10.0)
            for number in range(num_workers)
        ]
        slots = Slots(workers, 0.0)
        assert len(slots) <= 2_048
        for _ in range(num_workers * 256):
            slots.take(_SIZE)
        found.append(slots.next_s)
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_arrivals_are_counted_over_a_while_and_forgotten() -> None:
    arrivals = ArrivalRates(0.0)
    one, tenant = scheduled_job("t"), Tenant(Tier.FREE, "t")
    assert arrivals.size_of(tenant) is None
    for number in range(40):
        arrivals.note(one, 30.0 + number / 4)
    assert arrivals.rates(40.0)[tenant] == pytest.approx(2.0)
    assert arrivals.size_of(tenant) == JobSize(3, 10.0, 10.0)
    assert arrivals.rates(70.0) == {}


# --- through a scheduler ---


async def busy_worker(world: World, model: str = "m", tenant: str = "busy") -> ScriptedWorker:
    """Add a busy worker with one slot and 20 ms per token.

    One tenant sends it 40 jobs of 100 tokens; most of them wait in the queue.
    """
    worker = await world.add_worker(model, num_slots=1, model=model)
    worker.decode_step_ms = 20.0
    await worker.announce()
    sampling = job("r").sampling
    for number in range(40):
        long = msgspec.structs.replace(sampling, max_tokens=100)
        one = job(f"{tenant}-{number}", tenant=tenant, model=model, sampling=long)
        received_ns = world.clock.now_ns()
        one = msgspec.structs.replace(one, received_ns=received_ns)
        await world.client.jobs.publish(one, reserved=True)
    await world.until(lambda: bool(worker.running))
    await world.pass_s(1.0)
    return worker


def last_status(world: World, model: str = "m") -> QueueStatus:
    return [status for status in world.statuses if status.model == model][-1]


async def test_a_tenant_with_a_backlog_is_told_what_it_means_for_its_next_job(
    world: World,
) -> None:
    await busy_worker(world)
    status = last_status(world)
    here = [one for one in world.frames if isinstance(one[1], Queued)]
    assert len(here) <= 4, "the others are in the queue"
    assert status.tenant_ttft_ms[Tier.FREE]["busy"] == pytest.approx(80_000, rel=0.3)
    assert status.ttft_ms_of(Tier.FREE, "busy") == status.tenant_ttft_ms[Tier.FREE]["busy"]
    other_ms = status.ttft_ms_of(Tier.FREE, "other")
    assert other_ms is not None
    assert other_ms < 8_000


async def test_a_hard_question_goes_where_it_will_be_answered_in_time() -> None:
    tiers = TierPolicies(free=TierPolicy(weight=1.0, ttft_bound_ms=10_000.0, degrade=True))
    world = World(
        msgspec.structs.replace(CONFIG, models=("small", "large"), tiers=tiers),
        models=("small", "large"),
        router=Router({"auto": Route(small="small", large="large")}, policies=tiers),
    )
    await world.open()
    small = await world.add_worker("small", model="small")
    large = await busy_worker(world, "large")
    for tenant in ("busy", "other"):
        hard = job(
            f"hard-{tenant}",
            tenant=tenant,
            model="auto",
            prompt=_HARD,
            prompt_token_ids=None,
            sampling=SamplingParams(max_tokens=100, seed=1),
        )
        await world.client.jobs.publish(hard)
    await world.until(lambda: "hard-busy" in small.running, within_s=5.0)
    assert small.running["hard-busy"].job.route_reason == "reason:saturated"
    for _ in range(3):
        await large.finish(next(iter(large.running)))
        await world.until(lambda: bool(large.running))
    assert "hard-other" in [dispatch.job.request_id for dispatch in large.history]
    await world.close()


async def test_a_job_over_its_wait_bound_is_refused_with_a_retry_time() -> None:
    tiers = TierPolicies(free=TierPolicy(weight=1.0, ttft_bound_ms=5_000.0, shed=True))
    config = msgspec.structs.replace(CONFIG, tiers=tiers, window_jobs_per_tenant=8)
    world = World(config)
    await world.open()
    worker = await busy_worker(world)
    for _ in range(6):
        await world.pass_s(2.0)
        if worker.running:
            await worker.finish(next(iter(worker.running)))
    await world.until(lambda: any(isinstance(frame, Shed) for _, frame in world.frames))
    refused = [frame for _, frame in world.frames if isinstance(frame, Shed)]
    assert all(0.5 <= frame.retry_after_s < 120 for frame in refused)
    await world.close()


@pytest.mark.parametrize("load", [LOADS[0], LOADS[2]], ids=lambda load: load.name)
def test_nine_of_ten_predictions_are_right_within_a_half(load: Load) -> None:
    found = run_load(load, 60.0)
    assert len(found.ratios) > 100
    assert found.p90 <= 1.5
    assert not found.num_unknown
