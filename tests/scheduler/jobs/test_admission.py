"""Jobs that services publish, against the limits of their tenants on a real redis-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal

import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from millrace.bus.tenancy.errors import RateLimitError
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.bus.tenancy.settling import Settlement, Settlements
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.pricing import PriceBook
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.tasks import Tasks
from millrace.scheduler.jobs.admission import JobAdmission, NotYet, Places
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.jobs.tenant_lines import TenantLines
from millrace.scheduler.jobs.terminal_status import TerminalStatus
from millrace.schemas.config import RedisConfig
from millrace.schemas.jobs import AnswerForm, Tier
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.records import Status
from millrace.schemas.tenants import TierLimits
from tests.scheduler.scheduled_jobs import scheduled_job
from tests.support.limit_bench import LimitBench, reserve
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import eventually

# A prompt of 3 and a completion of 16 cost 19 at most.
PRICES = PriceBook(
    version="v1",
    input_per_million=Decimal(1_000_000),
    cached_input_per_million=Decimal(0),
    output_per_million=Decimal(1_000_000),
)


@pytest.fixture
async def bench(redis_server: RedisServer) -> AsyncIterator[LimitBench]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    made = LimitBench(redis_server.url)
    yield made
    await made.close()


def door_of(bench: LimitBench, link: RedisLink | None = None) -> JobAdmission:
    """Another scheduler's."""
    keeper = LimitKeeper(
        link or bench.link, TierLimits(), bench.clock, redis_time=False, remembers=True
    )
    return JobAdmission(keeper, lambda _model: PRICES, bench.clock)


async def spent(bench: LimitBench, tenant: str, currency: str = "") -> Decimal:
    found: bytes | None = await bench.link.call("GET", f"spent:t:{tenant}:202611{currency}")
    return Decimal(int(found or 0)).scaleb(-9)


async def standing(bench: LimitBench, tenant: str) -> tuple[int, int]:
    """Running requests, and the tokens in the bucket."""
    [(_, found)] = await bench.limiter.usage(Caller(tenant=tenant))
    return found.num_running, found.tokens // 60_000


async def settle(
    bench: LimitBench, job: ScheduledJob, num_tokens: int, cost: int, currency: str = "USD"
) -> bool:
    """Settle the job's reservation, as a worker does at the end."""
    assert job.reservation is not None
    settlements = Settlements(bench.link, bench.clock, redis_time=False)
    return await settlements.settle(
        Settlement(
            request_id=job.reservation.reservation_id,
            num_tokens=num_tokens,
            cost_nano=cost * 10**9,
            currency=currency,
            since_s=bench.clock.monotonic(),
            spent_keys=(job.reservation.spent_key,),
            remember=True,
        )
    )


async def test_a_job_over_a_limit_waits_for_it(bench: LimitBench) -> None:
    admission = door_of(bench)
    await bench.tenant("rpm", requests_per_minute=1)
    await bench.tenant("tpm", tokens_per_minute=30)
    await bench.tenant("running", concurrent_requests=1)
    await bench.tenant("poor", monthly_budget=Decimal(30))
    for tenant, answer in (
        ("rpm", NotYet(60.0, ends_free_it=False)),
        ("tpm", NotYet(16.0, ends_free_it=False)),
        ("running", NotYet(1.0, ends_free_it=True)),
        ("poor", NotYet(1.0, ends_free_it=True)),
    ):
        assert await admission.admit(scheduled_job(tenant)) is None
        late = scheduled_job(tenant)
        assert await admission.admit(late) == answer, tenant
        assert late.reservation is None


async def test_a_job_counts_against_the_budget_in_its_currency(bench: LimitBench) -> None:
    """The job may cost up to 19 EUR."""
    await bench.tenant("acme", monthly_budget={"USD": Decimal(1), "EUR": Decimal(20)})
    await bench.tenant("dollars", monthly_budget=Decimal(1))
    keeper = LimitKeeper(bench.link, TierLimits(), bench.clock, redis_time=False, remembers=True)
    euros = msgspec.structs.replace(PRICES, currency="EUR")
    admission = JobAdmission(keeper, lambda _model: euros, bench.clock)
    job = scheduled_job("acme")
    assert await admission.admit(job) is None
    assert await admission.admit(scheduled_job("acme")) == NotYet(1.0, ends_free_it=True)
    assert await admission.admit(scheduled_job("dollars")) is None
    assert await settle(bench, job, 10, 12, "EUR")
    assert await spent(bench, "acme") == 0
    assert await spent(bench, "acme", ":EUR") == 12
    adapted = scheduled_job("acme")
    own = {"version": "a", "currency": "CHF", "output_per_million": "9000000"}
    own |= dict.fromkeys(("input_per_million", "cached_input_per_million"), "0")
    adapted.adapter = AdapterRef(name="sql", version="1", source="/sql", prices=own)
    assert await admission.admit(adapted) is None  # no budget bounds francs
    late = await admission.admit(scheduled_job("acme"))
    assert isinstance(late, TerminalStatus)
    assert late.code == "insufficient_quota"
    assert "20 EUR. 12 EUR is spent" in late.message


