"""The bounds of what one connection holds."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http import protocol
from millrace.telemetry.http.interface import HttpServer
from millrace.telemetry.store import reading_embedded
from millrace.telemetry.store.reading import ReadLimits
from millrace.telemetry.store.reading_embedded import EmbeddedReader
from millrace.telemetry.store.store import Store
from tests.support.waiting import eventually

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
    """Behind the time limit of its query, and of an answer of which only the last bytes wait."""
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
