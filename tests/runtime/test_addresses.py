"""Proxies of the shell: unused for our own addresses and for loopback."""

from __future__ import annotations

import asyncio
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from millrace.cli.local.ports import answers
from millrace.cli.local.report import health_at
from millrace.runtime.addresses import exempt_loopback, open_directly
from millrace.workers.servers.client import ServerClient
from tests.support.system import DEAD_PROXIES


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        """Log nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _dead_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DEAD_PROXIES.items():
        monkeypatch.setenv(name, value)
    # urllib keeps the opener of its first call, with the proxies that were set then.
    monkeypatch.setattr(urllib.request, "_opener", None)


def _follows_proxies(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5.0).close()  # noqa: TID251
    except urllib.error.URLError:
        return True
    return False


async def test_our_own_parts_are_reached_without_them(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    assert await asyncio.to_thread(_follows_proxies, port), "as other programs do"
    answer = await asyncio.to_thread(open_directly, f"{url}/", timeout_s=5.0)
    assert answer.read() == b'{"status": "ok"}'
    assert await answers(f"{url}/ping")
    assert (await health_at(f"127.0.0.1:{port}")).status == "ok"


async def test_engines_behind_the_bus_are_reached_without_them(port: int) -> None:
    client = ServerClient(f"http://127.0.0.1:{port}")
    try:
        assert await client.get_json("/health") == {"status": "ok"}
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "localhost,127.0.0.1,::1"),
        (" internal.example , 127.0.0.1", "internal.example,127.0.0.1,localhost,::1"),
        ("*", "*"),
    ],
)
def test_libraries_that_follow_them_leave_loopback_alone(
    port: int, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setenv("no_proxy", before)
    monkeypatch.setenv("NO_PROXY", before)
    exempt_loopback()
    exempt_loopback()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (after, after)
    assert not _follows_proxies(port)
