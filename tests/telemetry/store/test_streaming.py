"""Statements of users on the embedded engine: answers that stream, and their ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.telemetry.store import own_processes, reading_embedded
from millrace.telemetry.store.query_watch import RunningQuery
from millrace.telemetry.store.reading import Answer, QueryError, Question, ReadLimits
from millrace.telemetry.store.reading_embedded import EmbeddedReader
from millrace.telemetry.store.store import Store
from tests.support.waiting import eventually

_ENDLESS = "SELECT number FROM numbers(100000000000)"


@pytest.fixture
async def reader(store: Store, store_path: Path) -> AsyncIterator[EmbeddedReader]:
    made = EmbeddedReader(str(store_path), "millrace", ReadLimits())
    yield made
    async with asyncio.timeout(10):
        await made.close()


async def whole(reader: EmbeddedReader, sql: str, **more: object) -> bytes:
    async with reader.stream(Question(sql=sql, **more)) as answer:  # type: ignore[arg-type]
        return await drained(answer)


async def drained(answer: Answer) -> bytes:
    return b"".join([chunk async for chunk in answer])


async def nothing_runs(reader: EmbeddedReader) -> None:
    ask = "SELECT count() FROM system.processes WHERE query LIKE '%numbers(100000000000)%'"

    async def is_over() -> bool:
        return await whole(reader, f"{ask} AND query NOT LIKE '%processes%'") == b"0\n"

    await eventually(is_over, what="the query's end")


async def test_an_answer_streams_as_one_document(reader: EmbeddedReader) -> None:
    sql = "SELECT number, toString(number) AS text FROM numbers(300000)"
    async with reader.stream(Question(sql=f"{sql} FORMAT JSON", output_format="CSV")) as answer:
        assert answer.output_format == "JSON"
        chunks = [chunk async for chunk in answer]
    assert len(chunks) > 10
    assert len(json.loads(b"".join(chunks))["data"]) == 300_000
    lines = (await whole(reader, sql, output_format="CSVWithNames")).splitlines()
    assert (lines[0], lines[-1], len(lines)) == (b'"number","text"', b'299999,"299999"', 300_001)


async def test_an_error_is_raised_before_a_short_answer_and_behind_a_long_one(
    reader: EmbeddedReader,
) -> None:
    with pytest.raises(QueryError) as raised:
        async with reader.stream(Question(sql="SELECT throwIf(number = 9) FROM numbers(10)")):
            pytest.fail("there is no answer")
    assert raised.value.number == 395
    sql = "SELECT throwIf(number = 3000000) FROM numbers(10000000)"
    async with reader.stream(Question(sql=sql)) as answer:
        with pytest.raises(QueryError) as raised:
            await drained(answer)
    assert raised.value.number == 395
    assert await whole(reader, "SELECT 1") == b"1\n"


async def test_a_query_ends_when_its_reader_leaves(reader: EmbeddedReader) -> None:
    async with reader.stream(Question(sql=_ENDLESS)) as answer:
        assert (await anext(aiter(answer))).startswith(b"0\n1\n")
    await nothing_runs(reader)

    async def ask() -> None:
        await whole(reader, f"SELECT sum(number) FROM ({_ENDLESS})")

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.wait([asking])
    await nothing_runs(reader)


async def test_a_query_is_seen_and_killed_by_its_id(reader: EmbeddedReader) -> None:
    sql = f"SELECT sum(number) FROM ({_ENDLESS})"
    asking = asyncio.create_task(whole(reader, sql, query_id="it's mine", user="analyst"))
    ask = "SELECT query FROM system.processes WHERE query_id = 'it\\'s mine'"

    async def is_seen() -> bool:
        seen = await whole(reader, ask)
        return seen.startswith(f"{sql} FORMAT".encode())

    await eventually(is_seen)
    with pytest.raises(QueryError, match="already running"):
        await whole(reader, "SELECT 1", query_id="it's mine")
    kill = "KILL QUERY WHERE query_id = 'it\\'s mine'"
    assert (await whole(reader, f"{kill} TEST")).startswith(b"waiting\tit\\'s mine\t")
    assert not asking.done()
    assert (await whole(reader, f"{kill} SYNC", user="analyst")).startswith(b"waiting\t")
    with pytest.raises(QueryError) as raised:
        await asking
    assert raised.value.number == 394
    await nothing_runs(reader)


async def running(reader: EmbeddedReader, *query_ids: str) -> None:
    """Wait until queries with these ids, and no others, run."""
    shown = "SELECT query_id FROM system.processes WHERE query LIKE '%numbers(100000000000)%' "
    shown += "AND query NOT LIKE '%processes%' ORDER BY query_id FORMAT JSONCompactColumns"

    async def they_run() -> bool:
        return bool(json.loads(await whole(reader, shown)) == [sorted(query_ids)])

    await eventually(they_run, what=f"the queries {query_ids}")


async def test_each_owner_has_ids_of_its_own(reader: EmbeddedReader) -> None:
    """A query is not refused, ended or answered because of another user's query with its id."""
    sql = f"SELECT sum(number) FROM ({_ENDLESS})"
    full = asyncio.create_task(whole(reader, sql, query_id="it", owner="full"))
    analyst = {"user": "analyst", "owner": "analyst"}
    assert await whole(reader, "SELECT 1", query_id="it", **analyst) == b"1\n"
    # The user of all tables, as an analyst for once: the query is its own.
    narrowed = asyncio.create_task(
        whole(reader, sql, query_id="narrowed", user="analyst", owner="full")
    )
    await running(reader, "it", "narrowed")
    replacing = {"replace_running_query": "1"}
    theirs = asyncio.create_task(whole(reader, sql, query_id="it", settings=replacing, **analyst))
    # As rows of the engine's answer, their ids would hold the id of another query.
    lines = ["x\nit", "x\n1 it", "x\u2028it"]
    more = [asyncio.create_task(whole(reader, sql, query_id=each, **analyst)) for each in lines]
    await running(reader, "it", "it", "narrowed", *lines)
    assert (await whole(reader, "KILL QUERY WHERE 1", **analyst)).count(b"waiting") == 4
    for killed in (theirs, *more):
        with pytest.raises(QueryError) as raised:
            await killed
        assert raised.value.number == 394
    await running(reader, "it", "narrowed")
    kill = "KILL QUERY WHERE query_id IN ('it', 'narrowed')"
    narrowed_too = {"user": "analyst", "owner": "full"}
    assert (await whole(reader, f"{kill} TEST", **narrowed_too)).count(b"waiting") == 2
    assert (await whole(reader, kill, owner="full")).count(b"waiting") == 2
    await asyncio.wait([full, narrowed])
    await nothing_runs(reader)


