"""Migrations, the ledger, and rows that a table refuses, on the real engine."""

from __future__ import annotations

import itertools
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clickhouse_connect.driver import options
from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError, MalformedMessageError
from millrace.schemas.records import RECORD_VERSION, Attempt, TranscriptRecord
from millrace.telemetry.store.migrate import SCHEMA, MigrationError, load_migrations, migrate
from millrace.telemetry.store.outbox_ledger import OutboxLedger, merge
from millrace.telemetry.store.store import RejectedRowsError, Store, StoreUnavailableError
from millrace.telemetry.store.tables import (
    DELIVERIES,
    GENERATION_ROWS,
    MERGED_COLUMNS,
    REQUESTS,
    TRANSCRIPTS,
    WORKER_SAMPLES,
    Table,
    check,
)
from tests.support.servers import free_port
from tests.telemetry.records import delivery_record, request_record, worker_sample

ALL_TABLES = (REQUESTS, GENERATION_ROWS, DELIVERIES, WORKER_SAMPLES, TRANSCRIPTS)


async def test_migrations_run_once_and_in_order(store: Store) -> None:
    numbers = [migration.number for migration in load_migrations()]
    assert numbers == list(range(SCHEMA, SCHEMA + len(numbers)))
    assert await migrate(store) == []
    applied = await store.rows("SELECT number FROM schema_migrations FINAL ORDER BY number")
    assert [row[0] for row in applied] == numbers


async def test_each_statement_of_a_migration_may_run_again(store: Store) -> None:
    for migration in load_migrations():
        for statement in migration.statements:
            await store.command(statement)


async def test_a_database_from_the_future_is_refused(store: Store) -> None:
    await store.command("INSERT INTO schema_migrations (number, name) VALUES (9999, 'later')")
    with pytest.raises(MigrationError, match="9999"):
        await migrate(store)
    await store.command("DELETE FROM schema_migrations WHERE number = 9999")


async def test_the_same_request_twice_is_one_row_for_everybody_who_asks(store: Store) -> None:
    record = request_record(1)
    later = msgspec.structs.replace(record, epoch=2, done_ns=record.done_ns + 90 * 10**9)
    await store.insert(REQUESTS, REQUESTS.to_columns([record], [1]), "one")
    await store.insert(REQUESTS, REQUESTS.to_columns([later], [2]), "two")
    assert await store.rows("SELECT epoch FROM requests FINAL") == [(2,)]
    assert await store.rows("SELECT epoch FROM requests_once") == [(2,)]
    assert await store.reader.read("SELECT epoch FROM requests", {}, "TSV") == b"2\n"
    await store.command("OPTIMIZE TABLE requests FINAL")
    assert await store.rows("SELECT epoch FROM requests") == [(2,)]


async def test_a_batch_inserted_again_by_its_token_is_taken_once(store: Store) -> None:
    columns = REQUESTS.to_columns([request_record(1)], [1])
    for _ in range(3):
        await store.insert(REQUESTS, columns, "same")
    assert await store.rows("SELECT count() FROM requests") == [(1,)]


async def test_a_row_without_times_stays(store: Store) -> None:
    bare = msgspec.structs.replace(
        request_record(1), received_ns=0, started_ns=0, first_token_ns=0, done_ns=0
    )
    await store.insert(REQUESTS, REQUESTS.to_columns([bare], [1]), "bare")
    await store.command("OPTIMIZE TABLE requests FINAL")
    assert await store.rows("SELECT count() FROM requests") == [(1,)]


