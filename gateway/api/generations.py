"""The endpoints that answer with generations, streamed and whole, on bare ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.api.client_connection import ABORT_EXTENSION, HttpClient
from gateway.api.event_pump import EventPump
from gateway.errors import (
    GOING_AWAY_REFUSAL,
    InternalError,
    MethodNotAllowedError,
    Refusal,
    SlowRequestError,
    refusal_of,
)
from gateway.rendering.rendering import Endpoint, Prepared, Renderer
from gateway.request.index import digest_of
from gateway.request.response_stream import Answer
from gateway.request.tracing import TRACEPARENT, RequestTrace
from gateway.streams.parts import Part
from gateway.tenancy.caller import Caller
from gateway.transport.connection_writer import WIRE_EXTENSION, Wire
from gateway.transport.event_ids import parse_event_id
from gateway.transport.http import (
    ACCEPTED,
    CALLER,
    JSON,
    ClientLeftError,
    Receive,
    Scope,
    Send,
    header_of,
    new_request_id,
    read_body,
    request_id_header,
    send_refusal,
    send_refusal_and_close,
    send_response,
)
from schemas.errors import MillraceError, ParameterError, PayloadTooLargeError
from schemas.jobs import Source

if TYPE_CHECKING:
    from gateway.core import Gateway

_log = logging.getLogger(__name__)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
# A request that is refused this soon after it was accepted still gets its HTTP status.
_STATUS_WAIT_S = 3.0
_KEY_FORM = re.compile(r"[\x21-\x7e]{1,255}")


class GenerationHandler:
    """One endpoint."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id(self._endpoint.id_prefix)
        traces, trace = self._gateway.traces, None
        if traces is not None:
            caller_span = header_of(scope, TRACEPARENT)
            trace = traces.begin(caller_span, self._endpoint.route, scope["method"])
            send = send if trace is None else trace.with_headers(send)
        status, refusal = 500, None
        try:
            status = await self._answer(scope, receive, send, request_id, trace)
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
        finally:
            if trace is not None:
                trace.over(status, refusal)
            if refusal is not None and not scope.get(ACCEPTED):
                self._gateway.refusals.note(
                    self._endpoint.route, refusal, scope.get(CALLER), request_id
                )
        self._gateway.metrics.requests.labels(self._endpoint.route, str(status)).inc()

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        trace: RequestTrace | None,
    ) -> int:
        gateway, endpoint = self._gateway, self._endpoint
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{endpoint.route} takes POST, not {scope['method']}.")
        with _bugs_answered(request_id):
            caller = await gateway.identity.caller(scope)
        async with gateway.entries.refusals_count(caller, request_id):
            return await self._answer_to(caller, scope, receive, send, request_id, trace)

    async def _answer_to(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        trace: RequestTrace | None,
    ) -> int:
        gateway, endpoint = self._gateway, self._endpoint
        with _bugs_answered(request_id):
            body = await read_body(scope, receive, gateway.config)
            await gateway.entries.admit(caller, request_id, len(body))
            prepared = await endpoint.prepare(body, caller, gateway.prompts)
        key = _idempotency_key(scope)
        last_event_id = header_of(scope, b"last-event-id")
        client = HttpClient(
            gateway.config.client_buffer_bytes, scope["extensions"][ABORT_EXTENSION]
        )
        watch = asyncio.create_task(client.watch(receive))
        try:
            with _bugs_answered(request_id):
                if last_event_id is not None:
                    answer = await self._resume(last_event_id, prepared, caller, client)
                    if trace is not None:
                        trace.follow(answer)
                elif key:
                    digest = digest_of(endpoint.route.encode(), body)
                    answer = await gateway.idempotency.begin(
                        key, digest, prepared.ask, caller, request_id, client, trace=trace
                    )
                else:
                    answer = await gateway.asker.begin(
                        prepared.ask, caller, request_id, Source.HTTP, client, trace=trace
                    )
            scope[ACCEPTED] = True  # it has a record of its own now, however it ends
            try:
                wire = scope["extensions"][WIRE_EXTENSION]
                return await self._deliver(prepared, answer, client, wire, send)
            finally:
                # Nothing to do if the end was delivered.
                if answer.is_kept or (client.going_away and prepared.stream):
                    answer.hold(None, client.gone or "disconnect")
                else:
                    answer.leave(client.gone or "disconnect")
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _resume(
        self, last_event_id: str, prepared: Prepared, caller: Caller, client: HttpClient
    ) -> Answer:
        if not prepared.stream:
            raise ParameterError("last-event-id", "Last-Event-ID goes only with stream: true.")
        request_id, indices = parse_event_id(last_event_id)
        return await self._gateway.resuming.resume(caller, request_id, indices, client)

    async def _deliver(
        self, prepared: Prepared, answer: Answer, client: HttpClient, wire: Wire, send: Send
    ) -> int:
        with _bugs_answered(answer.request_id):
            renderer = prepared.render(answer)
            if not prepared.stream:
                return await self._whole(answer, client, send, renderer)
        return await self._stream(answer, client, wire, send, renderer)

    async def _whole(
        self, answer: Answer, client: HttpClient, send: Send, renderer: Renderer
    ) -> int:
        monotonic = self._gateway.clock.monotonic
        while True:
            for part in answer.take(monotonic()):
                renderer.add(part)
            if answer.ended:
                break
            await client.wait()
            if client.has_left():
                return 499
            if client.going_away:
                await send_refusal(send, GOING_AWAY_REFUSAL, answer.request_id)
                return GOING_AWAY_REFUSAL.status
        refusal = await self._concluded(answer, renderer)
        headers = [JSON, request_id_header(answer.request_id), *answer.headers]
        if refusal is not None:
            answer.finish()
            await send_refusal(send, refusal, answer.request_id)
            return refusal.status
        body = renderer.whole()
        answer.finish()
        await send_response(send, 200, headers, body)
        return 200

    async def _stream(
        self, answer: Answer, client: HttpClient, wire: Wire, send: Send, renderer: Renderer
    ) -> int:
        goes_on = any(answer.first_indices)
        early = [] if goes_on else await self._early_parts(answer, client)
        refusal = answer.refusal
        if refusal is not None and not early and not goes_on:
            await self._concluded(answer, renderer)
            answer.finish()
            await send_refusal(send, refusal, answer.request_id)
            return refusal.status
        if client.has_left():
            return 499
        headers = [*_SSE_HEADERS, request_id_header(answer.request_id), *answer.headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        first = b"" if any(answer.first_indices) else renderer.first()
        await send({"type": "http.response.body", "body": first, "more_body": True})
        pump = EventPump(self._gateway, answer, client, wire, renderer)
        if not await pump.run(early):
            if client.going_away and not client.has_left():
                tail = renderer.failed(GOING_AWAY_REFUSAL)
                await send({"type": "http.response.body", "body": tail})
            return 499
        refusal = await self._concluded(answer, renderer)
        tail = renderer.last() if refusal is None else renderer.failed(refusal)
        client.sending_since_s = self._gateway.clock.monotonic()
        await send({"type": "http.response.body", "body": tail})
        if client.has_left():
            return 499
        answer.finish()
        return 200

    async def _concluded(self, answer: Answer, renderer: Renderer) -> Refusal | None:
        """Store what is to be kept before the client learns of the end."""
        await answer.conclude()
        refusal = answer.refusal
        if refusal is None:
            await renderer.store()
        elif refusal.retry_after_s is not None and answer.idempotency_key:
            await self._gateway.idempotency.release(answer)
        return refusal

    async def _early_parts(self, answer: Answer, client: HttpClient) -> list[Part]:
        """Wait a moment for a sign of life, so that a refusal can still have its status."""
        monotonic = self._gateway.clock.monotonic
        give_up_s = monotonic() + _STATUS_WAIT_S
        while True:
            parts = answer.take(monotonic())
            if parts or answer.ended or answer.has_begun:
                return parts
            if client.has_left() or client.going_away:
                return []
            left_s = give_up_s - monotonic()
            if left_s <= 0 or not await client.wait_up_to(left_s):
                return []


@contextlib.contextmanager
def _bugs_answered(request_id: str) -> Iterator[None]:
    """A bug is answered like any other error, and stands in the log."""
    try:
        yield
    except (MillraceError, ClientLeftError):
        raise
    except Exception as error:
        _log.exception("a request failed", extra={"request_id": request_id})
        raise InternalError("The gateway failed to answer this request.") from error


def _idempotency_key(scope: Scope) -> str:
    key = header_of(scope, b"idempotency-key")
    if key is None:
        return ""
    if not _KEY_FORM.fullmatch(key):
        raise ParameterError(
            "idempotency-key", "Idempotency-Key must have 1 to 255 printable ASCII characters."
        )
    return key
