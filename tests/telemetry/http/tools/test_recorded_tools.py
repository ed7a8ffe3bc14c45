"""Replay the recorded requests of analysts' tools in Python (``recorded.jsonl``).

The tests beside it run the tools themselves. ``recorded.jsonl`` has a line for each statement that
they sent to a store with the rows of ``books``, without ids and credentials.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http.interface import HttpInterface
from millrace.telemetry.store.reading import StreamingReader
from millrace.telemetry.store.store import Store
from tests.telemetry.books import FIRST_S, fill

CONFIG = ClickHouseConfig(username="reader", password="opens the door")
_LINES = (Path(__file__).parent / "recorded.jsonl").read_text(encoding="utf-8").splitlines()
_RECORDED: list[dict[str, Any]] = [json.loads(line) for line in _LINES]
_TOOLS = sorted({one["tool"] for one in _RECORDED})
_FIRST = datetime.fromtimestamp(FIRST_S, UTC).replace(tzinfo=None)


@pytest_asyncio.fixture
async def client(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    await fill(store)
    assert isinstance(store.reader, StreamingReader)
    transport = httpx.ASGITransport(HttpInterface(store.reader, CONFIG, store.views))
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://clickhouse",
        auth=(CONFIG.username, CONFIG.password),
    ) as made:
        yield made


async def send(client: httpx.AsyncClient, one: dict[str, Any]) -> httpx.Response:
    body = one["body"].encode() if "body" in one else base64.b64decode(one["body_base64"])
    return await client.request(
        one["method"],
        "/",
        params=one["arguments"],
        headers=one.get("headers", {}),
        content=body,
    )


def of(tool: str, *words: str) -> list[dict[str, Any]]:
    """Return a tool's requests whose statement or body has all the words."""
    return [
        one
        for one in _RECORDED
        if one["tool"] == tool
        and all(word in one["arguments"].get("query", "") + one.get("body", "") for word in words)
    ]


@pytest.mark.parametrize("tool", _TOOLS)
async def test_a_tool_s_requests_are_answered(
    tool: str, client: httpx.AsyncClient, store: Store
) -> None:
    for one in of(tool):
        answer = await send(client, one)
        assert answer.status_code == 200, (one, answer.text)
        assert "x-clickhouse-exception-code" not in answer.headers, one
    left = await store.rows("SELECT name FROM system.tables WHERE database = 'analysts'")
    for (name,) in left:
        await store.command(f"DROP VIEW analysts.{name}")
    assert bool(left) == (tool == "dbt")


async def test_clickhouse_sqlalchemy_reads_the_times(client: httpx.AsyncClient) -> None:
    (hours,) = of("sqlalchemy", "toDateTime64(toStartOfHour(")
    answer = await send(client, hours)
    second_day = _FIRST + timedelta(days=1)
    assert answer.text.splitlines() == [
        "hour\tn",
        "DateTime64(0, \\'UTC\\')\tUInt64",
        f"{_FIRST:%Y-%m-%d %H:%M:%S}\t5",
        f"{second_day:%Y-%m-%d %H:%M:%S}\t1",
    ]
    (latest,) = of("sqlalchemy", "max(done_at)")
    last = (await send(client, latest)).text.splitlines()[-1]
    assert datetime.strptime(last, "%Y-%m-%d %H:%M:%S.%f") == second_day + timedelta(seconds=5)  # noqa: DTZ007


async def test_dbt_s_view_is_there_with_its_comments(
    client: httpx.AsyncClient, store: Store
) -> None:
    for one in of("dbt"):
        await send(client, one)
    assert await store.rows("SELECT sum(requests) FROM analysts.tenants") == [(6,)]
    comments = "SELECT comment FROM system.columns WHERE table = 'days' AND name = 'day'"
    assert await store.rows(comments) == [("The day in which the requests ended, in UTC.",)]
    for view in ("tenants", "days"):
        await store.command(f"DROP VIEW analysts.{view}")


async def test_a_memtable_of_ibis_is_joined(client: httpx.AsyncClient) -> None:
    """The memtable comes as Arrow, with the statement in the URL."""
    tables = [one for one in of("ibis", '"team"') if "body_base64" in one]
    assert tables
    for one in tables:
        query = one["arguments"]["query"].replace("FORMAT Native", "FORMAT CSV")
        answer = await send(client, {**one, "arguments": {**one["arguments"], "query": query}})
        assert sorted(answer.text.splitlines()) == ['"maps",2', '"search",4']


async def test_polars_gets_a_stream_of_arrow(client: httpx.AsyncClient) -> None:
    for one in of("polars", "FORMAT ArrowStream"):
        answer = await send(client, one)
        assert answer.headers["x-clickhouse-format"] == "ArrowStream"
        assert answer.content.startswith(b"\xff\xff\xff\xff")