async def test_values_that_do_not_fit_are_refused_whole(store: Store) -> None:
    columns = REQUESTS.to_columns([request_record(1), request_record(2)], [1, 2])
    columns[REQUESTS.column_names.index("record_version")][1] = 70_000
    with pytest.raises(RejectedRowsError):
        await store.insert(REQUESTS, columns, "bad")
    assert await store.rows("SELECT count() FROM requests") == [(0,)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"completion_tokens": 1 << 32}, "completion_tokens"),
        ({"received_ns": 1 << 64}, "received_ns"),
        ({"ttft_ms": float("nan")}, "ttft_ms"),
        ({"total_ms": float("inf")}, "total_ms"),
        ({"cost": Decimal("NaN")}, "cost"),
        ({"cost": Decimal("1e30")}, "cost"),
        ({"cost": Decimal("1e15")}, "cost"),
        ({"device_cost": Decimal("Infinity")}, "device_cost"),
        ({"device_us": (1 << 53) + 1}, "device_us"),
        ({"done_ns": (1 << 32) * 10**9}, "done_ns"),
        ({"attempts": (Attempt(epoch=-1, worker_id="w"),)}, "attempts.epoch"),
        ({"attempts": (Attempt(epoch=1, worker_id="w", ended_ns=1 << 63),)}, "attempts.ended_ns"),
        (
            {"attempts": (Attempt(epoch=1, worker_id="w", pulled_tokens=-1),)},
            "attempts.pulled_tokens",
        ),
        ({"pulled_tokens": 1 << 32}, "pulled_tokens"),
        ({"version": 70_000}, "version"),
        ({"request_id": ""}, "id"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(MalformedMessageError, match=field):
        check(msgspec.structs.replace(request_record(1), **change))


async def test_the_largest_values_that_pass_can_be_stored(store: Store) -> None:
    attempts = (Attempt(epoch=(1 << 32) - 1, worker_id="w", started_ns=1, device_us=1 << 53),)
    largest = msgspec.structs.replace(
        request_record(1),
        prompt_tokens=(1 << 32) - 1,
        cost=Decimal("999999999999999.999999999999"),
        device_us=1 << 53,
        device_cost=Decimal("-999999999999999.9999999999999"),
        dispatched_ns=((1 << 32) - 1) * 10**9,
        attempts=attempts,
        ttft_ms=1e299,
    )
    check(largest)
    await store.insert(REQUESTS, REQUESTS.to_columns([largest], [1]), "largest")
    rows = await store.rows("SELECT cost, device_us, lives.device_us, lives.worker FROM requests")
    assert rows == [(largest.cost, 1 << 53, [1 << 53], ["w"])]


async def test_a_row_says_what_each_attempt_pulled_and_from_whom(store: Store) -> None:
    attempts = (
        Attempt(epoch=1, worker_id="w-1"),
        Attempt(epoch=2, worker_id="w-2", pulled_tokens=480, kv_source="w-1"),
    )
    record = msgspec.structs.replace(
        request_record(1), epoch=4, attempts=attempts, pulled_tokens=1_984, kv_source="w-2"
    )
    alone = request_record(2)
    ended = msgspec.structs.replace(
        request_record(3), epoch=3, attempts=attempts, pulled_tokens=480, kv_source="w-1"
    )
    records = [record, alone, ended]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, [1, 2, 3]), "pulls")
    rows = await store.rows(
        "SELECT pulled_tokens, kv_source, pulls FROM requests_once ORDER BY request_id"
    )
    earlier = {"epoch": 2, "kv_source": "w-1", "pulled_tokens": 480}
    own = {"epoch": 4, "kv_source": "w-2", "pulled_tokens": 1_504}
    assert rows == [(1_984, "w-2", [earlier, own]), (0, "", []), (480, "w-1", [earlier])]
    tokens_by_source = (
        "SELECT pull.kv_source, sum(pull.pulled_tokens) FROM requests_once "
        "ARRAY JOIN pulls AS pull GROUP BY pull.kv_source ORDER BY pull.kv_source"
    )
    assert await store.rows(tokens_by_source) == [("w-1", 960), ("w-2", 1_504)]


