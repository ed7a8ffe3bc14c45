"""Database ``analysts``: permitted statements about views, and the tables that views may read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http.interface import HttpInterface
from millrace.telemetry.store import analyst_views
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS
from tests.telemetry.reaching_out import REACHING_OUT, SECRET
from tests.telemetry.records import request_record

CONFIG = ClickHouseConfig(
    username="reader", password="opens the door", analyst_password="opens it half"
)
_FULL = (CONFIG.username, CONFIG.password)
_ANALYST = (CONFIG.analyst_username, CONFIG.analyst_password)


class Endpoint:
    """The HTTP interface, as a full user and as an analyst."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(
        self, sql: str, *, database: str = "millrace", auth: tuple[str, str] = _ANALYST
    ) -> httpx.Response:
        parameters = {"database": database, "default_format": "JSONCompactColumns"}
        return await self._client.post("/", params=parameters, content=sql, auth=auth)

    async def column(self, sql: str, **options: Any) -> list[Any]:
        answer = await self.ask(sql, **options)
        assert answer.status_code == 200, answer.text
        columns = json.loads(answer.text)
        return list(columns[0]) if columns else []

    async def views(self) -> list[Any]:
        sql = "SELECT name FROM system.tables WHERE database = 'analysts' ORDER BY name"
        return await self.column(sql)

    async def change(self, sql: str, **options: Any) -> None:
        answer = await self.ask(sql, **options)
        assert (answer.status_code, answer.text) == (200, ""), answer.text

    async def refusal(self, sql: str, **options: Any) -> tuple[str, str]:
        answer = await self.ask(sql, **options)
        assert answer.status_code >= 400, answer.text
        return answer.headers["x-clickhouse-exception-code"], answer.text


@pytest_asyncio.fixture
async def endpoint(store: Store) -> AsyncIterator[Endpoint]:
    records = [request_record(number) for number in range(10)]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(10)), "a")
    transport = httpx.ASGITransport(HttpInterface(store.reader, CONFIG, store.views))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as client:
        made = Endpoint(client)
        yield made
        for name in await made.views():
            await made.change(f"DROP VIEW analysts.{name}")


async def test_a_view_is_made_read_replaced_renamed_exchanged_and_dropped(
    endpoint: Endpoint,
) -> None:
    await endpoint.change("CREATE DATABASE IF NOT EXISTS analysts")
    await endpoint.change("CREATE VIEW analysts.named AS SELECT format('{}!', 'a') AS a")
    assert await endpoint.column("SELECT a FROM analysts.named") == ["a!"]
    await endpoint.change("DROP VIEW analysts.named")
    await endpoint.change("CREATE VIEW analysts.ten AS SELECT count() AS n FROM requests_once")
    assert await endpoint.column("SELECT n FROM analysts.ten") == [10]
    await endpoint.change("CREATE OR REPLACE VIEW analysts.ten AS SELECT 20 AS n")
    await endpoint.change("create view if not exists analysts.ten as select 30 as n")
    await endpoint.change("/* dbt */ CREATE VIEW `analysts`.`thirty` AS (SELECT 30 AS n)")
    await endpoint.change("EXCHANGE TABLES analysts.ten AND analysts.thirty")
    assert await endpoint.column("SELECT n FROM analysts.ten") == [30]
    await endpoint.change("RENAME TABLE ten TO two, thirty TO three", database="analysts")
    assert await endpoint.views() == ["three", "two"]
    await endpoint.change(
        "ALTER TABLE analysts.two MODIFY COMMENT 'it''s', COMMENT COLUMN n 'how many'"
    )
    commented = "SELECT comment FROM system.columns WHERE database = 'analysts' AND table = 'two'"
    assert await endpoint.column(commented) == ["how many"]
    await endpoint.change("DROP VIEW IF EXISTS analysts.none")
    await endpoint.change("DROP TABLE analysts.two, analysts.three SYNC")
    assert await endpoint.views() == []


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE analysts.x (a Int8) ENGINE = Memory",
        "CREATE TABLE analysts.x AS requests",
        "CREATE MATERIALIZED VIEW analysts.x ENGINE = Memory AS SELECT 1",
        "CREATE DICTIONARY analysts.x (a UInt64) PRIMARY KEY a SOURCE(NULL()) LAYOUT(FLAT())",
        "CREATE FUNCTION x AS (a) -> a",
        "CREATE TEMPORARY VIEW x AS SELECT 1",
        "CREATE TEMPORARY TABLE x (a Int8)",
        "CREATE DATABASE other",
        "CREATE DATABASE IF NOT EXISTS other",
        "CREATE VIEW x AS SELECT 1",
        "CREATE VIEW millrace.x AS SELECT 1",
        "CREATE OR REPLACE VIEW millrace.requests_once AS SELECT 1",
        "CREATE VIEW analysts.x ON CLUSTER c AS SELECT 1",
        "CREATE VIEW analysts.x UUID '00000000-0000-0000-0000-000000000001' AS SELECT 1",
        "CREATE VIEW analysts.x DEFINER = default SQL SECURITY DEFINER AS SELECT 1",
        "CREATE VIEW analysts.x SQL SECURITY NONE AS SELECT 1",
        "CREATE VIEW analysts.x AS SELECT 1 SETTINGS max_threads = 1",
        "CREATE VIEW analysts.x AS SELECT 1 FROM (SELECT 1 SETTINGS readonly = 0)",
        "CREATE VIEW analysts.x AS SELECT 1 INTO OUTFILE 'x'",
        "CREATE VIEW analysts.x AS SELECT 1; DROP TABLE requests",
        "ATTACH VIEW analysts.x AS SELECT 1",
        "CREATE VIEW analysts.`a b` AS SELECT 1",
        "CREATE VIEW analysts.requests AS SELECT 1",
        "CREATE VIEW analysts.requests_once AS SELECT 1",
        "CREATE VIEW analysts.x AS SELECT * FROM nowhere",
        "CREATE VIEW analysts.x (a String) AS SELECT a FROM nowhere",
        "DROP TABLE requests",
        "DROP VIEW millrace.requests_once",
        "DROP VIEW analysts.a, millrace.requests_once",
        "DROP DATABASE analysts",
        "DROP DATABASE millrace",
        "RENAME TABLE millrace.requests TO analysts.x",
        "RENAME TABLE analysts.one TO millrace.x",
        "RENAME TABLE analysts.one TO analysts.requests",
        "RENAME DATABASE analysts TO x",
        "EXCHANGE TABLES analysts.one AND millrace.requests_once",
        "ALTER TABLE analysts.one MODIFY QUERY SELECT 2",
        "ALTER TABLE analysts.one ADD COLUMN a Int8",
        "ALTER TABLE requests DELETE WHERE 1",
        "ALTER TABLE millrace.requests MODIFY COMMENT 'x'",
        "INSERT INTO analysts.one VALUES (1)",
        "TRUNCATE TABLE analysts.one",
    ],
)
async def test_nothing_else_is_changed(endpoint: Endpoint, store: Store, sql: str) -> None:
    await endpoint.change("CREATE VIEW analysts.one AS SELECT 1 AS a")
    code, text = await endpoint.refusal(sql, auth=_FULL)
    assert text.startswith(f"Code: {code}. DB::Exception: ")
    assert await endpoint.views() == ["one"]
    assert await endpoint.column("SELECT a FROM analysts.one") == [1]
    assert await store.rows("SELECT count() FROM requests") == [(10,)]