async def test_what_a_limit_still_admits_is_told(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=3, concurrent_requests=2)
    admission = door_of(bench)
    remaining: list[tuple[str, int | None, bool]] = []

    def learn(tenant: str, places: Places) -> None:
        remaining.append((tenant, *places))

    jobs = [scheduled_job("acme") for _ in range(3)]
    for job in (*jobs, scheduled_job("local")):
        await admission.admit(job, learn)
    assert remaining == [
        ("acme", 1, True),
        ("acme", 0, True),
        ("acme", 0, False),
        ("local", None, True),
    ]


async def test_jobs_in_line_leave_room_to_requests_that_cannot_wait(bench: LimitBench) -> None:
    """A line takes each place as it becomes free. Once a gateway had to refuse a request, jobs
    leave a quarter of each limit until no such request has come for a while."""
    await bench.tenant("acme", concurrent_requests=4)
    admission = door_of(bench)
    jobs = [scheduled_job("acme") for _ in range(6)]
    for job in jobs[:4]:
        assert await admission.admit(job) is None
    with pytest.raises(RateLimitError):
        await reserve(bench.limiter, Caller(tenant="acme"), "r1")
    await settle(bench, jobs[0], 10, 0)
    assert isinstance(await admission.admit(jobs[4]), NotYet)
    await reserve(bench.limiter, Caller(tenant="acme"), "r2")
    await settle(bench, jobs[1], 10, 0)
    assert isinstance(await admission.admit(jobs[4]), NotYet), "the place stays for the next one"
    await bench.clock.advance(4.0)
    await reserve(bench.limiter, Caller(tenant="acme"), "r3")
    await bench.limiter.settle("r3", None, None)
    await bench.clock.advance(4.0)
    assert isinstance(await admission.admit(jobs[4]), NotYet), "they still come"
    await bench.clock.advance(1.0)
    assert await admission.admit(jobs[4]) is None


async def test_schedulers_share_the_places_of_a_tenant(bench: LimitBench) -> None:
    """Every scheduler has its own queue; a job's end at one scheduler admits a job at another."""
    await bench.tenant("acme", concurrent_requests=2)
    tasks = Tasks()
    lines = [TenantLines(door_of(bench), bench.clock, tasks) for _ in range(2)]
    jobs = [scheduled_job("acme") for _ in range(6)]
    admitted: list[ScheduledJob] = []

    async def until_admitted(job: ScheduledJob, line: TenantLines) -> None:
        assert await line.until_admitted(job) is None
        admitted.append(job)

    for number, job in enumerate(jobs):
        job.phase = JobPhase.PREPARING
        assert await lines[number % 2].admit(job) is None
        if job.phase is JobPhase.HELD:
            tasks.spawn(until_admitted(job, lines[number % 2]), "wait")
        else:
            admitted.append(job)
    assert admitted == jobs[:2]
    for number in range(2, 6):
        await settle(bench, admitted[number - 2], 10, 0)
        for line in lines:
            line.freed("acme")
        await eventually(lambda number=number: len(admitted) == number + 1)
        assert (await standing(bench, "acme"))[0] == 2
    assert set(admitted) == set(jobs)
    await tasks.close()


async def test_the_bound_of_waiting_jobs_is_the_tenants_own(bench: LimitBench) -> None:
    admission = door_of(bench)
    whose = [("acme", Tier.PRO), ("acme", Tier.BATCH), ("local", Tier.BATCH)]
    assert await admission.max_waiting_jobs(whose) == [1_000, 1_000_000, None]
    await bench.tenant("acme", max_waiting_jobs=7)
    await bench.clock.advance(5.0)
    assert await admission.max_waiting_jobs(whose) == [7, 7, None]
    await bench.tenant("acme", max_waiting_jobs=None)
    await bench.clock.advance(5.0)
    assert await admission.max_waiting_jobs(whose) == [None, None, None]


async def test_a_job_over_its_whole_limit_fails(bench: LimitBench) -> None:
    admission = door_of(bench)
    await bench.tenant("small", tokens_per_minute=18)
    await bench.tenant("poor", monthly_budget=Decimal(18))
    await bench.tenant("narrow", context_tokens=18)
    for tenant, code in (
        ("small", "tokens_per_minute"),
        ("poor", "insufficient_quota"),
        ("narrow", "context_length_exceeded"),
    ):
        terminal_status = await admission.admit(scheduled_job(tenant))
        assert isinstance(terminal_status, TerminalStatus)
        assert (terminal_status.status, terminal_status.code, terminal_status.retryable) == (
            Status.FAILED,
            code,
            False,
        )
    for answer, param in ((None, "prompt"), (AnswerForm(), "messages")):
        narrow = scheduled_job("narrow")
        narrow.set_prepared(replace(narrow.job, answer=answer))
        terminal_status = await admission.admit(narrow)
        assert isinstance(terminal_status, TerminalStatus)
        assert terminal_status.param == param


