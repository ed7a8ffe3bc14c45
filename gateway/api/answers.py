"""Answers to their clients, streamed and whole, and what is stored at their end."""

from __future__ import annotations

from collections.abc import Callable

from millrace.gateway.api.client_connection import HttpClient
from millrace.gateway.api.event_pump import EventPump
from millrace.gateway.core import Gateway
from millrace.gateway.errors import GOING_AWAY_REFUSAL, Refusal
from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.parts import Part
from millrace.gateway.transport.connection_writer import ResponseWriter
from millrace.gateway.transport.http import (
    JSON,
    Headers,
    Send,
    request_id_header,
    send_refusal,
    send_response,
)
from millrace.runtime.json.lines import on_one_line

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
# A request that is refused this soon after it was accepted still gets its HTTP status.
_STATUS_WAIT_S = 3.0


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
        writer: ResponseWriter,
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
        writer: ResponseWriter,
        send: Send,
        renderer: Renderer,
    ) -> int:
        goes_on = any(response.first_indices)
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
        first = b"" if goes_on else renderer.first()
        await _start(writer, send, headers, first)
        pump = EventPump(self._gateway, response, client, writer, renderer)
        if not await pump.run(early):
            if client.going_away and not client.has_left():
                tail = on_one_line(renderer.failed(GOING_AWAY_REFUSAL))
                await send({"type": "http.response.body", "body": tail})
            return 499
        return await self._last(response, client, writer, send, renderer)

    async def follow(
        self,
        response: ResponseStream,
        client: HttpClient,
        writer: ResponseWriter,
        send: Send,
        renderer: Renderer,
        headers: Headers,
    ) -> int:
        """The events of a response that goes on without this client: a refusal is one of them, and
        if this gateway shuts down they just cease."""
        await _start(writer, send, headers, renderer.first())
        pump = EventPump(self._gateway, response, client, writer, renderer)
        if await pump.run([]):
            return await self._last(response, client, writer, send, renderer)
        if client.going_away and not client.has_left():
            await send({"type": "http.response.body", "body": b""})
        return 499

    async def _last(
        self,
        response: ResponseStream,
        client: HttpClient,
        writer: ResponseWriter,
        send: Send,
        renderer: Renderer,
    ) -> int:
        if response.must_conclude or renderer.must_store:
            writer.release()  # the client need not wait for that with the last of the text
        refusal = await self._concluded(response, renderer)
        tail = renderer.last() if refusal is None else renderer.failed(refusal)
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
            await self._gateway.idempotency.release_of_failure(response)
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


async def _start(writer: ResponseWriter, send: Send, headers: Headers, first: bytes) -> None:
    """The head of a stream, and the events before any part."""
    writer.hold()
    start = {"status": 200, "headers": [*_SSE_HEADERS, *headers]}
    await send({"type": "http.response.start", **start})
    if first:
        writer.write([on_one_line(first)])