_OF_TRANSCRIPTS = (
    "SELECT * FROM transcripts",
    "SELECT * FROM `tran\\x73cripts`",
    "SELECT * FROM millrace.transcripts_once",
    "SELECT (SELECT any(request_id) FROM millrace.transcripts) AS x",
    "WITH t AS (SELECT * FROM transcripts) SELECT * FROM t",
    "SELECT 1 WHERE 'x' IN (SELECT request_id FROM transcripts)",
    "SELECT {x:String} AS a, (SELECT any(request_id) FROM transcripts) AS b",
    "SELECT * FROM {t:Identifier}",
    "SELECT * FROM merge('millrace', 'tran.*')",
    "SELECT * FROM merge('millrace', concat('tran', 'scripts'))",
    "SELECT * FROM viewIfPermitted(SELECT 1 AS a FROM transcripts ELSE null('a Int8'))",
    "SELECT * FROM mergeTreeIndex('millrace', 'transcripts')",
    "SELECT * FROM loop('millrace', 'transcripts')",
    "SELECT * FROM view(SELECT * FROM transcripts)",
)


@pytest.mark.parametrize("body", _OF_TRANSCRIPTS)
@pytest.mark.parametrize("columns", ["", "(a String) "])
@pytest.mark.parametrize("auth", [_FULL, _ANALYST], ids=["full", "analyst"])
async def test_no_view_reads_transcripts(
    endpoint: Endpoint, body: str, columns: str, auth: tuple[str, str]
) -> None:
    await endpoint.refusal(f"CREATE VIEW analysts.x {columns}AS {body}", auth=auth)
    assert await endpoint.views() == []


async def test_a_view_reads_no_more_than_the_user_who_asks(
    endpoint: Endpoint, store: Store
) -> None:
    """Even one of transcripts, were there any, and one over it."""
    await store.command("CREATE VIEW analysts.words AS SELECT count() AS n FROM transcripts")
    await store.command("CREATE VIEW analysts.more AS SELECT * FROM analysts.words")
    for name in ("words", "more"):
        assert await endpoint.column(f"SELECT n FROM analysts.{name}", auth=_FULL) == [0]
        code, _ = await endpoint.refusal(f"SELECT n FROM analysts.{name}")
        assert code == "497"


async def test_no_body_reaches_out_of_the_database(endpoint: Endpoint, tmp_path: Path) -> None:
    file, out = tmp_path / "secret.txt", tmp_path / "out"
    file.write_text(SECRET)
    bodies = [sql for sql in REACHING_OUT if sql.startswith(("SELECT", "WITH"))]
    for number, sql in enumerate(bodies):
        body = sql.format(file=file, out=out, port=1)
        answer = await endpoint.ask(f"CREATE VIEW analysts.v{number} AS {body}", auth=_FULL)
        assert SECRET not in answer.text, body
        if answer.status_code == 200:
            read = await endpoint.ask(f"SELECT * FROM analysts.v{number}", auth=_FULL)
            assert SECRET not in read.text, body
        assert not out.exists(), body