async def test_a_budget_is_charged_once_whoever_ends_the_job(bench: LimitBench) -> None:
    await bench.tenant("acme", monthly_budget=Decimal(30))
    job = scheduled_job("acme")
    assert await door_of(bench).admit(job) is None
    assert isinstance(await door_of(bench).admit(scheduled_job("acme")), NotYet)
    assert await settle(bench, job, 10, 10)
    assert not await settle(bench, job, 10, 10), "a worker that answers again"
    await door_of(bench).release(job)
    assert await spent(bench, "acme") == 10
    assert await standing(bench, "acme") == (0, 10)
    assert await door_of(bench).admit(scheduled_job("acme")) is None


async def test_a_job_that_is_delivered_again_takes_nothing_more(bench: LimitBench) -> None:
    """The first scheduler died before the job's end, or between its end and the acknowledgement."""
    await bench.tenant("acme", requests_per_minute=1, concurrent_requests=1)
    first = scheduled_job("acme")
    assert await door_of(bench).admit(first) is None
    again = delivered_again(first)
    assert await door_of(bench).admit(again) is None
    assert await standing(bench, "acme") == (1, 19)
    assert await settle(bench, again, 5, 5)
    once_more = delivered_again(first)
    assert await door_of(bench).admit(once_more) is None
    assert not await settle(bench, once_more, 5, 5)
    assert await spent(bench, "acme") == 5
    assert await standing(bench, "acme") == (0, 5)


async def test_a_started_job_continues_over_the_limit_and_is_charged(bench: LimitBench) -> None:
    """The job's reservation has lapsed, and other jobs have used up the limit since."""
    await bench.tenant("acme", requests_per_minute=1)
    assert await door_of(bench).admit(scheduled_job("acme")) is None
    job = scheduled_job("acme", interrupted=True)
    assert await door_of(bench).admit(job) is None
    assert await settle(bench, job, 7, 7)
    assert not await settle(bench, job, 7, 7)
    assert await spent(bench, "acme") == 7


async def test_what_a_gateway_let_in_is_not_charged_again(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=1)
    await reserve(bench.limiter, Caller(tenant="acme"), "r1")
    job = scheduled_job("acme")
    job.lease.tenant_queue = job.lease.tenant_queue.twin
    assert await door_of(bench).admit(job) is None
    assert job.reservation is None
    assert (await standing(bench, "acme"))[0] == 1


async def test_a_job_cannot_use_the_reservation_of_another_request(bench: LimitBench) -> None:
    """The job has the id of an admitted or an answered request."""
    await bench.tenant("acme", requests_per_minute=2)
    await reserve(bench.limiter, Caller(tenant="acme"), "r1")
    same = scheduled_job("acme")
    same.job = replace(same.job, request_id="r1")
    assert await door_of(bench).admit(same) is None
    await settle(bench, same, 10, 10)
    again = scheduled_job("acme")
    again.job = replace(again.job, request_id="r1")
    assert isinstance(await door_of(bench).admit(again), NotYet)


async def test_a_job_without_a_workers_answer_is_not_charged(bench: LimitBench) -> None:
    await bench.tenant("acme", requests_per_minute=1, monthly_budget=Decimal(19))
    job = scheduled_job("acme")
    admission = door_of(bench)
    assert await admission.admit(job) is None
    await admission.release(job)
    assert await spent(bench, "acme") == 0
    assert await admission.admit(scheduled_job("acme")) is None


async def test_without_redis_limits_are_the_schedulers_own(bench: LimitBench) -> None:
    away = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"), bench.clock)
    admission = door_of(bench, away)
    jobs = [scheduled_job("acme") for _ in range(8)]
    for job in jobs:
        assert await admission.admit(job) is None
    assert await admission.admit(scheduled_job("acme")) == NotYet(1.0, ends_free_it=True)
    admission.release_local(jobs[0])
    assert await admission.admit(scheduled_job("acme")) is None
    # It is charged all the same, by its worker, once Redis is there.
    assert await settle(bench, jobs[0], 11, 11)
    assert not await settle(bench, jobs[0], 11, 11)
    assert await spent(bench, "acme") == 11
    waiting = await admission.admit(scheduled_job("acme", Tier.BATCH))
    assert waiting == NotYet(2.0, ends_free_it=False)
    assert await admission.admit(scheduled_job("local", Tier.BATCH)) is None
    await away.close()


def delivered_again(known: ScheduledJob) -> ScheduledJob:
    """The same stored job, as the next delivery brings it to another scheduler."""
    made = scheduled_job(known.job.tenant)
    made.job, made.lease = known.job, known.lease
    made.ran_before = True
    made.phase = JobPhase.PREPARING
    return made
