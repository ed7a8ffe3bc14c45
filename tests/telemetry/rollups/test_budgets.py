"""Budgets of tenants and API keys in the store: set by the command, read by SQL."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.tenancy.tenants import TenantStore
from millrace.cli.main import main
from millrace.runtime.clock import SystemClock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.schemas.config import ClickHouseConfig, Config, KafkaConfig, RedisConfig
from millrace.schemas.control import TelemetryQuery
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    Budget,
    KeyRecord,
    LimitOverrides,
    LimitSet,
    TenantRecord,
    TierLimits,
)
from millrace.telemetry import service as telemetry_service
from millrace.telemetry.http.answers import SavedQueryAnswers
from millrace.telemetry.rollups.budgets import record_budgets
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.service import TelemetryService
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import eventually
from tests.telemetry.records import request_record
from tests.telemetry.stores import POLL_S

NO_TIERS = TierLimits()
_HELD = (
    "SELECT tenant, key_id, currency, monthly_budget FROM budgets_once "
    "ORDER BY valid_from, tenant, key_id, currency"
)


@pytest.fixture
async def tenants(redis_server: RedisServer) -> AsyncIterator[TenantStore]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    link = RedisLink(RedisConfig(url=redis_server.url))
    yield TenantStore(link)
    await link.close()


async def set_budget(tenants: TenantStore, tenant: str, budget: Budget | None) -> None:
    limits = LimitOverrides(monthly_budget=budget)
    await tenants.change_tenant(tenant, lambda _: TenantRecord(limits=limits))


async def held(store: Store) -> list[tuple[Any, ...]]:
    return await store.rows(_HELD)


async def ask(store: Store, **params: str | int | float) -> list[dict[str, Any]]:
    answer = await SavedQueryAnswers(store.reader).answer(
        TelemetryQuery(name="budgets", params=params)
    )
    assert answer.error == ""
    rows: list[dict[str, Any]] = json.loads(answer.rows_json)
    return rows


async def test_a_row_is_added_for_each_change(store: Store, tenants: TenantStore) -> None:
    clock = ManualClock()
    begin_s = clock.now_ns() / 1e9
    await set_budget(tenants, "acme", {"USD": Decimal(100), "EUR": Decimal("0.000000000001")})
    await set_budget(tenants, "free", None)
    key, _ = await tenants.create_key(
        "acme", 0, limits=LimitOverrides(monthly_budget=Decimal("2.5"))
    )
    await tenants.create_key("acme", 0)
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 3
    first = [
        ("acme", "", "EUR", Decimal("0.000000000001")),
        ("acme", "", "USD", Decimal(100)),
        ("acme", key.key_id, "USD", Decimal("2.5")),
    ]
    assert await held(store) == first
    clock.skip(60.0)
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 0

    await set_budget(tenants, "acme", Decimal(0))
    await tenants.revoke(key.key_id, 1)
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 3
    assert (await held(store))[3:] == [
        ("acme", "", "EUR", None),
        ("acme", "", "USD", Decimal(0)),
        ("acme", key.key_id, "USD", None),
    ]
    times = await store.rows("SELECT DISTINCT valid_from FROM budgets_once ORDER BY valid_from")
    assert [at.timestamp() for (at,) in times] == [begin_s, begin_s + 60]

    # A budget that was taken away may come back.
    clock.skip(60.0)
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 0
    await set_budget(tenants, "acme", {"EUR": Decimal(7)})
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 2
    assert (await held(store))[6:] == [
        ("acme", "", "EUR", Decimal(7)),
        ("acme", "", "USD", None),
    ]


async def test_the_budget_of_a_tier_holds_unless_the_account_has_its_own(
    store: Store, tenants: TenantStore
) -> None:
    tiers = TierLimits(pro=LimitSet(monthly_budget={"EUR": Decimal(50)}))
    pro = TenantRecord(tier=Tier.PRO)
    lifted = msgspec.structs.replace(pro, limits=LimitOverrides(monthly_budget=None))
    await tenants.change_tenant("acme", lambda _: pro)
    await tenants.change_tenant("globex", lambda _: lifted)
    key, _ = await tenants.create_key("globex", 0, tier=Tier.PRO)
    await record_budgets(store, tenants, tiers, ManualClock())
    assert await held(store) == [
        ("acme", "", "EUR", Decimal(50)),
        ("globex", key.key_id, "EUR", Decimal(50)),
    ]


async def test_all_accounts_are_read_of_more_tenants_than_travel_together(
    tenants: TenantStore,
) -> None:
    names = [f"tenant-{number:03d}" for number in range(201)]
    for name in names:
        await set_budget(tenants, name, Decimal(1))
    keys = [(await tenants.create_key(names[-1], number))[0] for number in range(2)]
    found = [account async for account in tenants.accounts()]
    assert [name for name, _, _ in found] == names
    assert {record.limits.monthly_budget for _, record, _ in found} == {Decimal(1)}
    assert sorted(found[-1][2], key=lambda key: key.created_ns) == keys
    assert not any(keys for _, _, keys in found[:-1])


async def test_nothing_is_written_while_redis_is_away(
    store: Store, tenants: TenantStore, redis_server: RedisServer
) -> None:
    await set_budget(tenants, "acme", Decimal(100))
    await record_budgets(store, tenants, NO_TIERS, ManualClock())
    link = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{free_port()}"))
    try:
        with pytest.raises(RedisUnreachableError):
            await record_budgets(store, TenantStore(link), NO_TIERS, ManualClock())
    finally:
        await link.close()
    assert await held(store) == [("acme", "", "USD", Decimal(100))]


class SlowTenants(TenantStore):
    """Has read all accounts, and is not done before ``go_on`` is set."""

    def __init__(self, tenants: TenantStore) -> None:
        super().__init__(tenants._link)
        self.has_read = asyncio.Event()
        self.go_on = asyncio.Event()

    async def accounts(self) -> AsyncIterator[tuple[str, TenantRecord, list[KeyRecord]]]:
        async for account in super().accounts():
            yield account
        self.has_read.set()
        await self.go_on.wait()


async def test_two_processes_leave_one_budget_for_each_account(
    store: Store, tenants: TenantStore
) -> None:
    clock = ManualClock()
    await set_budget(tenants, "acme", Decimal(100))
    scans = [record_budgets(store, tenants, NO_TIERS, clock) for _ in range(2)]
    await asyncio.gather(*scans)
    assert await held(store) == [("acme", "", "USD", Decimal(100))]

    # A process that is slow adds its older amount after the newer one.
    slow = SlowTenants(tenants)
    await set_budget(tenants, "acme", Decimal(200))
    clock.skip(60.0)
    late = asyncio.create_task(record_budgets(store, slow, NO_TIERS, clock))
    await slow.has_read.wait()
    await set_budget(tenants, "acme", Decimal(300))
    clock.skip(0.5)
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 1
    clock.skip(0.5)
    slow.go_on.set()
    assert await late == 1
    assert [amount for *_, amount in await held(store)] == [Decimal(n) for n in (100, 200, 300)]
    [row] = await ask(store)
    assert row["budget_amount"] == "300"
    assert await record_budgets(store, tenants, NO_TIERS, clock) == 0


async def test_the_query_compares_budgets_with_what_was_spent_this_month(
    store: Store, tenants: TenantStore
) -> None:
    now_ns = time.time_ns()
    await set_budget(tenants, "acme", {"USD": Decimal(10), "EUR": Decimal(4)})
    await set_budget(tenants, "globex", Decimal(0))
    await set_budget(tenants, "initech", Decimal(5))
    key, _ = await tenants.create_key("acme", 0, limits=LimitOverrides(monthly_budget=Decimal(8)))
    await record_budgets(store, tenants, NO_TIERS, SystemClock())
    await set_budget(tenants, "initech", None)
    clock = ManualClock(now_ns + 10**9)
    await record_budgets(store, tenants, NO_TIERS, clock)
    spent = [
        ("acme", key.key_id, "USD", "2", now_ns),
        ("acme", "other", "USD", "1", now_ns),
        ("acme", "", "USD", "0.000000000001", now_ns),
        ("acme", "", "EUR", "1", now_ns),
        ("acme", key.key_id, "USD", "64", now_ns - 32 * 86_400 * 10**9),
        ("globex", "", "EUR", "3", now_ns),
    ]
    records = [
        msgspec.structs.replace(
            request_record(number, done_ns=done_ns),
            tenant=tenant,
            key_id=key_id,
            currency=currency,
            cost=Decimal(cost),
        )
        for number, (tenant, key_id, currency, cost, done_ns) in enumerate(spent)
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(len(records))), "spent")
    await Rollups(store, SystemClock(), 1.0).reconcile()
    columns = ("tenant", "key_id", "currency", "budget_amount", "spent_amount", "spent_share")
    expected = [
        ("acme", "", "EUR", "4", "1", 0.25),
        ("acme", "", "USD", "10", "3.000000000001", pytest.approx(0.3)),
        ("acme", key.key_id, "USD", "8", "2", 0.25),
        ("globex", "", "USD", "0", "0", None),
    ]
    assert [tuple(row[name] for name in columns) for row in await ask(store)] == expected
    assert len(await ask(store, tenant="globex")) == 1


async def test_a_budget_that_the_command_set_is_read_at_the_clickhouse_endpoint(
    store_path: Path,
    store: Store,
    embedded_kafka: KafkaConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis is away when the telemetry process starts, which lives and finds budgets later."""
    monkeypatch.setattr(telemetry_service, "BUDGETS_EVERY_S", POLL_S)
    server = RedisServer(tmp_path)
    clickhouse = ClickHouseConfig(
        path=str(store_path), serve_port=0, password="a", analyst_password="b"
    )
    config = Config(clickhouse=clickhouse, kafka=embedded_kafka, redis=RedisConfig(url=server.url))
    service = await TelemetryService.open(config, SystemClock())
    http = service.serve_http()
    assert http is not None
    running = [
        asyncio.create_task(service.run(MemoryBus(MemoryBroker()))),
        asyncio.create_task(http.run()),
    ]

    async def keys(*arguments: str) -> None:
        command = ["keys", "tenant", "acme", *arguments, "--redis", server.url]
        assert await asyncio.to_thread(main, command) == 0

    async def said(*expected: str) -> None:
        sql = "SELECT currency, monthly_budget FROM budgets_once ORDER BY valid_from, currency"

        async def is_said() -> bool:
            answer = await client.post(http.url, content=f"{sql} FORMAT CSV")
            assert answer.status_code == 200, answer.text
            return answer.text.splitlines() == list(expected)

        await eventually(is_said, 20.0, f"{expected}")

    try:
        async with httpx.AsyncClient(auth=(clickhouse.analyst_username, "b")) as client:
            await said()
            server.start()
            await keys("--tier", "pro", "--monthly-budget", "100 USD, 50 EUR")
            rows = ['"EUR",50', '"USD",100']
            await said(*rows)
            await keys("--monthly-budget", "none")
            await said(*rows, '"EUR",\\N', '"USD",\\N')
    finally:
        service.stop()
        http.stop()
        await asyncio.gather(*running)
        await service.close()
        server.stop()