async def test_a_query_replaces_its_owner_s_query_of_the_same_id(reader: EmbeddedReader) -> None:
    replacing = {"replace_running_query": "1"}
    async with reader.stream(Question(sql=_ENDLESS, query_id="it")) as answer:
        # The first is in the middle of an answer that is not read.
        chunks = aiter(answer)
        await anext(chunks)
        with pytest.raises(QueryError) as raised:
            await whole(reader, "SELECT 1", query_id="it")
        assert raised.value.number == 216
        sql = f"SELECT sum(number) FROM ({_ENDLESS})"
        asking = [
            asyncio.create_task(whole(reader, each, query_id="it", settings=replacing))
            for each in (sql, sql, "SELECT 1")
        ]
        assert await asking[2] == b"1\n"
        for replaced in asking[:2]:
            with pytest.raises(QueryError) as raised:
                await replaced
            assert raised.value.number == 394
        with pytest.raises(QueryError) as raised:
            async for _ in chunks:
                pass
        assert raised.value.number == 394
    await nothing_runs(reader)


async def test_a_query_that_waits_for_its_turn_is_replaced(store_path: Path, store: Store) -> None:
    limits = ReadLimits(max_queries=1)
    reader = EmbeddedReader(str(store_path), "millrace", limits)
    async with reader.stream(Question(sql=_ENDLESS)) as first:
        await anext(aiter(first))
        waiting = asyncio.create_task(whole(reader, "SELECT 1", query_id="it"))
        await asyncio.sleep(0)
        replacing = {"replace_running_query": "true"}
        late = [
            asyncio.create_task(whole(reader, "SELECT 2", query_id="it", settings=replacing))
            for _ in range(2)
        ]
        with pytest.raises(QueryError) as raised:
            await waiting
        assert raised.value.number == 394
    outcomes = await asyncio.gather(*late, return_exceptions=True)
    assert b"2\n" in outcomes
    assert await whole(reader, "SELECT 3", query_id="it") == b"3\n"
    await reader.close()


