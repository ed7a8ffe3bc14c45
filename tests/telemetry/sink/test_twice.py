"""Rows inserted twice and never merged: every query counts each once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from millrace.schemas.records import TranscriptRecord
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import DELIVERIES, REQUESTS, TRANSCRIPTS, WORKER_SAMPLES, Table
from tests.telemetry.records import NOW_NS, delivery_record, request_record, worker_sample

NUM_ROWS = 3_000
SECOND_NS = 10**9
ALL_TABLES = (REQUESTS, DELIVERIES, WORKER_SAMPLES, TRANSCRIPTS)


def transcript(number: int) -> TranscriptRecord:
    return TranscriptRecord(
        request_id=f"req-{number}",
        tenant="acme",
        model="demo",
        prompt="What is TTFT?",
        completion="Time to first token.",
        done_ns=NOW_NS,
    )


def rows_of(table: Table[Any]) -> list[Any]:
    """An hour of rows."""
    ends = [NOW_NS - n * 3_600 * SECOND_NS // NUM_ROWS for n in range(NUM_ROWS)]
    made: dict[str, Any] = {
        REQUESTS.name: lambda n: request_record(n, done_ns=ends[n]),
        DELIVERIES.name: lambda n: delivery_record(n, done_ns=ends[n]),
        WORKER_SAMPLES.name: lambda n: worker_sample(n, sampled_ns=ends[n]),
        TRANSCRIPTS.name: transcript,
    }
    return [made[table.name](number) for number in range(NUM_ROWS)]


SUMS = {
    REQUESTS.name: "count(), sum(prompt_tokens), sum(cost), sum(device_us), max(done_at)",
    DELIVERIES.name: "count(), sum(tokens_delivered), sum(first_byte_ms), max(done_at)",
    WORKER_SAMPLES.name: "count(), sum(decode_tokens), sum(num_steps), max(sampled_at)",
    TRANSCRIPTS.name: "count(), sum(length(prompt)), max(done_at)",
}


@pytest.fixture
async def unmerged(store: Store) -> AsyncIterator[Store]:
    await store.command("SYSTEM STOP MERGES")
    yield store
    await store.command("SYSTEM START MERGES")


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.name)
async def test_sums_are_right_before_the_merge(unmerged: Store, table: Table[Any]) -> None:
    rows = rows_of(table)
    columns = table.to_columns(rows, range(1, NUM_ROWS + 1))
    sums = SUMS[table.name]
    await unmerged.insert(table, columns, "once")
    ((expected_count, *expected),) = await unmerged.rows(f"SELECT {sums} FROM {table.name}")
    assert expected_count == NUM_ROWS
    await unmerged.insert(table, columns, "twice")
    for source in (f"{table.name} FINAL", f"{table.name}_once"):
        assert await unmerged.rows(f"SELECT {sums} FROM {source}") == [(NUM_ROWS, *expected)]
    assert await unmerged.rows(f"SELECT count() FROM {table.name}") == [(2 * NUM_ROWS,)]
    # Who reads through the reader need not say FINAL.
    counted = await unmerged.reader.read(f"SELECT count() FROM {table.name}", {}, "TSV")
    assert counted == f"{NUM_ROWS}\n".encode()


async def test_a_later_record_takes_the_place_of_one_in_another_range(unmerged: Store) -> None:
    """Also where an index leaves out the part of the table that has the later one."""
    rows = [request_record(n, done_ns=NOW_NS - n * SECOND_NS) for n in range(20_000)]
    await unmerged.insert(REQUESTS, REQUESTS.to_columns(rows, range(1, 20_001)), "all")
    first = rows[15_000]
    later = msgspec.structs.replace(first, done_ns=NOW_NS)
    await unmerged.insert(REQUESTS, REQUESTS.to_columns([later], [20_001]), "later")
    found = await unmerged.rows(
        "SELECT count() FROM requests FINAL "
        f"WHERE done_at >= fromUnixTimestamp64Micro({first.done_ns // 1000}, 'UTC') "
        f"AND done_at < fromUnixTimestamp64Micro({first.done_ns // 1000 + 1_000_000}, 'UTC')"
    )
    assert found == [(0,)]
    by_id = await unmerged.rows(
        f"SELECT count(), max(done_at) = fromUnixTimestamp64Micro({NOW_NS // 1000}, 'UTC') "
        f"FROM requests FINAL WHERE request_id = '{first.request_id}'"
    )
    assert by_id == [(1, True)]


async def test_a_range_reads_little_more_than_the_range(store: Store) -> None:
    rows = [request_record(n, done_ns=NOW_NS - n * SECOND_NS) for n in range(30_000)]
    await store.insert(REQUESTS, REQUESTS.to_columns(rows, range(1, 30_001)), "all")
    answer = await store.reader.read(
        "SELECT count() FROM requests FINAL "
        f"WHERE done_at > fromUnixTimestamp64Micro({NOW_NS // 1000 - 900_000_000}, 'UTC')",
        {},
        "JSON",
    )
    answered = msgspec.json.decode(answer)
    assert int(answered["data"][0]["count()"]) == 900
    assert answered["statistics"]["rows_read"] < 20_000
