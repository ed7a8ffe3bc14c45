"""Answers to their clients, streamed and whole, and what is stored at their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

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
# A request that is refused this soon after it was accepted still gets its HTTP status.
_STATUS_WAIT_S = 3.0
ABORT_EXTENSION = "millrace.abort"


class HttpClient(Client):
    """``gone`` says why, once the connection was closed or dropped; ``going_away`` that this
    gateway shuts down and the client is to be told. ``on_wake`` is called when there is something
    to take; without another one, ``wait`` returns. ``takes_event_ids``: the events of a stream are
    to say where it is."""

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
        """Have ``wait`` return."""
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
        """Return when there is something to take, or nobody to take it."""
        await self._wakeup.wait()
        self._wakeup.clear()

    async def wait_up_to(self, timeout_s: float) -> bool:
        """Like ``wait``; False if nothing happened in time."""
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

    async def watch(self, receive: Receive) -> None:
        """Note that the client closes its connection. Runs until then."""
        await wait_for_disconnect(receive)
        self.disconnect(ClientEnd.DISCONNECTED)


class EventPump:
    """Writes to the client's wire whenever its answer has something, without waking a task. Events
    have ids if the client takes them. Events that the client has, as ``had`` says, are left out."""

    def __init__(
        self,
        gateway: Gateway,
        response: ResponseStream,
        client: HttpClient,
        writer: HttpWriter,
        renderer: Renderer,
        had: EventId | None = None,
    ) -> None:
        self._gateway = gateway
        self._response = response
        self._client = client
        self._writer = writer
        self._render = renderer.part
        told = ToldEvents(response, renderer, had) if client.takes_event_ids else None
        self._told = told
        self._plain = None if told is not None and told.is_resumed else renderer.plain
        self._id_prefix = f"id: {response.request_id}/".encode()
        self._keep_alive = SSE_KEEP_ALIVE if told is None else SSE_COMMENT
        self._is_asked = False
        self._is_over = False
        self._has_written = False

    def first(self, events: bytes) -> bytes:
        """Return the events before any part, without those that the client has."""
        return events if self._told is None else self._told.first(events)

    def last(self, events: bytes) -> bytes:
        """Return the events after the last part, without those that the client has."""
        return events if self._told is None else self._told.last(events)

    async def run(self, early: list[Part]) -> bool:
        """Write ``early`` with what the writer holds, then parts as they come until the answer's
        end, which the writer holds; False if the client is gone before that. Silence is broken by
        comments. When it returns, the renderer knows all parts of earlier connections."""
        client, response = self._client, self._response
        self._write(early)
        self._writer.release()
        client.on_wake = self._writer.on_writable = self._schedule_flush
        self._schedule_flush()
        try:
            while not (response.ended or client.has_left() or client.going_away):
                if await client.wait_up_to(_KEEP_ALIVE_S):
                    continue
                if not self._has_written and self._writer.is_writable:
                    self._writer.write([self._keep_alive])
                self._has_written = False
        finally:
            client.on_wake = self._writer.on_writable = None
            self._is_over = True
            if self._told is not None and not client.has_left():
                self._write_events(self._told.catch_up())
        return response.ended and not client.has_left()

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

    def _schedule_flush(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._gateway.write_coalescer.schedule(self)

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
        self._write_events(b"".join([piece for part in parts for piece in self._render(part)]))

    def _write_events(self, events: bytes) -> None:
        if events:
            self._writer.write([on_one_line(events)])
            self._has_written = True


class Answers:
    """Of one gateway. Each call gives the HTTP status that was sent, 499 if the client left."""

    def __init__(
        self, gateway: Gateway, shaped: Callable[[Refusal], Refusal] = lambda refusal: refusal
    ) -> None:
        """``shaped`` makes of a refusal what its client reads, if not OpenAI's."""
        self._gateway = gateway
        self._shaped = shaped

    async def whole(
        self,
        response: ResponseStream,
        client: HttpClient,
        writer: HttpWriter,
        send: Send,
        renderer: Renderer,
    ) -> int:
        monotonic = self._gateway.clock.monotonic
        while True:
            for part in response.read_parts(monotonic()):
                renderer.add(part)
            if response.ended:
                break
            await client.wait()
            if client.has_left():
                return 499
            if client.going_away:
                await self._refuse(send, GOING_AWAY_REFUSAL, response)
                return GOING_AWAY_REFUSAL.status
        refusal = await self._concluded(response, renderer)
        headers = [JSON, request_id_header(response.request_id), *response.headers]
        if refusal is not None:
            response.finish()
            await self._refuse(send, refusal, response)
            return refusal.status
        body = renderer.whole()
        response.finish()
        writer.hold()
        await send_response(send, 200, headers, body)
        writer.release()
        return 200

    async def stream(
        self,
        response: ResponseStream,
        client: HttpClient,
        writer: HttpWriter,
        send: Send,
        renderer: Renderer,
        had: EventId | None = None,
    ) -> int:
        """``had`` says what the client has of the stream from another connection."""
        goes_on = had is not None and had.has_begun
        early = [] if goes_on else await self._early_parts(response, client)
        refusal = response.refusal
        if refusal is not None and not early and not goes_on:
            await self._concluded(response, renderer)
            response.finish()
            await self._refuse(send, refusal, response)
            return refusal.status
        if client.has_left():
            return 499
        headers = [request_id_header(response.request_id), *response.headers]
        pump = EventPump(self._gateway, response, client, writer, renderer, had)
        await _start(writer, send, headers, pump.first(renderer.first()))
        if not await pump.run(early):
            if client.going_away and not client.has_left():
                tail = on_one_line(renderer.failed(GOING_AWAY_REFUSAL))
                await send({"type": "http.response.body", "body": tail})
            return 499
        return await self._last(response, client, writer, send, renderer, pump)

    async def follow(
        self,
        response: ResponseStream,
        client: HttpClient,
        writer: HttpWriter,
        send: Send,
        renderer: Renderer,
        headers: Headers,
    ) -> int:
        """The events of a response that goes on without this client: a refusal is one of them, and
        if this gateway shuts down they just cease."""
        await _start(writer, send, headers, renderer.first())
        pump = EventPump(self._gateway, response, client, writer, renderer)
        if await pump.run([]):
            return await self._last(response, client, writer, send, renderer, pump)
        if client.going_away and not client.has_left():
            await send({"type": "http.response.body", "body": b""})
        return 499

    async def _last(
        self,
        response: ResponseStream,
        client: HttpClient,
        writer: HttpWriter,
        send: Send,
        renderer: Renderer,
        pump: EventPump,
    ) -> int:
        if response.must_conclude or renderer.must_store:
            writer.release()  # the client need not wait for that with the last of the text
        refusal = await self._concluded(response, renderer)
        tail = pump.last(renderer.last()) if refusal is None else renderer.failed(refusal)
        client.sending_since_s = self._gateway.clock.monotonic()
        await send({"type": "http.response.body", "body": on_one_line(tail)})
        writer.release()
        if client.has_left():
            return 499
        response.finish()
        return 200

    async def _refuse(self, send: Send, refusal: Refusal, response: ResponseStream) -> None:
        await send_refusal(send, self._shaped(refusal), response.request_id)

    async def _concluded(self, response: ResponseStream, renderer: Renderer) -> Refusal | None:
        """Store what is to be kept before the client learns of the end."""
        await response.conclude()
        refusal = response.refusal
        if refusal is None:
            await renderer.store()
        else:
            await response.release_key()
        return refusal

    async def _early_parts(self, response: ResponseStream, client: HttpClient) -> list[Part]:
        """Wait a moment for a sign of life, so that a refusal can still have its status."""
        monotonic = self._gateway.clock.monotonic
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


async def _start(writer: HttpWriter, send: Send, headers: Headers, first: bytes) -> None:
    """The head of a stream, and the events before any part."""
    writer.hold()
    start = {"status": 200, "headers": [*SSE_HEADERS, *headers]}
    await send({"type": "http.response.start", **start})
    if first:
        writer.write([on_one_line(first)])


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
    """Stream an answer from its beginning, as far as ``render`` gives it out, to its end or until
    the client leaves, which changes nothing for the answer. The HTTP status that was sent.

    Raises ResponseNotFoundError and RedisUnreachableError before anything is sent.
    """
    extensions = scope["extensions"]
    client = HttpClient(gateway.config.client_buffer_bytes, extensions[ABORT_EXTENSION])
    writer: HttpWriter = extensions[WRITER_EXTENSION]
    watch = asyncio.create_task(client.watch(receive))
    try:
        try:
            response = await gateway.resuming.share(caller, response_id, client)
        except UnknownRequestError:
            raise ResponseNotFoundError(response_id) from None
        try:
            answers = Answers(gateway)
            return await answers.follow(response, client, writer, send, render(response), headers)
        finally:
            writer.release()
            # Nothing to do if its end was delivered.
            response.abort(client.gone or ClientEnd.DISCONNECTED)
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
