"""``POST /v1/chat/completions`` and ``/v1/completions``, streamed and whole, on bare ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from gateway.chunks import SSE_DONE, SSE_KEEP_ALIVE, ChatChunks, Chunks, CompletionChunks, sse_data
from gateway.core import Gateway
from gateway.errors import (
    InternalError,
    MethodNotAllowedError,
    Refusal,
    SlowRequestError,
    refusal_of,
)
from gateway.errors import refusal_of_end as refuse_end
from gateway.http import (
    JSON,
    ClientLeftError,
    Receive,
    Scope,
    Send,
    new_request_id,
    read_body,
    request_id_header,
    send_refusal,
    send_refusal_and_close,
    send_response,
    wait_for_disconnect,
)
from gateway.parsing import Ask, chat_ask, completion_ask, decode
from gateway.stream import Client, OpenStream
from schemas.errors import MillraceError, PayloadTooLargeError
from schemas.frames import Done
from schemas.jobs import Source
from schemas.openai import ChatCompletionRequest, CompletionRequest

_log = logging.getLogger(__name__)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
# A request that is refused this soon after it was accepted still gets its HTTP status.
_STATUS_WAIT_S = 3.0
_KEEP_ALIVE_S = 15.0
ABORT_EXTENSION = "millrace.abort"

_Request = ChatCompletionRequest | CompletionRequest


class _HttpClient(Client):
    """One connection that waits for one stream; ``gone`` once it was closed or dropped."""

    def __init__(self, limit_bytes: int, abort: Callable[[], None]) -> None:
        super().__init__(limit_bytes)
        self._abort = abort
        self._wakeup = asyncio.Event()
        self.gone = ""

    def wake(self, _stream: OpenStream) -> None:
        self._wakeup.set()

    def has_left(self) -> bool:
        return bool(self.gone)

    def drop(self, reason: str) -> None:
        self.leave(reason)
        self._abort()

    def leave(self, reason: str) -> None:
        self.gone = self.gone or reason
        self._wakeup.set()

    async def wait(self) -> None:
        """Return when there is something to take, or nobody to take it."""
        await self._wakeup.wait()
        self._wakeup.clear()

    async def wait_up_to(self, timeout_s: float) -> bool:
        """Like ``wait``; False if nothing happened in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            return False
        return True


