"""Settings, sessions, roles and formats of the store's HTTP interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from millrace.cli.analytics.store import ask_server
from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http.answer_body import CONTENT_TYPES
from millrace.telemetry.http.arguments import IGNORED_SETTINGS
from millrace.telemetry.http.interface import HttpInterface, HttpServer
from millrace.telemetry.store.store import Store
from tests.support.repository import ROOT
from tests.telemetry.stores import streaming

CONFIG = ClickHouseConfig(
    username="reader", password="opens", analyst_password="looks", max_query_s=60
)
_MEMORY = 512 * 1024 * 1024


@pytest.fixture
async def client(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(HttpInterface(streaming(store), CONFIG))
    auth = (CONFIG.username, CONFIG.password)
    url = "http://127.0.0.1/"
    async with httpx.AsyncClient(transport=transport, base_url=url, auth=auth) as made:
        yield made


async def ask(client: httpx.AsyncClient, sql: str, **params: str) -> str:
    answer = await client.post("/", params=params, content=sql)
    assert answer.status_code == 200, answer.text
    return answer.text


async def refused(client: httpx.AsyncClient, sql: str, **params: str) -> tuple[int, int, str]:
    answer = await client.post("/", params=params, content=sql)
    number = int(answer.headers["x-clickhouse-exception-code"])
    return answer.status_code, number, answer.text


def setting(name: str) -> str:
    return f"SELECT getSetting('{name}')"


async def test_any_setting_may_be_sent(client: httpx.AsyncClient) -> None:
    for name, value, seen in (
        ("max_result_rows", "1000", "1000"),
        ("extremes", "1", "1\n\n1\n1"),
        ("join_use_nulls", "1", "true"),
        ("session_timezone", "Europe/Berlin", "Europe/Berlin"),
        ("max_block_size", "1000", "1000"),
        ("log_comment", "of a dashboard", "of a dashboard"),
        ("output_format_json_quote_64bit_integers", "true", "true"),
    ):
        told = await ask(client, setting(name), **{name: value})
        if name != "extremes":
            assert told == f"{seen}\n", name
    clause = "SELECT getSetting('max_result_rows') SETTINGS max_result_rows = 7"
    assert await ask(client, clause) == "7\n"


async def test_costly_settings_are_cut_to_the_limits(client: httpx.AsyncClient) -> None:
    for name, value, seen in (
        ("max_execution_time", "5", "5"),
        ("max_execution_time", "0", "60"),
        ("max_execution_time", "86400", "60"),
        ("max_memory_usage", "100000000", "100000000"),
        ("max_memory_usage", "100000000000", str(_MEMORY)),
        ("max_threads", "1", "1"),
        ("max_threads", "64", "2"),
    ):
        assert await ask(client, setting(name), **{name: value}) == f"{seen}\n", (name, value)
    for name in ("max_temporary_data_on_disk_size_for_user", "os_threads_nice_value_query"):
        assert (await refused(client, "SELECT 1", **{name: "1"}))[1] == 452, name
    for clause in ("max_execution_time = 0", "max_memory_usage = 100000000000", "max_threads = 64"):
        status, number, why = await refused(client, f"SELECT 1 SETTINGS {clause}")
        assert (status, number) == (400, 452), why
        assert clause.split()[0] in why


async def test_settings_of_inserts_and_of_the_transport_are_ignored(
    client: httpx.AsyncClient,
) -> None:
    sent = {name: "1" for name in IGNORED_SETTINGS if not name.endswith("_")}
    sent |= {
        "insert_deduplicate": "0",
        "insert_quorum": "auto",
        "input_format_null_as_default": "1",
        "async_insert_busy_timeout_max_ms": "9",
        "max_insert_block_size": "1",
        "min_insert_block_size_rows": "0",
        "send_logs_level": "trace",
    }
    assert await ask(client, "SELECT 1", **sent) == "1\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("readonly", "0"),
        ("allow_ddl", "1"),
        ("use_query_cache", "1"),
        ("enable_writes_to_query_cache", "1"),
        ("query_cache_tag", "x"),
    ],
)
async def test_settings_that_would_write_are_refused_by_name(
    client: httpx.AsyncClient, name: str, value: str
) -> None:
    status, number, why = await refused(client, "SELECT 1", **{name: value})
    assert (status, number, f"'{name}'" in why) == (400, 164, True)
    session = {"session_id": "one"}
    status, number, why = await refused(client, f"SET {name} = '{value}'", **session)
    assert (status, number, f"'{name}'" in why) == (400, 164, True)


@pytest.mark.parametrize(
    ("params", "status", "number", "word"),
    [
        ({"max_thread": "1"}, 404, 115, "max_thread"),
        ({"no_such_setting": "1"}, 404, 115, "no_such_setting"),
        ({"x' = 1": "1"}, 404, 115, "x' = 1"),
        ({"max_block_size": "many"}, 400, 27, "many"),
        ({"output_format_json_quote_64bit_integers": "maybe"}, 400, 467, "maybe"),
        ({"session_timezone": "Mars/Olympus"}, 400, 36, "Mars/Olympus"),
        ({"dialect": "prql"}, 400, 452, "dialect"),
        ({"format_avro_schema_registry_url": "http://a"}, 400, 452, "registry_url"),
        ({"compress": "yes"}, 400, 467, "compress: use 0 or 1"),
        ({"client_protocol_version": "-1"}, 400, 72, "client_protocol_version"),
        ({"session_timeout": "999999"}, 400, 374, "3600"),
        ({"role": "nobody"}, 400, 511, "analyst"),
    ],
)
async def test_what_makes_no_sense_is_named(
    client: httpx.AsyncClient, params: dict[str, str], status: int, number: int, word: str
) -> None:
    message = await refused(client, "SELECT 1", **params)
    assert (message[:2], word in message[2]) == ((status, number), True), message


async def test_times_are_in_clickhouse_s_form_and_in_the_zone_that_is_asked(
    client: httpx.AsyncClient,
) -> None:
    sql = "SELECT toDateTime64(0.25, 3, 'UTC'), toTimeZone(toDateTime(0, 'UTC'), 'Asia/Tokyo')"
    assert await ask(client, sql) == "1970-01-01 00:00:00.250\t1970-01-01 09:00:00\n"
    time = await ask(client, sql, date_time_output_format="iso")
    assert time == "1970-01-01T00:00:00.250Z\t1970-01-01T00:00:00Z\n"
    assert await ask(client, "SELECT timezone(), toDateTime(0)") == "UTC\t1970-01-01 00:00:00\n"
    answer = await client.post(
        "/", params={"session_timezone": "Asia/Tokyo"}, content="SELECT timezone(), toDateTime(0)"
    )
    assert answer.text == "Asia/Tokyo\t1970-01-01 09:00:00\n"
    assert answer.headers["x-clickhouse-timezone"] == "Asia/Tokyo"


async def test_millrace_sql_asks_for_times_with_their_zone(store: Store) -> None:
    config = msgspec.structs.replace(CONFIG, serve_port=0)
    server = HttpServer(streaming(store), config)
    task = asyncio.create_task(server.run())
    config = msgspec.structs.replace(config, url=server.url)
    answer = await asyncio.to_thread(ask_server, "SELECT toDateTime(0, 'UTC') AS t", config, {})
    assert b'"1970-01-01T00:00:00Z"' in answer
    server.stop()
    await task


async def test_a_session_keeps_what_was_set(client: httpx.AsyncClient) -> None:
    seen = "SELECT getSetting('max_block_size'), timezone(), currentDatabase(), {who:String}"
    one = {"session_id": "one"}
    for sql in (
        "SET max_block_size = 77, session_timezone = 'Asia/Tokyo'; ",
        "-- a comment\nset param_who = 'it''s \\\\ me'",
        "USE system",
        "SET ROLE DEFAULT",
    ):
        assert await ask(client, sql, **one) == ""
    assert await ask(client, seen, **one) == "77\tAsia/Tokyo\tsystem\tit\\'s \\\\ me\n"
    assert await ask(client, setting("max_block_size"), max_block_size="5", **one) == "5\n"
    assert (await refused(client, seen))[1] == 456
    assert await ask(client, "SET max_block_size = 78") == ""
    assert await ask(client, setting("max_block_size")) != "78\n"
    assert (await refused(client, "SET no_such = 1", **one))[1] == 115
    assert (await refused(client, "SET max_block_size", **one))[1] == 62
    assert (await refused(client, "USE nowhere", **one))[1] == 81
    assert await ask(client, "SELECT currentDatabase()", **one) == "system\n"
    message = await refused(client, "SELECT 1", session_id="other", session_check="1")
    assert message[:2] == (400, 372)
    assert await ask(client, "SET TIME ZONE 'Europe/Berlin'", **one) == ""
    assert await ask(client, "SELECT timezone()", **one) == "Europe/Berlin\n"


async def test_a_session_is_of_one_user_and_ends(store: Store, client: httpx.AsyncClient) -> None:
    await ask(client, "SET max_block_size = 77", session_id="one", session_timeout="0")
    assert await ask(client, setting("max_block_size"), session_id="one") != "77\n"
    await ask(client, "SET max_block_size = 77", session_id="one")
    answer = await client.post(
        "/",
        params={"session_id": "one"},
        content=setting("max_block_size"),
        auth=("analyst", "looks"),
    )
    assert (answer.status_code, answer.text == "77\n") == (200, False)


async def test_a_role_takes_the_transcripts_away_and_gives_nothing(
    client: httpx.AsyncClient,
) -> None:
    sql = "SELECT count() FROM transcripts"
    assert await ask(client, sql, role="default", quota_key="x") == "0\n"
    assert (await refused(client, sql, role="analyst"))[1] == 497
    assert await ask(client, "SET ROLE analyst", session_id="one") == ""
    assert (await refused(client, sql, session_id="one"))[1] == 497
    assert await ask(client, "SET ROLE ALL", session_id="one") == ""
    assert await ask(client, sql, session_id="one") == "0\n"
    for params in ({"role": "owner"}, {"role": "default"}, {}):
        for role in ("SET ROLE ALL", "SET ROLE owner", "SET ROLE NONE"):
            params = {**params, "session_id": "two"}
            auth = ("analyst", "looks")
            assert (await client.post("/", params=params, content=role, auth=auth)).text == ""
            answer = await client.post("/", params=params, content=sql, auth=auth)
            assert answer.headers["x-clickhouse-exception-code"] == "497"


async def test_methods_and_paths_that_tools_try(client: httpx.AsyncClient) -> None:
    for path in ("/", "/ping", "/replicas_status"):
        answer = await client.get(path, auth=("nobody", "none"))
        assert (answer.status_code, answer.text) == (200, "Ok.\n"), path
        assert (await client.head(path, auth=("nobody", "none"))).status_code == 200
    options = await client.options("/")
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, POST, OPTIONS")
    head = await client.head("/", params={"query": "SELECT 1 FORMAT JSON"})
    assert (head.status_code, head.headers["x-clickhouse-format"]) == (200, "JSON")
    assert (await client.get("/?query=")).status_code == 400


async def test_formats_have_the_media_types_of_the_engine(
    store: Store, client: httpx.AsyncClient
) -> None:
    known = "SELECT name, content_type FROM system.formats WHERE is_output ORDER BY name"
    told = [line.split("\t") for line in (await ask(client, known)).splitlines()]
    assert dict(told) == CONTENT_TYPES
    for given, named in (("json", "JSON"), ("arrowstream", "ArrowStream"), ("TSV", "TSV")):
        for answer in (
            await client.post("/", content=f"SELECT 1 AS n FORMAT {given}"),
            await client.post("/", params={"default_format": given}, content="SELECT 1 AS n"),
        ):
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-clickhouse-format"] == named
            assert answer.headers["content-type"] == CONTENT_TYPES[named]
    rows = {"default_format": "JSONEachRow", "output_format_json_array_of_rows": "1"}
    answer = await client.post("/", params=rows, content="SELECT 1 AS n")
    assert answer.json() == [{"n": 1}]
    assert answer.headers["content-type"] == "application/json; charset=UTF-8"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT arrowstream(1)",
        "SELECT arrayMap(arrowstream, [1])",
        "SELECT * FROM arrowstream(x)",
        "SELECT 1 AS format, arrowstream(1) FORMAT TSV",
        "SELECT (SELECT arrowstream('x') FORMAT ArrowStream)",
    ],
)
async def test_a_format_s_name_is_no_function(client: httpx.AsyncClient, sql: str) -> None:
    assert (await refused(client, sql))[1] in {164, 62}


@pytest.mark.parametrize(
    ("accepts", "coding"),
    [
        ("gzip, deflate, br, zstd", "zstd"),
        ("deflate", "deflate"),
        ("gzip;q=0, deflate", "deflate"),
        ("gzip;q=0.000, DEFLATE", "deflate"),
        ("br", ""),
        ("identity", ""),
    ],
)
async def test_answers_are_compressed_as_the_client_takes_them(
    client: httpx.AsyncClient, accepts: str, coding: str
) -> None:
    params = {"enable_http_compression": "1"}
    sql = "SELECT number FROM numbers(100000) FORMAT RowBinary"
    headers = {"accept-encoding": accepts}
    async with client.stream("POST", "/", params=params, content=sql, headers=headers) as answer:
        assert answer.headers.get("content-encoding", "") == coding
        size = sum([len(part) async for part in answer.aiter_raw()])
    assert (size < 800_000) == bool(coding)
    plain = await client.post("/", content=sql, headers=headers)
    assert "content-encoding" not in plain.headers
    assert len(plain.content) == 800_000


async def test_system_tables_that_drivers_ask_for(client: httpx.AsyncClient) -> None:
    for table, least in (
        ("databases", 2), ("tables", 10), ("columns", 100), ("functions", 1_000),
        ("settings", 1_000), ("data_type_families", 100), ("one", 1), ("formats", 90),
        ("table_engines", 10), ("table_functions", 10), ("processes", 1), ("contributors", 0),
        ("build_options", 10), ("aggregate_function_combinators", 5), ("collations", 10),
        ("time_zones", 100), ("dictionaries", 0), ("parts", 0),
        ("data_skipping_indices", 1), ("keywords", 100), ("macros", 0), ("clusters", 0),
    ):  # fmt: skip
        answer = await client.post("/", content=f"SELECT count() FROM system.{table}")
        assert answer.status_code == 200, answer.text
        assert int(answer.text) >= least, table
    for sql in (
        "SHOW TABLES",
        "SHOW DATABASES",
        "SHOW COLUMNS FROM requests",
        "SHOW SETTINGS LIKE '%max_thr%'",
    ):
        assert len((await ask(client, sql)).splitlines()) > 3, sql
    assert (
        await ask(client, "SHOW TABLES LIKE 'prices' FORMAT JSONEachRow") == '{"name":"prices"}\n'
    )
    for sql in (
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'millrace'",
        "SELECT column_name FROM INFORMATION_SCHEMA.COLUMNS WHERE table_name = 'requests'",
    ):
        assert len((await ask(client, sql)).splitlines()) > 5, sql


def test_the_docs_list_the_ignored_settings() -> None:
    page = (ROOT / "docs" / "analytics-tools.md").read_text()
    for name in IGNORED_SETTINGS:
        assert f"`{name}…`" in page if name.endswith("_") else f"`{name}`" in page, name
