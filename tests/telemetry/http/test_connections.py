"""Limits of the memory that one connection holds."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http import bodies, protocol
from millrace.telemetry.http.bodies import Bodies
from millrace.telemetry.http.interface import HttpServer
from millrace.telemetry.store import reading_embedded
from millrace.telemetry.store.reading import QueryError, ReadLimits
from millrace.telemetry.store.reading_embedded import EmbeddedReader
from millrace.telemetry.store.store import Store
from tests.support.waiting import eventually
from tests.telemetry.stores import streaming

CONFIG = ClickHouseConfig(serve_port=0, username="reader", password="opens the door")
AUTH = (CONFIG.username, CONFIG.password)


@pytest.mark.parametrize(
    "sql",
    ["SELECT number FROM numbers(100000000000)", "SELECT repeat('x', 100) FROM numbers(300)"],
    ids=["endless", "short"],
)
async def test_a_client_that_does_not_read_its_answer_is_closed(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    """The connection closes after the query's time limit, also if only the last bytes wait."""
    monkeypatch.setattr(protocol, "_SEND_INTERVAL_S", 0.1)
    monkeypatch.setattr(reading_embedded, "_GRACE_S", 0.1)
    limits = ReadLimits(max_queries=1, max_queries_waiting=0, max_query_s=1)
    reader = EmbeddedReader(str(store_path), "millrace", limits)
    server = HttpServer(reader, CONFIG)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    task = asyncio.create_task(server.run())
    host, port = server.url.removeprefix("http://").split(":")
    key = f"X-ClickHouse-User: {AUTH[0]}\r\nX-ClickHouse-Key: {AUTH[1]}\r\nConnection: close\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST / HTTP/1.1\r\nHost: a\r\n{key}Content-Length: {len(sql)}\r\n\r\n"
        client.sendall(f"{head}{sql}".encode())
        # The other end has reset the connection.
        await eventually(lambda: client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0)
    async with httpx.AsyncClient(base_url=server.url, auth=AUTH, trust_env=False) as other:

        async def is_free() -> bool:
            return (await other.post("/", content="SELECT 1")).status_code == 200

        await eventually(is_free, what="the place of the query")
    server.stop()
    await task
    await reader.close()


KEY = f"X-ClickHouse-User: {AUTH[0]}\r\nX-ClickHouse-Key: {AUTH[1]}\r\n"
FIELD = b'--b\r\nContent-Disposition: form-data; name="query"\r\n\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="t"; filename="t"\r\n\r\n'
FORM = "Content-Type: multipart/form-data; boundary=b\r\n"


@pytest.fixture
async def server(store: Store) -> AsyncIterator[HttpServer]:
    made = HttpServer(streaming(store), CONFIG)
    task = asyncio.create_task(made.run())
    yield made
    made.stop()
    await task


async def sending(
    server: HttpServer, body: bytes, more: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent a part of its body."""
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    writer.write(f"POST / HTTP/1.1\r\nHost: a\r\n{KEY}{more}\r\n".encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b"SELECT 1" + b" " * 200_000, "Content-Length: 1000000\r\n"),
        (FIELD + b"1" * 200_000, f"{FORM}Content-Length: 1000000\r\n"),
        (FILE + b"1" * 200_000, f"{FORM}Content-Length: 1000000\r\n"),
        (b"30d40\r\n" + b" " * 200_000, "Transfer-Encoding: chunked\r\n"),
        (gzip.compress(b" " * 200_000), "Content-Encoding: gzip\r\nContent-Length: 1000000\r\n"),
    ],
    ids=["statement", "field", "file", "chunks", "gzip"],
)
async def test_bodies_that_are_not_whole_hold_a_bounded_memory(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, body: bytes, more: str
) -> None:
    """The first body without room is refused unread; short statements fit; leaving frees all."""
    monkeypatch.setattr(bodies, "_MAX_BYTES_OF_USER", 500_000)
    held = [await sending(server, body, more) for _ in range(4)]
    async with asyncio.timeout(10):
        answers = [asyncio.create_task(reader.read(400)) for reader, _ in held]
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    assert refused.result().startswith(b"HTTP/1.1 503 ")
    assert b"x-clickhouse-exception-code: 202\r\n" in refused.result()
    assert len(waiting) == 3
    async with httpx.AsyncClient(base_url=server.url, auth=AUTH, trust_env=False) as client:
        assert (await client.post("/", content="SELECT 1")).text == "1\n"
        for _, writer in held:
            writer.transport.abort()
        await asyncio.gather(*answers, return_exceptions=True)

        async def has_room() -> bool:
            answer = await client.post("/", content="SELECT 1" + " " * 250_000)
            return answer.status_code == 200

        await eventually(has_room)


async def test_a_slow_body_is_refused(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BODY_S", 0.1)
    for more in ("", FORM):
        reader, writer = await sending(server, b"-", f"{more}Content-Length: 1000\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read(1000)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"x-clickhouse-exception-code: 209\r\n" in answer
        writer.close()


async def test_a_client_that_leaves_in_its_body_is_no_error(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    for body, more in ((b"SELECT", ""), (FILE, FORM)):
        _, writer = await sending(server, body, f"{more}Content-Length: 1000\r\n")
        await eventually(lambda: bool(server._server.server_state.tasks))
        writer.transport.abort()
        await eventually(lambda: not server._server.server_state.tasks)
    assert not caplog.records


def test_bodies_of_a_user_and_of_all_are_counted_until_their_requests_end() -> None:
    counted = Bodies()
    with counted.request("a") as first:
        counted.take("a", bodies._MAX_BYTES_OF_USER)
        first.held_bytes = bodies._MAX_BYTES_OF_USER
        with pytest.raises(QueryError, match="96 of 96 MiB"):
            counted.take("a", 1)
        with counted.request("b"), pytest.raises(QueryError, match="128 of 128 MiB") as raised:
            counted.take("b", bodies._MAX_BYTES - bodies._MAX_BYTES_OF_USER + 1)
        assert raised.value.number == 202
    counted.take("a", bodies._MAX_BYTES_OF_USER)


async def test_values_of_a_client_in_headers_hold_no_control_characters(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with httpx.AsyncClient(base_url=server.url, auth=AUTH, trust_env=False) as client:
        answer = await client.post("/", params={"query_id": "a\r\nX: b\0\x7f"}, content="SELECT 1")
        assert (answer.text, answer.headers["x-clickhouse-query-id"]) == ("1\n", "a??X: b??")
        answer = await client.post("/", params={"session_timezone": "a\nb"}, content="SELECT 1")
        assert (answer.status_code, answer.headers["x-clickhouse-timezone"]) == (400, "a?b")
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
