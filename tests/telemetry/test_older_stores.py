"""A store that an older version left: its rows outlive the migrations, with the defaults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest

from bus.clock import SystemClock
from schemas.config import ClickHouseConfig
from telemetry.migrate import APPLIED, load_migrations, migrate
from telemetry.rollups import Rollups
from telemetry.store import Store

OLD = 6
REQUEST = """
INSERT INTO requests (request_id, tenant, model_requested, model_served, status, cost, currency,
    prompt_tokens, received_at, done_at, epoch, outbox_sequence)
SELECT 'old-' || toString(number % 1000), 'acme', 'demo', 'demo', 'done', 0.000000000001, 'USD', 3,
    now64(6) - number % 1000, now64(6) - number % 1000, 1, number
FROM numbers(2000)
"""
SAMPLE = """
INSERT INTO worker_samples (worker, name, model, sampled_at, period_ms, busy_share, outbox_sequence)
SELECT 'w-' || toString(number % 3), 'w', 'demo', toDateTime64(now(), 6) - intDiv(number, 3), 1000,
    0.5, number
FROM numbers(300)
"""


@pytest.fixture
async def old_store(store_path: Path) -> AsyncIterator[Store]:
    """As version 0006 left it."""
    opened = await Store.open(ClickHouseConfig(path=str(store_path), database="older"))
    await opened.command(
        "CREATE TABLE schema_migrations (number UInt32, name String, "
        "applied_at DateTime64(3, 'UTC') DEFAULT now64(3)) "
        "ENGINE = ReplacingMergeTree ORDER BY number"
    )
    for migration in load_migrations()[:OLD]:
        for statement in migration.statements:
            await opened.command(statement)
        await opened.insert(APPLIED, ([migration.number], [migration.name]), migration.name)
    yield opened
    await opened.command("DROP DATABASE older")
    await opened.close()


async def test_rows_outlive_the_migrations(old_store: Store) -> None:
    await old_store.command(REQUEST)
    await old_store.command(SAMPLE)
    ran = await migrate(old_store)
    assert ran == [migration.name for migration in load_migrations()[OLD:]]
    rows = await old_store.rows(
        "SELECT count(), min(outbox_sequence), sum(cost), sum(device_us), sum(device_cost), "
        "sum(length(lives)), countIf(dispatched_at IS NULL) FROM requests_once"
    )
    assert rows == [(1000, 1000, Decimal("1e-9"), 0, 0, 0, 1000)]
    assert await old_store.rows("SELECT count(), sum(busy_us) FROM worker_samples_once") == [
        (300, 0)
    ]
    await Rollups(old_store, SystemClock(), 1.0).reconcile()
    assert await old_store.rows("SELECT sum(requests) FROM usage_by_minute_once") == [(1000,)]


@pytest.mark.parametrize("num_done", [2, 4, 5, 6])
async def test_a_rebuild_that_was_cut_short_begins_again(old_store: Store, num_done: int) -> None:
    await old_store.command(REQUEST)
    for migration in load_migrations()[OLD:8]:
        for statement in migration.statements:
            await old_store.command(statement)
    rebuild = load_migrations()[8]
    assert rebuild.name == "0009_by_time.sql"
    for statement in rebuild.statements[:num_done]:
        await old_store.command(statement)
    await migrate(old_store)
    assert await old_store.rows("SELECT count() FROM requests FINAL") == [(1000,)]
    ((key,),) = await old_store.rows(
        "SELECT sorting_key FROM system.tables WHERE database = 'older' AND name = 'requests'"
    )
    assert key == "toStartOfMinute(received_at), request_id"
