"""A real HTTP server of the test process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import web


@asynccontextmanager
async def listening(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    """The URL of a server whose every request ``handle`` answers."""
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
    """A stand-in that says how many requests it has."""

    num_running: int


@asynccontextmanager
async def event_stream(server: Busy, request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """An answer in server-sent events, while which the server has one request more."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    server.num_running += 1
    try:
        yield response
    finally:
        server.num_running -= 1


def break_off(response: web.StreamResponse) -> None:
    """End the connection in the middle of an answer, as a server does that dies."""
    request = response._req
    assert request is not None
    assert request.transport is not None
    request.transport.abort()
