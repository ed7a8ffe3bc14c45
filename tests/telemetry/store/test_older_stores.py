"""A store that an older version left: its rows outlive the migrations, with the defaults."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest

from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.migrate import APPLIED, load_migrations, migrate
from millrace.telemetry.store.store import Store, StoreUnavailableError

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


KEYS = """
SELECT name, sorting_key FROM system.tables
WHERE database = 'older' AND name IN ('requests', 'worker_samples') ORDER BY name
"""
REBUILT = [
    ("requests", "toStartOfMinute(received_at), request_id"),
    ("worker_samples", "sampled_at, worker"),
]
LATE_REQUEST = """
INSERT INTO requests (request_id, tenant, status, received_at, done_at, outbox_sequence)
SELECT 'late-' || toString({number:UInt32}), 'acme', 'done', now64(6), now64(6), 5000
"""
LATE_SAMPLE = """
INSERT INTO worker_samples (worker, sampled_at, period_ms, outbox_sequence)
SELECT 'late-' || toString({number:UInt32}), now64(6), 1000, 5000
"""


async def _before_rebuild(store: Store) -> tuple[str, ...]:
    """Rows in an old store with all migrations up to the one whose statements these are."""
    await store.command(REQUEST)
    await store.command(SAMPLE)
    *_, rebuild = earlier = load_migrations()[OLD:9]
    assert rebuild.name == "0009_by_time.sql"
    for migration in earlier[:-1]:
        for statement in migration.statements:
            await store.command(statement)
    return rebuild.statements


async def _numbers(store: Store) -> tuple[int, int]:
    (requests,), (samples,) = [
        *await store.rows("SELECT count() FROM requests FINAL"),
        *await store.rows("SELECT count() FROM worker_samples FINAL"),
    ]
    return int(requests), int(samples)


async def test_a_rebuild_that_is_cut_short_loses_nothing(old_store: Store) -> None:
    """Another process goes on storing rows meanwhile."""
    statements = await _before_rebuild(old_store)
    num_late = 0
    for num_done, last in enumerate(statements, start=1):
        if not last.startswith(("INSERT", "EXCHANGE")):
            continue
        for statement in statements[:num_done]:
            await old_store.command(statement)
            num_late += 1
            await old_store.command(LATE_REQUEST, {"number": num_late})
            await old_store.command(LATE_SAMPLE, {"number": num_late})
    await migrate(old_store)
    assert await _numbers(old_store) == (1000 + num_late, 300 + num_late)
    assert await old_store.rows(KEYS) == REBUILT


async def test_two_that_rebuild_at_once_lose_nothing(old_store: Store) -> None:
    """Wherever the second one begins; one that fails is started again."""
    statements = await _before_rebuild(old_store)
    num_of_requests = next(n for n, each in enumerate(statements) if "worker_samples" in each)
    for num_done in range(3, num_of_requests):
        for num_together in (5, 9):
            for some in (
                statements[:num_done],
                statements[:num_together],
                statements[num_done:num_of_requests],
                statements[num_together:num_of_requests],
            ):
                with contextlib.suppress(StoreUnavailableError):
                    for statement in some:
                        await old_store.command(statement)
            assert await _numbers(old_store) == (1000, 300), (num_done, num_together)
    await migrate(old_store)
    assert await old_store.rows(KEYS) == REBUILT


async def test_a_sink_that_knows_nothing_of_pulls_goes_on(old_store: Store) -> None:
    """As version 0018 has it, with rows from before and after the migration."""
    for migration in load_migrations()[OLD:18]:
        for statement in migration.statements:
            await old_store.command(statement)
    life = "[(1, 'w-9', now64(6), now64(6), 7)]"
    write = (
        "INSERT INTO requests (request_id, tenant, status, lives, received_at, done_at, "
        f"outbox_sequence) SELECT {{id:String}}, 'acme', 'done', {life}, now64(6), now64(6), 1"
    )
    await old_store.command(write, {"id": "old"})
    await old_store.command(SAMPLE)
    await migrate(old_store)
    await old_store.command(write, {"id": "late"})
    assert await old_store.rows(
        "SELECT request_id, lives.device_us, pulled_tokens, kv_source, pulls "
        "FROM requests_once ORDER BY request_id"
    ) == [("late", [7], 0, "", []), ("old", [7], 0, "", [])]
    assert await old_store.rows(
        "SELECT DISTINCT role, pulled_tokens, served_tokens FROM worker_samples_once"
    ) == [("both", 0, 0)]


async def test_a_sink_that_knows_nothing_of_groups_writes_rows_of_one_device(
    old_store: Store,
) -> None:
    """As version 0019 has it, with rows from before and after the migration."""
    for migration in load_migrations()[OLD:19]:
        for statement in migration.statements:
            await old_store.command(statement)
    write = (
        "INSERT INTO requests (request_id, tenant, status, received_at, done_at, "
        "outbox_sequence) SELECT {id:String}, 'acme', 'done', now64(6), now64(6), 1"
    )
    await old_store.command(write, {"id": "old"})
    await old_store.command(SAMPLE)
    await migrate(old_store)
    await old_store.command(write, {"id": "late"})
    assert await old_store.rows(
        "SELECT request_id, num_devices FROM requests_once ORDER BY request_id"
    ) == [("late", 1), ("old", 1)]
    assert await old_store.rows("SELECT DISTINCT num_devices FROM worker_samples_once") == [(1,)]


async def test_rows_of_the_migration_before_read_in_ms_with_keys_and_joules_unknown(
    store_path: Path,
) -> None:
    """As version 0013 left them; a sink of that version goes on writing meanwhile."""
    opened = await Store.open(ClickHouseConfig(path=str(store_path), database="older"))
    try:
        for migration in load_migrations()[:13]:
            for statement in migration.statements:
                await opened.command(statement)
        write = (
            "INSERT INTO requests (request_id, tenant, status, tpot_us, completion_tokens, "
            "received_at, done_at, outbox_sequence) "
            "SELECT {id:String}, 'acme', 'done', 1500, 3, now64(6), now64(6), 1"
        )
        await opened.command(write, {"id": "old"})
        await migrate(opened)
        await opened.command(write, {"id": "late"})
        for migration in load_migrations()[13:]:
            for statement in migration.statements:
                await opened.command(statement)
        assert await opened.rows(
            "SELECT request_id, tpot_ms, key_id, metadata, energy_j FROM requests_once "
            "ORDER BY request_id"
        ) == [("late", 1.5, "", {}, None), ("old", 1.5, "", {}, None)]
        await Rollups(opened, SystemClock(), 1.0).reconcile()
        assert await opened.rows(
            "SELECT key_id, sum(requests), sum(energy_requests), "
            "quantilesTDigestMerge(0.5, 0.9, 0.95, 0.99)(tpot_ms)[1] "
            "FROM usage_by_minute_once GROUP BY key_id"
        ) == [("", 2, 0, 1.5)]
    finally:
        await opened.command("DROP DATABASE older")
        await opened.close()