async def test_there_are_at_most_so_many_views(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyst_views, "MAX_VIEWS", 3)
    for number in range(3):
        await endpoint.change(f"CREATE VIEW analysts.v{number} AS SELECT {number} AS n")
    code, text = await endpoint.refusal("CREATE VIEW analysts.v3 AS SELECT 3 AS n")
    assert (code, "3 views, of 3 at most" in text) == ("724", True), text
    await endpoint.change("CREATE OR REPLACE VIEW analysts.v2 AS SELECT 4 AS n")
    await endpoint.change("RENAME TABLE analysts.v2 TO analysts.v3")
    await endpoint.change("DROP VIEW analysts.v0")
    await endpoint.change("CREATE VIEW analysts.v0 AS SELECT 5 AS n")


async def test_views_over_views_are_bounded_as_a_whole(endpoint: Endpoint) -> None:
    await endpoint.change("CREATE VIEW analysts.v0 AS SELECT 1 AS n")
    for number in range(1, 5):
        twice = f"SELECT * FROM v{number - 1} UNION ALL SELECT * FROM analysts.v{number - 1}"
        await endpoint.change(f"CREATE VIEW v{number} AS {twice}", database="analysts")
    assert await endpoint.column("SELECT sum(n) FROM analysts.v4") == [16]
    thrice = "SELECT a.n FROM v4 AS a, v4 AS b JOIN v4 AS c ON b.n = c.n"
    code, text = await endpoint.refusal(f"CREATE VIEW v5 AS {thrice}", database="analysts")
    assert (code, "would read 94 views" in text) == ("162", True), text
    await endpoint.change("CREATE VIEW analysts.w AS SELECT 1 AS n")
    await endpoint.change("CREATE OR REPLACE VIEW analysts.v0 AS SELECT * FROM analysts.w")
    code, text = await endpoint.refusal(
        "CREATE OR REPLACE VIEW analysts.w AS SELECT 1 AS n FROM v4"
    )
    assert code in {"60", "162"}, text
    code, text = await endpoint.refusal(
        "CREATE OR REPLACE VIEW analysts.w AS SELECT n FROM analysts.v4"
    )
    assert code == "269", text
    with_list = "CREATE OR REPLACE VIEW analysts.w (n Int8) AS SELECT n FROM analysts.v4"
    code, text = await endpoint.refusal(with_list)
    assert code == "269", text


async def test_the_longest_chain_of_views_can_be_read(endpoint: Endpoint) -> None:
    await endpoint.change("CREATE VIEW analysts.v0 AS SELECT 1 AS n")
    for number in range(1, analyst_views.MAX_VIEWS_READ):
        body = f"SELECT * FROM analysts.v{number - 1}"
        await endpoint.change(f"CREATE VIEW analysts.v{number} AS {body}")
    last = analyst_views.MAX_VIEWS_READ - 1
    assert await endpoint.column(f"SELECT n FROM analysts.v{last}") == [1]
    code, _ = await endpoint.refusal(f"CREATE VIEW analysts.over AS SELECT * FROM analysts.v{last}")
    assert code == "162"


async def test_a_statement_is_bounded_in_size(endpoint: Endpoint) -> None:
    body = " UNION ALL ".join(["SELECT 1 AS n"] * 5_000)
    code, text = await endpoint.refusal(f"CREATE VIEW analysts.x AS {body}")
    assert (code, "65536 at most" in text) == ("62", True), text


async def test_a_view_may_have_parameters(endpoint: Endpoint) -> None:
    await endpoint.change(
        "CREATE VIEW analysts.of AS SELECT count() AS n FROM millrace.requests_once "
        "WHERE tenant = {tenant:String}"
    )
    assert await endpoint.column("SELECT n FROM analysts.of(tenant = 'nobody')") == [0]


async def test_without_views_their_statements_are_refused(store: Store) -> None:
    transport = httpx.ASGITransport(HttpInterface(store.reader, CONFIG))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as client:
        code, _ = await Endpoint(client).refusal("CREATE VIEW analysts.x AS SELECT 1")
    assert code == "164"


_LIFE = """
import asyncio, sys
from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store

async def main():
    store = await Store.open(ClickHouseConfig(path=sys.argv[1]))
    await migrate(store)
    if sys.argv[2] == "first":
        await store.views.run("CREATE VIEW analysts.kept AS SELECT 7 AS n FROM system.one", None)
    print(await store.rows("SELECT n FROM analysts.kept"))
    await store.close()

asyncio.run(main())
"""


async def test_views_are_kept_over_a_restart(tmp_path: Path) -> None:
    for life in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", _LIFE, str(tmp_path / "store"), life],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip() == "[(7,)]", done.stderr
