"""Real HTTP server of the test process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import web


@asynccontextmanager
async def listening(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    """Serve every request by ``handle``, and yield the URL."""
    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", handle)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class Busy(Protocol):
    """Stand-in that counts its requests in progress."""

    num_running: int


@asynccontextmanager
async def event_stream(server: Busy, request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """Yield an answer in server-sent events, which counts as a request in progress."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    server.num_running += 1
    try:
        yield response
    finally:
        server.num_running -= 1


def break_off(response: web.StreamResponse) -> None:
    """End the connection in the middle of an answer, as a dying server does."""
    request = response._req
    assert request is not None
    assert request.transport is not None
    request.transport.abort()