async def test_an_end_that_comes_late_is_not_that_of_the_next_query_of_the_id(
    reader: EmbeddedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks again with its id as the watch ends its query, which has just ended."""
    tags: list[str] = []

    def tag_of(query_id: str) -> str:
        tags.append(made(query_id))
        return tags[-1]

    made = own_processes.new_tag
    monkeypatch.setattr(own_processes, "new_tag", tag_of)
    await whole(reader, "SELECT 1", query_id="it")
    reader._watch.bound([RunningQuery(tags[0], 2**40, 1.0, ())])
    assert await whole(reader, "SELECT 1", query_id="it") == b"1\n"
    assert not reader._watch._ended


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 SETTINGS query_cache_tag = 'other'",
        "SELECT * FROM (SELECT 1 SETTINGS max_threads = 1, `query_cache_tag`='other')",
    ],
)
async def test_a_statement_cannot_bear_the_id_of_another(reader: EmbeddedReader, sql: str) -> None:
    with pytest.raises(QueryError, match="holds the id of the query") as raised:
        await whole(reader, sql)
    assert raised.value.number == 164


async def test_a_statement_without_a_thread_gives_its_place_back(
    reader: EmbeddedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(reading_embedded, "_in_new_thread", refuse)
        for _ in range(40):
            with pytest.raises(RuntimeError, match="new thread"):
                await whole(reader, "SELECT 1", query_id="mine")
    assert await whole(reader, "SELECT 1", query_id="mine") == b"1\n"


async def test_an_analyst_reads_all_but_the_transcripts(reader: EmbeddedReader) -> None:
    for sql in (
        "SELECT * FROM transcripts",
        "SELECT * FROM transcripts_once",
        "DESCRIBE TABLE transcripts",
        "SHOW CREATE TABLE transcripts",
        "EXPLAIN SELECT * FROM transcripts",
    ):
        await whole(reader, sql)
        with pytest.raises(QueryError) as raised:
            await whole(reader, sql, user="analyst")
        assert raised.value.number == 497, sql
    assert await whole(reader, "SELECT count() FROM requests", user="analyst") == b"0\n"
    tables = await whole(reader, "SHOW TABLES")
    assert b"\ntranscripts\ntranscripts_once\n" in tables
    seen = tables.replace(b"transcripts\ntranscripts_once\n", b"")
    assert await whole(reader, "SHOW TABLES", user="analyst") == seen
    sql = "SELECT count() FROM merge('millrace', '^transcripts')"
    with pytest.raises(QueryError, match="no tables"):
        await whole(reader, sql, user="analyst")


async def test_settings_are_of_one_statement_and_within_bounds(reader: EmbeddedReader) -> None:
    sql = "SELECT getSetting('max_threads'), getSetting('max_memory_usage'), 1 AS n FORMAT TSV"
    limit = 512 * 1024 * 1024
    for given, seen in (
        ({}, f"2\t{limit}\t1\n"),
        ({"max_threads": "1", "max_memory_usage": "1000000000000"}, f"1\t{limit}\t1\n"),
        ({"max_memory_usage": "0"}, f"2\t{limit}\t1\n"),
        ({"max_memory_usage": "300000000"}, "2\t300000000\t1\n"),
        ({}, f"2\t{limit}\t1\n"),
    ):
        assert await whole(reader, sql, settings=given) == seen.encode()
    for clause in (
        "max_memory_usage = 0",
        "max_memory_usage = 1000000000000",
        "max_execution_time = 0",
        "readonly = 0",
        "dialect = 'prql'",
        "output_format_schema = '/x'",
    ):
        with pytest.raises(QueryError):
            await whole(reader, f"SELECT 1 SETTINGS {clause}")
    with pytest.raises(QueryError) as raised:
        await whole(reader, "SELECT 1", settings={"no_such": "1"})
    assert (raised.value.number, "no_such" in raised.value.message) == (115, True)


_STATEMENTS = (
    "SELECT 1",
    "SELECT 'a' AS x, number FROM numbers(3) FORMAT JSON SETTINGS output_format_write_statistics=0",
    "SELECT number FROM numbers(400000)",
    "SELECT number, toString(number) FROM numbers(200000) FORMAT Native",
    "SELECT number FROM numbers(1000) FORMAT Parquet",
    "SELECT number AS n FROM numbers(10) FORMAT ArrowStream",
    "SELECT count() FROM requests",
    "SHOW TABLES",
    "SELECT 1 WHERE 0 FORMAT CSVWithNames",
    "SELECT getSetting('max_threads') SETTINGS max_threads = 1",
    "SELECT getSetting('max_threads')",
    "SELECT throwIf(number = 300000) FROM numbers(1000000) FORMAT CSV",
    "SELECT throwIf(number = 3000000) FROM numbers(10000000) FORMAT JSONEachRow",
    "SELECT throwIf(1)",
    "SELECT nothing FROM requests",
    "SELEC 1",
    "SELECT 1 FORMAT Nope",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "DROP TABLE requests",
    "SELECT groupArray(repeat('x', 1000000)) FROM numbers(2000)",
    "SELECT sleep(0.02)",
    f"{_ENDLESS} LIMIT 2000000",
)


async def test_an_answer_never_holds_bytes_of_another_statement(reader: EmbeddedReader) -> None:
    """An answer is that of its statement alone, after and beside any others.

    The earlier statement of each pair ended, failed or was abandoned.
    """

    async def outcome(sql: str) -> object:
        try:
            return await whole(reader, sql)
        except QueryError as error:
            return error.number

    async def leave(sql: str) -> None:
        try:
            async with reader.stream(Question(sql=sql)) as answer:
                await anext(aiter(answer))
        except QueryError:
            pass

    alone = {sql: await outcome(sql) for sql in _STATEMENTS}
    rows = [each for each in alone.values() if isinstance(each, bytes)]
    assert len(rows) > 10
    chosen = random.Random(50)

    async def pairs() -> None:
        for _ in range(20):
            first, second = chosen.choices(_STATEMENTS, k=2)
            if chosen.random() < 0.5:
                await leave(first)
            else:
                await outcome(first)
            assert await outcome(second) == alone[second], (first, second)

    await asyncio.gather(*(pairs() for _ in range(3)))
