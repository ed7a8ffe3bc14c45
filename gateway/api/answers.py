"""Delivery of streamed and whole answers to HTTP clients, and storage at their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from millrace.gateway.api.event_ids import EventId, ToldEvents
from millrace.gateway.core import Gateway
from millrace.gateway.errors import GOING_AWAY_REFUSAL, Refusal
from millrace.gateway.rendering.rendering import SSE_COMMENT, SSE_KEEP_ALIVE, Renderer, encode
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.request.resuming import UnknownRequestError
from millrace.gateway.responses.store import ResponseNotFoundError
from millrace.gateway.streams.parts import Part
from millrace.gateway.streams.stream import Client, OpenStream
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.connection_writer import WRITER_EXTENSION, HttpWriter
from millrace.gateway.transport.http import (
    JSON,
    Headers,
    Receive,
    Scope,
    Send,
    request_id_header,
    send_refusal,
    send_response,
    wait_for_disconnect,
)
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.records import ClientEnd

_KEEP_ALIVE_S = 15.0


SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
# A refusal within this time after acceptance still gets its HTTP status.
_STATUS_WAIT_S = 3.0
ABORT_EXTENSION = "millrace.abort"


class HttpClient(Client):
    """HTTP client of a response.

    ``gone`` has the reason once the connection was closed or dropped. ``going_away`` is set when
    this gateway shuts down and the client must be told. ``on_wake`` is called when there is
    something to take; by default it makes ``wait`` return. ``takes_event_ids``: events of a stream
    carry an id with their position.
    """

    def __init__(
        self, limit_bytes: int, abort: Callable[[], None], *, takes_event_ids: bool = False
    ) -> None:
        super().__init__(limit_bytes)
        self.takes_event_ids = takes_event_ids
        self._abort = abort
        self._wakeup = asyncio.Event()
        self.gone = ""
        self.going_away = False
        self.on_wake: Callable[[], None] | None = None

    def wake(self, _stream: OpenStream) -> None:
        (self.on_wake or self._wakeup.set)()

    def call(self) -> None:
        """Wake ``wait``."""
        self._wakeup.set()

    def has_left(self) -> bool:
        return bool(self.gone)

    def drop(self, reason: str) -> None:
        self.disconnect(reason)
        self._abort()

    def go_away(self) -> None:
        self.going_away = True
        self._wakeup.set()

    def disconnect(self, reason: str) -> None:
        self.gone = self.gone or reason
        self._wakeup.set()

    async def wait(self) -> None:
        """Return when there is something to take, or when the client is gone."""
        await self._wakeup.wait()
        self._wakeup.clear()

    async def wait_up_to(self, timeout_s: float) -> bool:
        """Wait like ``wait``; return False after ``timeout_s`` without an event."""
        is_late = False

        def on_late() -> None:
            nonlocal is_late
            if not self._wakeup.is_set():
                is_late = True
                self._wakeup.set()

        timer = asyncio.get_running_loop().call_later(timeout_s, on_late)
        try:
            await self.wait()
        finally:
            timer.cancel()
        return not is_late

    @asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Watch the client for a disconnect within this context."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self.disconnect(ClientEnd.DISCONNECTED)


class HttpAnswer:
    """Response on its way to an HTTP client. ``whole``, ``stream`` and ``follow`` return the HTTP
    status that was sent, 499 if the client left.

    A stream is written to the client's connection as soon as the response has data, without waking
    a task. Its events have ids if the client takes them. ``shaped`` converts a refusal to the shape
    of the client's API; default: OpenAI's.
    """

    def __init__(
        self,
        gateway: Gateway,
        response: ResponseStream,
        client: HttpClient,
        writer: HttpWriter,
        send: Send,
        renderer: Renderer,
        shaped: Callable[[Refusal], Refusal] = lambda refusal: refusal,
    ) -> None:
        self._gateway = gateway
        self._response = response
        self._client = client
        self._writer = writer
        self._send = send
        self._renderer = renderer
        self._shaped = shaped
        self._told: ToldEvents | None = None
        self._plain: tuple[bytes, bytes] | None = None
        self._id_prefix = f"id: {response.request_id}/".encode()
        self._is_asked = False
        self._is_over = False
        self._has_written = False

    async def whole(self) -> int:
        response, client, monotonic = self._response, self._client, self._gateway.clock.monotonic
        while True:
            for part in response.read_parts(monotonic()):
                self._renderer.add(part)
            if response.ended:
                break
            await client.wait()
            if client.has_left():
                return 499
            if client.going_away:
                return await self._refuse(GOING_AWAY_REFUSAL)
        refusal = await self._concluded()
        headers = [JSON, request_id_header(response.request_id), *response.headers]
        if refusal is not None:
            response.finish()
            return await self._refuse(refusal)
        body = self._renderer.whole()
        response.finish()
        self._writer.hold()
        await send_response(self._send, 200, headers, body)
        self._writer.release()
        return 200

    async def stream(self, had: EventId | None = None) -> int:
        """Stream the answer. ``had`` is the client's position on another connection: earlier events
        are left out.
        """
        response, client = self._response, self._client
        goes_on = had is not None and had.has_begun
        early = [] if goes_on else await self._early_parts()
        refusal = response.refusal
        if refusal is not None and not early and not goes_on:
            await self._concluded()
            response.finish()
            return await self._refuse(refusal)
        if client.has_left():
            return 499
        await self._start([request_id_header(response.request_id), *response.headers], had)
        if await self._run(early):
            return await self._end()
        if client.going_away and not client.has_left():
            tail = on_one_line(self._renderer.failed(GOING_AWAY_REFUSAL))
            await self._send({"type": "http.response.body", "body": tail})
        return 499

    async def follow(self, headers: Headers) -> int:
        """Stream the events of a response that continues without this client. A refusal is one of
        the events. If this gateway shuts down, the events just cease.
        """
        await self._start(headers, None)
        if await self._run([]):
            return await self._end()
        if self._client.going_away and not self._client.has_left():
            await self._send({"type": "http.response.body", "body": b""})
        return 499

    async def _refuse(self, refusal: Refusal) -> int:
        await send_refusal(self._send, self._shaped(refusal), self._response.request_id)
        return refusal.status

    async def _concluded(self) -> Refusal | None:
        """Store the answer before the client learns of its end."""
        await self._response.conclude()
        refusal = self._response.refusal
        if refusal is None:
            await self._renderer.store()
        else:
            await self._response.release_key()
        return refusal

    # --- a stream ---

    async def _early_parts(self) -> list[Part]:
        """Wait a moment for the first parts, so that a refusal can still have its status."""
        response, client, monotonic = self._response, self._client, self._gateway.clock.monotonic
        give_up_s = monotonic() + _STATUS_WAIT_S
        while True:
            parts = response.read_parts(monotonic())
            if parts or response.ended or response.has_begun:
                return parts
            if client.has_left() or client.going_away:
                return []
            left_s = give_up_s - monotonic()
            if left_s <= 0 or not await client.wait_up_to(left_s):
                return []

    async def _start(self, headers: Headers, had: EventId | None) -> None:
        """Send the head, and the events before the first part that the client lacks."""
        renderer, first = self._renderer, self._renderer.first()
        self._plain = renderer.plain
        if self._client.takes_event_ids:
            self._told = ToldEvents(self._response, renderer, had)
            first = self._told.first(first)
            if self._told.is_resumed:
                self._plain = None
        self._writer.hold()
        start = {"status": 200, "headers": [*SSE_HEADERS, *headers]}
        await self._send({"type": "http.response.start", **start})
        if first:
            self._writer.write([on_one_line(first)])

    async def _run(self, early: list[Part]) -> bool:
        """Write ``early`` and the writer's held events, then parts until the end of the response,
        which the writer holds. Return False if the client leaves before that.

        Comments are sent during silence. On return, the renderer knows all parts of earlier
        connections.
        """
        client, response = self._client, self._response
        keep_alive = SSE_KEEP_ALIVE if self._told is None else SSE_COMMENT
        self._write(early)
        self._writer.release()
        client.on_wake = self._writer.on_writable = self._schedule_flush
        self._schedule_flush()
        try:
            while not (response.ended or client.has_left() or client.going_away):
                if await client.wait_up_to(_KEEP_ALIVE_S):
                    continue
                if not self._has_written and self._writer.is_writable:
                    self._writer.write([keep_alive])
                self._has_written = False
        finally:
            client.on_wake = self._writer.on_writable = None
            self._is_over = True
            if self._told is not None and not client.has_left():
                self._write_events(self._told.catch_up())
        return response.ended and not client.has_left()

    def _schedule_flush(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._gateway.write_coalescer.schedule(self)

    def flush(self) -> None:
        self._is_asked = False
        client, response = self._client, self._response
        if self._is_over or client.has_left():
            return
        now_s = self._gateway.clock.monotonic()
        if not self._writer.is_writable:
            client.sending_since_s = client.sending_since_s or now_s
            return
        client.sending_since_s = None
        if self._plain is not None:
            progress = response.choices[0].read_plain(now_s, self._gateway.metrics.gaps)
            if progress is not None:
                if progress.text:
                    self._write_plain(progress.text, *self._plain)
                return
        parts = response.read_parts(now_s)
        if response.ended:
            self._writer.hold()
            client.call()
        self._write(parts)

    def drop(self, reason: str) -> None:
        self._client.drop(reason)

    def _write_plain(self, text: str, before: bytes, after: bytes) -> None:
        event = b"%b%b%b" % (before, on_one_line(encode(text)), after)
        if self._told is not None:
            next_index = self._response.choices[0].next_index
            self._told.note_plain(len(text), next_index)
            event = b"%b%d\n%b" % (self._id_prefix, next_index, event)
        self._writer.write([event])
        self._has_written = True

    def _write(self, parts: list[Part]) -> None:
        if not parts:
            return
        if self._told is not None:
            self._write_events(self._told.parts(parts))
            return
        render = self._renderer.part
        self._write_events(b"".join([piece for part in parts for piece in render(part)]))

    def _write_events(self, events: bytes) -> None:
        if events:
            self._writer.write([on_one_line(events)])
            self._has_written = True

    async def _end(self) -> int:
        client, writer, renderer = self._client, self._writer, self._renderer
        if self._response.must_conclude or renderer.must_store:
            writer.release()  # the client gets the last text without waiting for that
        refusal = await self._concluded()
        if refusal is not None:
            tail = renderer.failed(refusal)
        else:
            tail = renderer.last() if self._told is None else self._told.last(renderer.last())
        client.sending_since_s = self._gateway.clock.monotonic()
        await self._send({"type": "http.response.body", "body": on_one_line(tail)})
        writer.release()
        if client.has_left():
            return 499
        self._response.finish()
        return 200


async def follow(
    gateway: Gateway,
    scope: Scope,
    receive: Receive,
    send: Send,
    caller: Caller,
    response_id: str,
    render: Callable[[ResponseReader], Renderer],
    headers: Headers,
) -> int:
    """Stream an answer from its beginning, as ``render`` renders it, to its end or until the client
    leaves; the answer continues without the client. Return the HTTP status that was sent.

    Raises ResponseNotFoundError and RedisUnreachableError before anything is sent.
    """
    extensions = scope["extensions"]
    client = HttpClient(gateway.config.client_buffer_bytes, extensions[ABORT_EXTENSION])
    writer: HttpWriter = extensions[WRITER_EXTENSION]
    async with client.watching(receive):
        try:
            response = await gateway.resuming.share(caller, response_id, client)
        except UnknownRequestError:
            raise ResponseNotFoundError(response_id) from None
        try:
            answer = HttpAnswer(gateway, response, client, writer, send, render(response))
            return await answer.follow(headers)
        finally:
            writer.release()
            # No effect if the end was delivered.
            response.abort(client.gone or ClientEnd.DISCONNECTED)
