"""The read-only part of ClickHouse's HTTP interface, over the embedded engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import clickhouse_connect
import httpx
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError
from millrace.telemetry.http.interface import HttpInterface, HttpServer
from millrace.telemetry.store.reading import ReadLimits
from millrace.telemetry.store.reading_embedded import EmbeddedReader
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS
from tests.support.waiting import eventually
from tests.telemetry.records import request_record
from tests.telemetry.stores import streaming

CONFIG = ClickHouseConfig(serve_port=0, username="reader", password="opens the door")
AUTH = (CONFIG.username, CONFIG.password)


async def insert(store: Store, first: int, last: int, token: str) -> None:
    records = [request_record(number) for number in range(first, last)]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(first, last)), token)


@pytest.fixture
async def client(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    await insert(store, 0, 10, "a")
    transport = httpx.ASGITransport(HttpInterface(streaming(store), CONFIG))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://clickhouse", auth=AUTH
    ) as made:
        yield made


async def test_ping(client: httpx.AsyncClient) -> None:
    answer = await client.get("/ping")
    assert (answer.status_code, answer.text) == (200, "Ok.\n")


@pytest.mark.parametrize("method", ["body", "query", "both"])
async def test_sql_may_come_either_way(client: httpx.AsyncClient, method: str) -> None:
    parameters = {"default_format": "JSONEachRow", "database": "millrace", "readonly": "1"}
    if method == "body":
        answer = await client.post(
            "/", params=parameters, content="SELECT count() AS n FROM requests"
        )
    elif method == "query":
        answer = await client.get(
            "/", params={**parameters, "query": "SELECT count() AS n FROM requests"}
        )
    else:
        answer = await client.post(
            "/", params={**parameters, "query": "SELECT count() AS n"}, content="FROM requests;"
        )
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text) == {"n": 10}


async def test_the_query_s_own_format_wins(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/?database=millrace", content="SELECT 1 AS a, 'x,y' AS b FORMAT CSVWithNames"
    )
    assert answer.text == '"a","b"\n1,"x,y"\n'


async def test_parameters_are_bound_by_the_engine(client: httpx.AsyncClient) -> None:
    parameters = {"param_tenant": "' OR 1 --", "param_n": "3"}
    answer = await client.post(
        "/", params=parameters, content="SELECT {tenant:String}, {n:UInt8} + 1"
    )
    assert answer.text == "\\' OR 1 --\t4\n"


@pytest.mark.parametrize(
    ("sql", "line"),
    [
        ("SHOW TABLES", "requests_once"),
        ("SHOW DATABASES", "millrace"),
        ("SHOW TABLES FROM millrace LIKE 'requests' FORMAT CSV", '"requests"'),
        (
            "SHOW COLUMNS FROM deliveries LIKE 'tenant'",
            "tenant\tLowCardinality(String)\tNO\t\t\\N\t",
        ),
        ("SHOW CREATE DATABASE millrace", "CREATE DATABASE millrace\\nENGINE = Atomic"),
    ],
)
async def test_show_answers(client: httpx.AsyncClient, sql: str, line: str) -> None:
    answer = await client.post("/?database=millrace", content=sql)
    assert line in answer.text.splitlines()


async def test_a_format_cannot_be_called_as_a_function(client: httpx.AsyncClient) -> None:
    settings = "SETTINGS max_threads = 1"
    for sql in ("SELECT 1 AS a FORMAT ArrowStream", f"SELECT 1 FORMAT ArrowStream {settings}"):
        answer = await client.post("/", content=sql)
        assert answer.content.startswith(b"\xff\xff\xff\xff"), answer.text
    answer = await client.post("/", content="SELECT * FROM arrowstream('x') FORMAT ArrowStream")
    assert answer.headers["x-clickhouse-exception-code"] == "164"


async def test_what_has_not_merged_counts_once(store: Store, client: httpx.AsyncClient) -> None:
    await insert(store, 0, 10, "b")
    assert await store.rows("SELECT count() FROM requests") == [(20,)]
    answer = await client.post("/?database=millrace", content="SELECT count() FROM requests")
    assert answer.text == "10\n"


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO requests (request_id) VALUES ('x')",
        "DROP TABLE requests",
        "ALTER TABLE requests DELETE WHERE 1",
        "TRUNCATE TABLE requests",
        "CREATE TABLE x (a Int8) ENGINE = Memory",
        "SYSTEM SHUTDOWN",
        "KILL MUTATION WHERE 1",
        "SET readonly = 0",
        "SELECT 1; DROP TABLE requests",
        "/* SELECT */ DROP TABLE requests",
        "SELECT 1 INTO OUTFILE 'x.tsv'",
        "SELECT 1 INTO/**/OUTFILE 'x.tsv'",
        "SELECT file('/etc/hostname')",
        "SELECT FILE ('/etc/hostname')",
        "SELECT `file`('/etc/hostname')",
        "SELECT * FROM file('/etc/hostname', LineAsString)",
        "SELECT * FROM url('http://127.0.0.1:1/', LineAsString)",
        "SELECT * FROM Python(secret)",
        "SELECT 1 SETTINGS max_execution_time = 0",
        "EXPLAIN INSERT INTO requests (request_id) SELECT 'x'",
        "WITH 1 AS a INSERT INTO requests (request_id) SELECT 'x'",
    ],
)
async def test_only_reading_is_allowed(client: httpx.AsyncClient, store: Store, sql: str) -> None:
    answer = await client.post("/?database=millrace", content=sql)
    if not sql.startswith("EXPLAIN"):
        assert answer.status_code == 400, answer.text
        assert "X-ClickHouse-Exception-Code" in answer.headers
        assert answer.text.startswith("Code: ")
    assert await store.rows("SELECT count() FROM requests") == [(10,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SHOW TABLES",
        "DESCRIBE TABLE requests",
        "EXISTS TABLE requests",
        "EXPLAIN SELECT 1",
        "WITH 1 AS a SELECT a",
        "(SELECT 1) UNION ALL (SELECT 2)",
        "-- why\n# shell style\nSELECT 'INTO OUTFILE; DROP' AS \"into\"",
        "SELECT 'it''s', 'a\\'b; c'",
        "SELECT $tag$ ; DROP TABLE requests $tag$",
    ],
)
async def test_reading_is(client: httpx.AsyncClient, sql: str) -> None:
    answer = await client.post("/?database=millrace", content=sql)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "beginning", [" ", "\n\t", "--", "-- -- \n", "# ", "/**/", "/* -- */ "], ids=repr
)
async def test_what_stands_before_a_statement_takes_no_time(
    client: httpx.AsyncClient, beginning: str
) -> None:
    sql = f"{beginning * 5_000}\n(SELECT 1)"
    async with asyncio.timeout(10):
        assert (await client.post("/", content=sql)).text == "1\n"


@pytest.mark.parametrize(
    "sql",
    ["/* " * 40_000, "SELECT 1 " + "/* " * 40_000, "".join(f"$a{n}$ " for n in range(90_000))],
    ids=["comment", "later comment", "heredoc"],
)
async def test_comments_and_heredocs_without_an_end_are_refused_soon(
    client: httpx.AsyncClient, sql: str
) -> None:
    async with asyncio.timeout(10):
        assert (await client.post("/", content=sql)).status_code == 400


@pytest.mark.parametrize(
    ("sql", "status", "code"),
    [
        ("SELECT * FROM nowhere", 404, "60"),
        ("SELECT nothing FROM requests", 404, "47"),
        ("SELEC 1", 400, "164"),
        ("SELECT FROM WHERE", 400, "62"),
        ("", 400, "62"),
        ("SELECT throwIf(1)", 400, "395"),
    ],
)
async def test_errors_are_clickhouse_s_own(
    client: httpx.AsyncClient, sql: str, status: int, code: str
) -> None:
    answer = await client.post("/?database=millrace", content=sql)
    assert (answer.status_code, answer.headers["X-ClickHouse-Exception-Code"]) == (status, code)


async def test_a_statement_has_the_most_bytes_that_clickhouse_takes(
    client: httpx.AsyncClient,
) -> None:
    long = "SELECT length('" + "x" * 200_000 + "')"
    assert int((await client.post("/", content=long)).text) == 200_000
    refused = await client.post("/", content=long.replace("x", "xx"))
    assert (refused.status_code, refused.headers["x-clickhouse-exception-code"]) == (400, "62")
    assert "exceeds 262144 bytes" in refused.text


async def test_other_paths_and_methods_are_refused(client: httpx.AsyncClient) -> None:
    assert (await client.post("/?database=nowhere", content="SELECT 1")).status_code == 404
    assert (await client.get("/other")).status_code == 404
    assert (await client.delete("/")).status_code == 405


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, 2**63),
        ("0", 2**63),
        ("false", 2**63),
        ("1", str(2**63)),
        ("True", str(2**63)),
    ],
)
async def test_integers_are_quoted_where_that_is_asked_for(
    client: httpx.AsyncClient, setting: str | None, shown: object
) -> None:
    sql = (
        "SELECT toUInt64(1) + 9223372036854775807 AS n, [toInt64(-5)] AS all, toUInt32(7) AS small"
    )
    params = {"default_format": "JSONEachRow"}
    if setting is not None:
        params["output_format_json_quote_64bit_integers"] = setting
    answer = await client.post("/", params=params, content=sql)
    assert answer.status_code == 200, answer.text
    inner = "-5" if isinstance(shown, str) else -5
    assert answer.json() == {"n": shown, "all": [inner], "small": 7}


async def test_queries_are_bounded_in_time_and_number(store: Store, store_path: Path) -> None:
    limits = ReadLimits(max_queries=1, max_queries_waiting=1, max_query_s=1)
    reader = EmbeddedReader(str(store_path), "millrace", limits)
    transport = httpx.ASGITransport(HttpInterface(reader, CONFIG))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://clickhouse", auth=AUTH
    ) as client:
        slow = "SELECT count() FROM numbers(1000000000000)"
        answers = await asyncio.gather(
            *(client.post("/", content=slow, timeout=10) for _ in range(3))
        )
        assert sorted(answer.status_code for answer in answers) == [408, 408, 503]
    await reader.close()


@pytest.mark.parametrize("compress", [False, "lz4", "zstd", "gzip"])
async def test_clickhouse_connect_takes_it_for_a_server(store: Store, compress: str | bool) -> None:
    await insert(store, 0, 10, "a")
    server = HttpServer(streaming(store), CONFIG)
    task = asyncio.create_task(server.run())

    def ask() -> list[tuple[object, ...]]:
        host, port = server.url.removeprefix("http://").split(":")
        client = clickhouse_connect.get_client(
            host=host,
            port=int(port),
            database="millrace",
            username=AUTH[0],
            password=AUTH[1],
            compress=compress,
        )
        answer = client.query(
            "SELECT request_id, cost, received_at FROM requests WHERE tenant != {tenant:String} "
            "ORDER BY request_id LIMIT 3",
            parameters={"tenant": "x"},
        )
        with pytest.raises(DatabaseError, match="Value passed to 'throwIf'"):
            client.query("SELECT number, throwIf(number = 90000) FROM numbers(200000)")
        client.close()
        return [tuple(row) for row in answer.result_rows]

    rows = await asyncio.to_thread(ask)
    assert [row[0] for row in rows] == [request_record(number).request_id for number in range(3)]
    assert rows[0][1] == request_record(0).cost
    server.stop()
    await task


async def test_a_query_ends_when_its_socket_closes(store: Store) -> None:
    server = HttpServer(streaming(store), CONFIG)
    task = asyncio.create_task(server.run())
    address = server.url.removeprefix("http://").split(":")
    key = f"X-ClickHouse-User: {AUTH[0]}\r\nX-ClickHouse-Key: {AUTH[1]}\r\n"
    running = "SELECT count() FROM system.processes WHERE query LIKE '%numbers(77777777777)%' "
    running += "AND query NOT LIKE '%processes%'"

    async with httpx.AsyncClient(base_url=server.url, auth=AUTH, trust_env=False) as client:

        async def num_running() -> str:
            return (await client.post("/", content=running)).text

        async def runs() -> bool:
            return await num_running() == "1\n"

        async def ended() -> bool:
            return await num_running() == "0\n"

        for sql in (
            "SELECT sum(number) FROM numbers(77777777777)",
            "SELECT number FROM numbers(77777777777)",
        ):
            _, writer = await asyncio.open_connection(*address)
            head = f"POST / HTTP/1.1\r\nHost: a\r\n{key}Content-Length: {len(sql)}\r\n\r\n"
            writer.write(f"{head}{sql}".encode())
            await eventually(runs)
            writer.close()
            await eventually(ended)
    server.stop()
    await task


async def test_an_error_behind_the_beginning_of_an_answer_cuts_it(store: Store) -> None:
    server = HttpServer(streaming(store), CONFIG)
    task = asyncio.create_task(server.run())
    sql = "SELECT throwIf(number = 3000000) FROM numbers(10000000)"
    last = b""

    async def receive(answer: httpx.Response) -> None:
        nonlocal last
        async for chunk in answer.aiter_raw():
            last = chunk

    async with httpx.AsyncClient(base_url=server.url, auth=AUTH, trust_env=False) as client:
        async with client.stream("POST", "/", content=sql) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await receive(answer)
        assert (await client.post("/", content="SELECT 1")).text == "1\n"
    assert b"Code: 395. DB::Exception: " in last
    server.stop()
    await task


_KEY_BEHIND = (
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n8\r\nSELECT 1\r\n0\r\n"
    b"X-ClickHouse-User: reader\r\nX-ClickHouse-Key: opens the door\r\n\r\n"
)


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (431, b"GET /ping HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 75_000_000),
        (431, b"GET /ping HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 129),
        (431, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
         + b"X: y\r\n" * 1_000_000),
        (400, b"GET /ping HTTP/1.1\r\n\r\n"),
        (501, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"),
        (405, b"BREW /ping HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
        (401, _KEY_BEHIND),
    ],
    ids=["header", "headers", "trailers", "no host", "coding", "method", "trailing key"],
)  # fmt: skip
async def test_heads_and_trailers_have_the_bounds_of_every_port(status: int, data: bytes) -> None:
    server = HttpServer(None, CONFIG)  # type: ignore[arg-type]
    task = asyncio.create_task(server.run())
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    writer.write(data)
    async with asyncio.timeout(20.0):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    if status == 405:
        assert b"allow: GET, HEAD\r\n" in answer
    server.stop()
    await task


async def test_sql_may_come_compressed(client: httpx.AsyncClient) -> None:
    sql = gzip.compress(b"SELECT 1 + 1")
    headers = {"content-encoding": "gzip"}
    assert (await client.post("/", content=sql, headers=headers)).text == "2\n"
    cut = await client.post("/", content=sql[:-1], headers=headers)
    assert (cut.status_code, "ends before its gzip data" in cut.text) == (400, True)
    other = await client.post("/", content=sql, headers={"content-encoding": "lz4"})
    assert (other.status_code, other.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")


async def test_long_values_are_shown_by_their_beginning(client: httpx.AsyncClient) -> None:
    for params in ({"query_id": "q" * 3_000}, {"s" * 3_000: "1"}, {"query": "x" * 3_000}):
        answer = await client.get("/", params=params)
        assert answer.status_code == 400
        for long in ("q" * 201, "s" * 201, "x" * 201):
            assert long not in answer.text.lower()
            assert long not in answer.headers["x-clickhouse-query-id"]


def test_a_taken_port_is_said(store_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            HttpServer(None, ClickHouseConfig(serve_port=port, password="x"))  # type: ignore[arg-type]
