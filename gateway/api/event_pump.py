"""An answer's parts to its client as server-sent events, as they come."""

from __future__ import annotations

from millrace.gateway.api.client_connection import HttpClient
from millrace.gateway.api.told_events import ToldEvents
from millrace.gateway.core import Gateway
from millrace.gateway.rendering.chunks import SSE_COMMENT, SSE_KEEP_ALIVE, encode
from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.parts import Part
from millrace.gateway.transport.connection_writer import ResponseWriter
from millrace.gateway.transport.event_ids import EventId
from millrace.runtime.json.lines import on_one_line

_KEEP_ALIVE_S = 15.0


class EventPump:
    """Writes to the client's wire whenever its answer has something, without waking a task. Events
    have ids if the client takes them. Events that the client has, as ``had`` says, are left out."""

    def __init__(
        self,
        gateway: Gateway,
        response: ResponseStream,
        client: HttpClient,
        writer: ResponseWriter,
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
