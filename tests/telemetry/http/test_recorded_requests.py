"""Recorded requests of drivers, and the answer's bytes that they read."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx
import pytest

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http.codings import compressed, decompressed
from millrace.telemetry.http.interface import HttpInterface, HttpServer
from millrace.telemetry.store.store import Store
from tests.telemetry.stores import streaming

CONFIG = ClickHouseConfig(serve_port=0, username="reader", password="opens")
_BASIC = {"authorization": "Basic cmVhZGVyOm9wZW5z"}
_KEYS = {"x-clickhouse-user": "reader", "x-clickhouse-key": "opens"}
_BLOCK_INFO = b"\x01\x00\x02\xff\xff\xff\xff\x00"


class Recorded(NamedTuple):
    """A request of a driver, and the answer: its format, its Content-Encoding, and its bytes."""

    target: str
    headers: dict[str, str]
    body: str
    output_format: str
    coding: str
    answer: bytes


def text(*values: str) -> bytes:
    return b"".join(bytes((len(value),)) + value.encode() for value in values)


_JDBC_FORMAT = {"x-clickhouse-format": "RowBinaryWithNamesAndTypes"}
_JDBC = {
    **_JDBC_FORMAT,
    **_BASIC,
    "content-type": "text/plain",
    "x-clickhouse-database": "millrace",
    "user-agent": "jdbc-v2/0.11.1 clickhouse-java-v2/0.11.1 (lv:java/17.0.15; os:Linux)",
    "connection": "keep-alive",
}
_JDBC_0_6 = {
    **_JDBC_FORMAT,
    **_KEYS,
    "content-type": "text/plain; charset=UTF-8",
    "accept": "*/*",
    "user-agent": "ClickHouse-JdbcDriver ClickHouse-JavaClient/0.6.5 (HttpURLConnection)",
    "x-clickhouse-database": "millrace",
    "accept-encoding": "lz4",
    "cache-control": "no-cache",
    "pragma": "no-cache",
}
_GO = {**_BASIC, "user-agent": "clickhouse-go/2.51.0 (lv:go/1.26.8; os:linux)"}
_CONNECT = {**_BASIC, "user-agent": "clickhouse-connect/1.12.0 (lv:py/3.11.7; mode:sync)"}
_NODE = {**_BASIC, "user-agent": "clickhouse-js/1.23.1 (lv:nodejs/v20.20.2; os:linux)"}
_HELLO = "SELECT displayName() != '', version() != '', revision() > 54460, timezone()"
_HELLO_NAMES = (
    "notEquals(displayName(), '')",
    "notEquals(version(), '')",
    "greater(revision(), 54460)",
    "timezone()",
)


def _hello_block(custom: bytes) -> bytes:
    values = (b"\x01", b"\x01", b"\x01", text("UTC"))
    kinds = ("UInt8", "UInt8", "UInt8", "String")
    columns = [
        text(name, kind) + custom + value
        for name, kind, value in zip(_HELLO_NAMES, kinds, values, strict=True)
    ]
    return b"\x04\x01" + b"".join(columns)


RECORDED = {
    "jdbc": Recorded(
        "/?query_id=7e931742-27dc&compress=1",
        _JDBC,
        "SELECT 'local' AS TABLE_CAT, 7::Int16 AS n",
        "RowBinaryWithNamesAndTypes",
        "",
        b"\x02" + text("TABLE_CAT", "n", "String", "Int16", "local") + b"\x07\x00",
    ),
    "jdbc with what 0.8 and 0.9 send": Recorded(
        "/?async_insert=0&compress=1&wait_end_of_query=0&query_id=1",
        _JDBC,
        "SHOW DATABASES LIKE 'millrace'",
        "RowBinaryWithNamesAndTypes",
        "",
        b"\x01" + text("name", "String", "millrace"),
    ),
    "jdbc 0.6": Recorded(
        "/?compress=1&extremes=0&query_id=a508a1fc&max_execution_time=7&max_result_rows=2"
        "&result_overflow_mode=break",
        _JDBC_0_6,
        "SELECT toUInt8(7) AS n",
        "RowBinaryWithNamesAndTypes",
        "",
        b"\x01" + text("n", "UInt8") + b"\x07",
    ),
    "clickhouse-go": Recorded(
        "/?client_protocol_version=54460&database=millrace&default_format=Native"
        "&max_execution_time=34",
        _GO,
        _HELLO,
        "Native",
        "",
        _BLOCK_INFO + _hello_block(b"\x00"),
    ),
    "clickhouse-go with lz4": Recorded(
        "/?client_protocol_version=54460&compress=1&database=millrace&default_format=Native"
        "&max_execution_time=34&network_compression_method=LZ4",
        _GO,
        _HELLO,
        "Native",
        "",
        _BLOCK_INFO + _hello_block(b"\x00"),
    ),
    "clickhouse-go with zstd": Recorded(
        "/?client_protocol_version=54460&compress=1&database=millrace&default_format=Native"
        "&network_compression_method=ZSTD&network_zstd_compression_level=3",
        _GO,
        "SELECT toUInt8(7) AS n",
        "Native",
        "",
        _BLOCK_INFO + b"\x01\x01" + text("n", "UInt8") + b"\x00\x07",
    ),
    "clickhouse-connect": Recorded(
        "/?date_time_input_format=best_effort&cast_string_to_dynamic_use_inference=1"
        "&session_id=8649f152&cancel_http_readonly_queries_on_client_close=1&wait_end_of_query=1"
        "&send_progress_in_http_headers=1&http_headers_progress_interval_ms=120000"
        "&database=millrace&client_protocol_version=54405&query_id=c30c1f98"
        "&enable_http_compression=1",
        {**_CONNECT, "accept-encoding": "gzip"},
        "SELECT 1 AS check\n FORMAT Native",
        "Native",
        "gzip",
        _BLOCK_INFO + b"\x01\x01" + text("check", "UInt8") + b"\x01",
    ),
    "clickhouse-js": Recorded(
        "/?query_id=05cbe435&param_a=0000000000&param_b=%5B%27it%5C%27s%27%2C%27x%5Cty%27%5D"
        "&param_n=%5CN&enable_http_compression=1&max_execution_time=5"
        "&session_timezone=Asia%2FTokyo&database=millrace",
        {**_NODE, "accept-encoding": "gzip"},
        "SELECT {a: DateTime64(3)} AS a, {b: Array(String)} AS b, {n: Nullable(String)} AS n \n"
        "FORMAT JSONEachRow",
        "JSONEachRow",
        "gzip",
        b'{"a":"1970-01-01 09:00:00.000","b":["it\'s","x\\ty"],"n":null}\n',
    ),
}


@pytest.fixture
async def client(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(HttpInterface(streaming(store), CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as made:
        yield made


async def _sent(client: httpx.AsyncClient, recorded: Recorded) -> tuple[httpx.Response, bytes]:
    """The answer and its bytes as they were sent, with no Content-Encoding taken off."""
    headers = {"accept-encoding": "identity", **recorded.headers}
    request = client.build_request("POST", recorded.target, headers=headers, content=recorded.body)
    answer = await client.send(request, stream=True)
    return answer, b"".join([part async for part in answer.aiter_raw()])


@pytest.mark.parametrize("name", RECORDED)
async def test_drivers_get_the_answer_that_they_read(client: httpx.AsyncClient, name: str) -> None:
    recorded = RECORDED[name]
    answer, body = await _sent(client, recorded)
    assert answer.status_code == 200, body
    if "compress=1" in recorded.target.split("enable_http")[0]:
        is_zstd = "ZSTD" in recorded.target
        assert body[16] == (0x90 if is_zstd else 0x82)
        body = decompressed(body, 1 << 20)
    elif recorded.coding:
        body = gzip.decompress(body)
    assert body == recorded.answer
    headers = answer.headers
    assert headers["x-clickhouse-format"] == recorded.output_format
    assert headers.get("content-encoding", "") == recorded.coding
    zone = "Asia/Tokyo" if "Tokyo" in recorded.target else "UTC"
    assert headers["x-clickhouse-timezone"] == zone
    assert headers["x-clickhouse-server-display-name"] == "millrace"
    assert len(headers["x-clickhouse-exception-tag"]) == 16
    assert headers["x-clickhouse-summary"].startswith('{"read_rows":"0"')


@pytest.mark.parametrize("name", ["jdbc", "jdbc 0.6", "clickhouse-go with lz4", "clickhouse-js"])
async def test_drivers_are_told_of_errors(client: httpx.AsyncClient, name: str) -> None:
    recorded = RECORDED[name]._replace(body="SELECT nothing FROM requests")
    answer, body = await _sent(client, recorded)
    assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (404, "47")
    assert body.startswith(b"Code: 47. DB::Exception: Unknown expression identifier `nothing`")


def _chunks(body: bytes) -> tuple[bytes, bool]:
    """The chunks of a body, and whether the last one came."""
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        if size == b"0":
            return data, True
        data, body = data + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return data, False


@pytest.mark.parametrize("name", ["jdbc", "clickhouse-go with lz4", "clickhouse-js"])
async def test_an_error_in_mid_answer_ends_it_in_a_block_and_cuts_it_off(
    store: Store, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server = HttpServer(streaming(store), CONFIG)
    task = asyncio.create_task(server.run())
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    sql = b"SELECT number, throwIf(number = 900000) FROM numbers(2000000)"
    target = RECORDED[name].target.replace("&enable_http_compression=1", "")
    lines = [
        f"POST {target} HTTP/1.1",
        "host: a",
        f"content-length: {len(sql)}",
        *(f"{field}: {value}" for field, value in RECORDED[name].headers.items()),
    ]
    writer.write("\r\n".join((*lines, "", "")).encode() + sql)
    async with asyncio.timeout(20.0):
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    body, is_whole = _chunks(rest)
    assert not is_whole
    if "compress=1" in target:
        body = decompressed(body, 1 << 25)
    tag = head.partition(b"x-clickhouse-exception-tag: ")[2][:16]
    _, mark, block = body.rpartition(b"\r\n__exception__\r\n" + tag + b"\r\n")
    assert mark
    message, end, behind = block.partition(b" " + tag + b"\r\n__exception__\r\n")
    assert (bool(end), behind) == (True, b"")
    count, _, size = message.rpartition(b"\n")
    assert count.startswith(b"Code: 395. DB::Exception: Value passed to 'throwIf'")
    assert int(size) == len(count) + 1
    assert "without completing" not in caplog.text
    server.stop()
    await task


async def test_an_answer_that_waits_says_its_error_as_the_status(client: httpx.AsyncClient) -> None:
    sql = "SELECT number, throwIf(number = 900000) FROM numbers(2000000)"
    for name in ("wait_end_of_query", "http_wait_end_of_query"):
        answer = await client.post(f"/?{name}=1", headers=_BASIC, content=sql)
        assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (400, "395")
    whole = "SELECT number FROM numbers(900000)"
    answer = await client.post("/?wait_end_of_query=1", headers=_BASIC, content=whole)
    assert answer.text.split("\n")[-2] == "899999"


async def test_sql_comes_in_blocks(client: httpx.AsyncClient) -> None:
    for with_zstd in (False, True):
        body = compressed(b"SELECT 1 + 1", with_zstd=with_zstd)
        target = "/?decompress=1&default_format=CSV"
        answer = await client.post(target, headers=_BASIC, content=body)
        assert (answer.status_code, answer.text) == (200, "2\n")
    plain = struct.pack("<BII", 0x02, 9 + 8, 8) + b"SELECT 3"
    for number, sent in (
        (40, b"\0" * 16 + plain),
        (271, body[:20]),
        (271, body[:-1]),
        (12, b"\0" * 16 + struct.pack("<BII", 0x82, 9, 1 << 30)),
    ):
        answer = await client.post("/?decompress=1", headers=_BASIC, content=sent)
        code = answer.headers["x-clickhouse-exception-code"]
        assert (answer.status_code, code) == (400, str(number)), answer.text