class CompletionHandler:
    """One of the two endpoints."""

    def __init__(self, gateway: Gateway, *, chat: bool) -> None:
        self._gateway = gateway
        self._chat = chat
        self._route = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
        self._text_decoder = msgspec.json.Decoder(CompletionRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id("chatcmpl" if self._chat else "cmpl")
        try:
            status = await self._answer(scope, receive, send, request_id)
        except (PayloadTooLargeError, SlowRequestError) as error:
            refusal = refusal_of(error)
            status = refusal.status
            await send_refusal_and_close(receive, send, refusal, request_id)
        except MillraceError as error:
            refusal = refusal_of(error)
            status = refusal.status
            await send_refusal(send, refusal, request_id)
        except ClientLeftError:
            status = 499
        self._gateway.metrics.requests.labels(self._route, str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> int:
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{self._route} takes POST, not {scope['method']}.")
        body = await read_body(scope, receive, self._gateway.config.max_body_bytes)
        request, ask = self._parse(body)
        client = _HttpClient(
            self._gateway.config.client_buffer_bytes, scope["extensions"][ABORT_EXTENSION]
        )
        watch = asyncio.create_task(_watch(receive, client))
        try:
            stream = await self._begin(ask, request_id, client)
            try:
                return await self._deliver(request, stream, client, send)
            finally:
                # Nothing to do if the end was delivered.
                self._gateway.streams.leave(stream, client.gone or "disconnect")
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _begin(self, ask: Ask, request_id: str, client: _HttpClient) -> OpenStream:
        try:
            return await self._gateway.begin(ask, request_id, Source.HTTP, client)
        except MillraceError:
            raise
        except Exception as error:
            # A bug is answered like any other error, and stands in the log.
            _log.exception("a request could not be started", extra={"request_id": request_id})
            raise InternalError("The gateway failed to answer this request.") from error

    def _parse(self, body: bytes) -> tuple[_Request, Ask]:
        if self._chat:
            chat = decode(self._chat_decoder, body)
            return chat, chat_ask(chat)
        text = decode(self._text_decoder, body)
        return text, completion_ask(text)

    async def _deliver(
        self, request: _Request, stream: OpenStream, client: _HttpClient, send: Send
    ) -> int:
        options = request.stream_options
        make = ChatChunks if self._chat else CompletionChunks
        chunks = make(
            stream.request_id,
            request.model,
            stream.job.received_ns // 1_000_000_000,
            with_usage=bool(options is not None and options.include_usage),
        )
        if request.stream:
            with_usage = bool(options is not None and options.include_usage)
            return await self._stream(stream, client, send, chunks, with_usage=with_usage)
        return await self._whole(stream, client, send, chunks)

    async def _whole(
        self, stream: OpenStream, client: _HttpClient, send: Send, chunks: Chunks
    ) -> int:
        gateway = self._gateway
        parts: list[str] = []
        while not stream.ended:
            await client.wait()
            if client.has_left():
                return 499
            parts.append(stream.take(gateway.clock.monotonic(), gateway.metrics.gaps).text)
        parts.append(stream.take(gateway.clock.monotonic(), gateway.metrics.gaps).text)
        end = stream.reader.terminal
        assert end is not None
        gateway.streams.finish(stream)
        if not isinstance(end, Done):
            refusal = refuse_end(end)
            await send_refusal(send, refusal, stream.request_id)
            return refusal.status
        assert stream.reader.usage is not None
        body = chunks.whole("".join(parts), end.finish_reason, stream.reader.usage)
        headers = [JSON, request_id_header(stream.request_id)]
        await send_response(send, 200, headers, body)
        return 200

    async def _stream(
        self,
        stream: OpenStream,
        client: _HttpClient,
        send: Send,
        chunks: Chunks,
        *,
        with_usage: bool,
    ) -> int:
        refusal = await self._early_refusal(stream, client)
        if refusal is not None:
            self._gateway.streams.finish(stream)
            await send_refusal(send, refusal, stream.request_id)
            return refusal.status
        if client.has_left():
            return 499
        headers = [*_SSE_HEADERS, request_id_header(stream.request_id)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": chunks.first(), "more_body": True})
        if not await self._pump(stream, client, send, chunks):
            return 499
        tail = self._last_events(stream, chunks, with_usage=with_usage)
        client.sending_since_s = self._gateway.clock.monotonic()
        await send({"type": "http.response.body", "body": tail})
        if client.has_left():
            return 499
        self._gateway.streams.finish(stream)
        return 200

    async def _early_refusal(self, stream: OpenStream, client: _HttpClient) -> Refusal | None:
        """Wait a moment for a sign of life, so that a refusal can still have its status."""
        reader = stream.reader
        give_up_s = self._gateway.clock.monotonic() + _STATUS_WAIT_S
        while not (reader.started or reader.has_pending or reader.terminal or client.has_left()):
            left_s = give_up_s - self._gateway.clock.monotonic()
            if left_s <= 0 or not await client.wait_up_to(left_s):
                return None
            stream.is_ready = False
        client.wake(stream)
        end = reader.terminal
        if end is None or isinstance(end, Done) or reader.has_pending:
            return None
        return refuse_end(end)

    async def _pump(
        self, stream: OpenStream, client: _HttpClient, send: Send, chunks: Chunks
    ) -> bool:
        """Send text as it comes until the stream's end; False if the client is gone."""
        monotonic = self._gateway.clock.monotonic
        gaps = self._gateway.metrics.gaps
        while True:
            if not (stream.reader.has_pending or stream.ended):
                if stream.num_delivered:
                    await client.wait()
                elif not await client.wait_up_to(_KEEP_ALIVE_S):
                    await send(
                        {"type": "http.response.body", "body": SSE_KEEP_ALIVE, "more_body": True}
                    )
            if client.has_left():
                return False
            now_s = monotonic()
            text = stream.take(now_s, gaps).text
            if text:
                client.sending_since_s = now_s
                await send(
                    {"type": "http.response.body", "body": chunks.text(text), "more_body": True}
                )
                client.sending_since_s = None
                if client.has_left():
                    return False
            elif stream.ended:
                return True

    def _last_events(self, stream: OpenStream, chunks: Chunks, *, with_usage: bool) -> bytes:
        end = stream.reader.terminal
        assert end is not None
        if not isinstance(end, Done):
            return sse_data(refuse_end(end).body) + SSE_DONE
        tail = chunks.finish(end.finish_reason)
        if with_usage:
            assert stream.reader.usage is not None
            tail += chunks.usage(stream.reader.usage)
        return tail + SSE_DONE


async def _watch(receive: Receive, client: _HttpClient) -> None:
    await wait_for_disconnect(receive)
    client.leave("disconnect")
