"""Stores that earlier versions made with the migrations 1 to 20, which the schema stands for."""

from __future__ import annotations

import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.store.migrate import (
    APPLIED,
    SCHEMA,
    MigrationError,
    lacking,
    load_migrations,
    migrate,
)
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.views import Changes
from tests.cli.analytics.left_store import run_on_store
from tests.telemetry.records import request_record

# The folder of a store of the last version that had the migrations 1 to 20 one by one. It has the
# request req-0-00000001, its delivery and a sample, all without times, so that their rows stay.
_FOLDER = Path(__file__).with_name("store_of_20_migrations.tar.xz")
_STATEMENTS = """
SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase() ORDER BY name
"""
_LEDGER = "SELECT number FROM schema_migrations FINAL ORDER BY number"
_ROWS = "SELECT request_id FROM requests_once ORDER BY request_id"


async def test_a_store_of_the_earlier_migrations_opens(store: Store, tmp_path: Path) -> None:
    """The ledger identifies the store, which gets the tables of a new store and takes rows."""
    with tarfile.open(_FOLDER) as folder:
        folder.extractall(tmp_path, filter="data")
    later = load_migrations()[1:]
    asked = [("sql", statement, "--format", "json") for statement in (_LEDGER, _ROWS, _STATEMENTS)]
    dry_run, *answers = run_on_store(tmp_path, [], [("migrate", "--dry-run"), *asked])
    assert all(migration.name in dry_run.out for migration in later)
    assert "0020" not in dry_run.out
    ledger, rows, _ = (json.loads(answer.out) for answer in answers)
    assert [row["number"] for row in ledger] == list(range(1, SCHEMA + 1))
    assert [row["request_id"] for row in rows] == ["req-0-00000001"]

    answers = run_on_store(tmp_path, [request_record(2)], asked)
    ledger, rows, statements = (json.loads(answer.out) for answer in answers)
    numbers = [*range(1, SCHEMA + 1), *(migration.number for migration in later)]
    assert [row["number"] for row in ledger] == numbers
    assert [row["request_id"] for row in rows] == ["req-0-00000001", "req-0-00000002"]
    new_store = await store.rows(_STATEMENTS)
    assert [(row["name"], row["create_table_query"]) for row in statements] == new_store


@pytest.fixture
async def older(store_path: Path) -> AsyncIterator[Store]:
    """A database without tables."""
    opened = await Store.open(ClickHouseConfig(path=str(store_path), database="older"))
    yield opened
    await opened.command("DROP DATABASE older")
    await opened.close()


async def test_a_store_with_some_of_the_earlier_migrations_is_refused(older: Store) -> None:
    await migrate(older)
    await older.command("TRUNCATE TABLE schema_migrations")
    numbers = list(range(1, 13))
    await older.insert(APPLIED, (numbers, ["earlier"] * len(numbers)), "earlier")
    with pytest.raises(
        MigrationError, match=r"migration 12 .*the earlier version that has migration 20"
    ):
        await migrate(older)
    assert await older.rows(_LEDGER) == [(number,) for number in numbers]


async def test_a_schema_that_was_cut_short_is_made_whole(older: Store) -> None:
    schema, *_ = load_migrations()
    for statement in schema.statements[:5]:
        await older.command(statement)
    made = [migration.name for migration in load_migrations()]
    assert await migrate(older) == made + Changes.of({}, "older").summary()
    assert await migrate(older) == []


def test_a_store_of_the_schema_lacks_what_came_after_it() -> None:
    later = load_migrations()[1:]
    assert lacking({SCHEMA}, "millrace") == later
    assert lacking(set(range(1, SCHEMA + 1)), "millrace") == later


async def test_a_row_of_an_older_sink_has_defaults_for_the_columns_that_it_does_not_know(
    store: Store,
) -> None:
    """Older sinks write rows without pulls, groups, keys and joules while versions are mixed."""
    await store.command(
        "INSERT INTO requests (request_id, tenant, status, tpot_us, lives, received_at, done_at, "
        "outbox_sequence) SELECT 'old', 'acme', 'done', 1500, "
        "[(1, 'w-9', now64(6), now64(6), 7)], now64(6), now64(6), 1"
    )
    assert await store.rows(
        "SELECT tpot_ms, key_id, metadata, energy_j, device_us, device_cost, dispatched_at, "
        "lives.device_us, cost_method, resampled, pulled_tokens, kv_source, pulls, num_devices "
        "FROM requests_once"
    ) == [(1.5, "", {}, None, 0, 0, None, [7], "steps", False, 0, "", [], 1)]
    await store.command(
        "INSERT INTO worker_samples (worker, sampled_at, period_ms, outbox_sequence) "
        "SELECT 'w-9', now64(6), 1000, 2"
    )
    assert await store.rows(
        "SELECT busy_us, energy_j, role, pulled_tokens, served_tokens, num_devices "
        "FROM worker_samples_once"
    ) == [(0, None, "both", 0, 0, 1)]
