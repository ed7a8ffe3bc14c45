"""An answer's parts to its client as server-sent events, as they come."""

from __future__ import annotations

from millrace.gateway.api.client_connection import HttpClient
from millrace.gateway.core import Gateway
from millrace.gateway.rendering.chunks import SSE_COMMENT, SSE_KEEP_ALIVE, encode
from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.parts import Part
from millrace.gateway.transport.connection_writer import ResponseWriter
from millrace.gateway.transport.event_ids import event_id_line, with_event_id
from millrace.runtime.json.lines import on_one_line

_KEEP_ALIVE_S = 15.0


class EventPump:
    """Writes to the client's wire whenever its answer has something, without waking a task. Events
    have ids if the client takes them."""

    def __init__(
        self,
        gateway: Gateway,
        response: ResponseStream,
        client: HttpClient,
        writer: ResponseWriter,
        renderer: Renderer,
    ) -> None:
        self._gateway = gateway
        self._response = response
        self._client = client
        self._writer = writer
        self._render = renderer.part
        self._plain = renderer.plain
        self._id_prefix = f"id: {response.request_id}/".encode()
        self._with_ids = client.takes_event_ids
        self._keep_alive = SSE_COMMENT if self._with_ids else SSE_KEEP_ALIVE
        self._is_asked = False
        self._is_over = False
        self._has_written = False

    async def run(self, early: list[Part]) -> bool:
        """Write ``early`` with what the writer holds, then parts as they come until the answer's
        end, which the writer holds; False if the client is gone before that. Silence is broken by
        comments."""
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
        if self._with_ids:
            event = b"%b%d\n%b" % (self._id_prefix, self._response.choices[0].next_index, event)
        self._writer.write([event])
        self._has_written = True

    def _write(self, parts: list[Part]) -> None:
        if not parts:
            return
        render = self._render
        events = render(parts[0]) if len(parts) == 1 else b"".join(map(render, parts))
        if not events:
            return
        events = on_one_line(events)
        if self._with_ids:
            line = event_id_line(self._id_prefix, self._response.next_indices)
            events = with_event_id(events, line)
        self._writer.write([events])
        self._has_written = True