async def test_transcripts_leave_after_thirty_days(store: Store) -> None:
    day_ns = 86_400 * 10**9
    now_ns = request_record(1).done_ns
    ends = {"old": now_ns - 31 * day_ns, "young": now_ns - 29 * day_ns, "timeless": 0}
    ends["to come"] = now_ns + 300 * day_ns
    records = [
        TranscriptRecord(
            request_id=name,
            tenant="acme",
            model="demo",
            prompt="p",
            completion="c",
            done_ns=done_ns,
        )
        for name, done_ns in ends.items()
    ]
    await store.insert(TRANSCRIPTS, TRANSCRIPTS.to_columns(records, range(1, 5)), "all")
    await store.command("OPTIMIZE TABLE transcripts FINAL")
    rows = await store.rows("SELECT request_id FROM transcripts ORDER BY request_id")
    assert rows == [("timeless",), ("to come",), ("young",)]
    expiry = await store.rows(
        "SELECT delete_ttl_info_max < now() + toIntervalDay(31) FROM system.parts "
        "WHERE table = 'transcripts' AND active AND database = currentDatabase()"
    )
    assert expiry == [(True,)]


def test_good_records_pass() -> None:
    for record in (request_record(1), delivery_record(1), worker_sample(1)):
        check(record)
        assert record.version == RECORD_VERSION


async def test_the_mark_is_where_the_first_gap_is(store: Store) -> None:
    ledger = OutboxLedger(store)
    assert await ledger.is_empty()
    assert await ledger.mark() == 0
    await ledger.add([2, 3])
    assert await ledger.mark() == 0, "the first is missing"
    await ledger.add([1])
    assert await ledger.mark() == 3
    await ledger.add([5, 6, 9])
    assert await ledger.mark() == 3
    await ledger.add([4, 4, 3])
    assert await ledger.mark() == 6
    await ledger.void(7, 8)
    assert await ledger.mark() == 9


async def test_compaction_keeps_the_mark_and_what_is_above(store: Store) -> None:
    ledger = OutboxLedger(store)
    for sequence in (1, 2, 3, 5, 8):
        await ledger.add([sequence])
    await ledger.compact()
    assert await store.rows("SELECT * FROM outbox_ledger FINAL ORDER BY 1") == [
        (1, 3),
        (5, 5),
        (8, 8),
    ]
    await ledger.add([4])
    await ledger.compact()
    assert await ledger.mark() == 5
    await ledger.clear()
    assert await ledger.is_empty()


@given(st.lists(st.integers(1, 60), max_size=60))
def test_merging_loses_and_invents_nothing(sequences: list[int]) -> None:
    merged = merge((sequence, sequence) for sequence in sequences)
    assert [n for first, last in merged for n in range(first, last + 1)] == sorted(set(sequences))
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(merged))


async def test_a_configuration_that_names_no_store_or_two_is_refused(tmp_path: Path) -> None:
    for config in (ClickHouseConfig(), ClickHouseConfig(url="http://x", path=str(tmp_path))):
        with pytest.raises(ConfigError, match="exactly one"):
            await Store.open(config)
    with pytest.raises(ConfigError, match="http://host:8123"):
        await Store.open(ClickHouseConfig(url="tcp://x:9000"))


async def test_a_server_that_is_away_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="cannot open"):
        await Store.open(ClickHouseConfig(url=f"http://127.0.0.1:{free_port()}"))


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.name)
async def test_the_sink_s_columns_are_the_table_s(store: Store, table: Table[Any]) -> None:
    rows = await store.rows(f"DESCRIBE TABLE {table.name}")
    there = {
        str(name): str(kind).replace("\n    ", " ").replace("( ", "(")
        for name, kind, default, *_ in rows
        if default != "ALIAS"
    }
    there.pop("stored_at", None)
    if table is REQUESTS:
        # What a request of one generation has the defaults of, and others are given.
        made = set(MERGED_COLUMNS) - set(table.column_names)
        assert made == {"batch_id", "num_generations", "is_whole"}
        there = {name: kind for name, kind in there.items() if name not in made}
    assert dict(zip(table.column_names, table.column_types, strict=True)) == there


async def test_rows_are_inserted_without_pandas(store: Store) -> None:
    """An installed pandas would be imported for a check of each batch."""
    await OutboxLedger(store).add([1])
    assert vars(options)["pd"] is None
