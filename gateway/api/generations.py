"""Generation endpoints, streamed and whole, on bare ASGI."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from millrace.gateway.api.answers import ABORT_EXTENSION, HttpAnswer, HttpClient, follow
from millrace.gateway.api.event_ids import parse_event_id
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import Endpoint, Prepared
from millrace.gateway.errors import (
    InternalError,
    MethodNotAllowedError,
    Refusal,
    SlowRequestError,
    refusal_of,
)
from millrace.gateway.request.index import digest_of
from millrace.gateway.request.submitter import Requester
from millrace.gateway.request.tracing import TRACEPARENT, RequestTrace
from millrace.gateway.streams.stream import DetachedClient
from millrace.gateway.transport.connection_writer import WRITER_EXTENSION, HttpWriter
from millrace.gateway.transport.http import (
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
    refuse_and_close,
    request_id_header,
    send_refusal,
    send_response,
)
from millrace.schemas.chat.asked import Asked
from millrace.schemas.errors import MillraceError, ParameterError, PayloadTooLargeError
from millrace.schemas.records import ClientEnd

_log = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream"
_KEY_FORM = re.compile(r"[\x21-\x7e]{1,255}")


class GenerationHandler:
    """ASGI handler of one generation endpoint."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = self._gateway.clock.monotonic()
        request_id = new_request_id(self._endpoint.id_prefix)
        traces, trace = self._gateway.traces, None
        if traces is not None:
            caller_span = header_of(scope, TRACEPARENT)
            trace = traces.start(caller_span, self._endpoint.route, scope["method"])
            send = send if trace is None else trace.with_headers(send)
        status, refusal = 500, None
        try:
            status = await self._answer(scope, receive, send, request_id, trace, arrived_s)
        except (PayloadTooLargeError, SlowRequestError) as error:
            refusal = refusal_of(error)
            status = refusal.status
            await refuse_and_close(
                receive, send, self._endpoint.shaped(refusal), [request_id_header(request_id)]
            )
        except MillraceError as error:
            refusal = refusal_of(error)
            status = refusal.status
            await send_refusal(send, self._endpoint.shaped(refusal), request_id)
        except ClientLeftError:
            status = 499
        finally:
            if trace is not None:
                trace.finish(status, refusal)
            if refusal is not None:
                self._note(refusal, scope, request_id)
        self._gateway.metrics.count_request(self._endpoint.route, status)

    def _note(self, refusal: Refusal, scope: Scope, request_id: str) -> None:
        """Record a refusal. An accepted request has a record of its own."""
        route, caller = self._endpoint.route, scope.get(CALLER)
        if not scope.get(ACCEPTED):
            self._gateway.refusals.note(route, refusal, caller, request_id)
        elif caller is not None:
            self._gateway.failure_log.failed(route, refusal, caller.tenant, request_id)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        trace: RequestTrace | None,
        arrived_s: float,
    ) -> int:
        gateway, endpoint = self._gateway, self._endpoint
        if scope["method"] != "POST":
            raise MethodNotAllowedError(endpoint.route, scope["method"], ["POST"])
        with _bugs_answered(request_id):
            caller = await gateway.identity.caller(scope)
        async with gateway.admission.refusals_count(caller, request_id):
            with _bugs_answered(request_id):
                body = await read_body(scope, receive, gateway.config)
                await gateway.admission.admit_body(caller, request_id, len(body))
                prepared = await endpoint.prepare(body, caller, gateway.prompts)
            key = _idempotency_key(scope)
            digest = digest_of(endpoint.route.encode(), body) if key else ""
            asked = Asked(api=endpoint.api, stream=prepared.stream)
            if prepared.begin is not None:
                requester = Requester(
                    caller, DetachedClient(lambda: None), trace=trace, asked=asked
                )
                return await self._in_background(
                    prepared, requester, request_id, key, digest, scope, receive, send
                )
            last_event_id, had = header_of(scope, b"last-event-id"), None
            client = HttpClient(
                gateway.config.client_buffer_bytes,
                scope["extensions"][ABORT_EXTENSION],
                takes_event_ids=bool(key or last_event_id) or _accepts_events(scope),
            )
            writer: HttpWriter = scope["extensions"][WRITER_EXTENSION]
            requester = Requester(caller, client, trace=trace, arrived_s=arrived_s, asked=asked)
            async with client.watching(receive):
                with _bugs_answered(request_id):
                    if last_event_id is not None:
                        had = parse_event_id(last_event_id)
                        if not prepared.stream:
                            raise ParameterError(
                                "last-event-id", "Last-Event-ID goes only with stream: true."
                            )
                        response = await gateway.resuming.resume(
                            caller, had.request_id, had.indices, client
                        )
                        if trace is not None:
                            trace.attach_response(response)
                    else:
                        response = await gateway.submitter.submit(
                            prepared.request, requester, request_id, key, digest
                        )
                scope[ACCEPTED] = True
                try:
                    with _bugs_answered(response.request_id):
                        renderer = prepared.render(response)
                        answer = HttpAnswer(
                            gateway, response, client, writer, send, renderer, endpoint.shaped
                        )
                        if not prepared.stream:
                            return await answer.whole()
                    return await answer.stream(had)
                finally:
                    writer.release()
                    # No effect if the end was delivered.
                    if response.idempotency_key or (client.going_away and prepared.stream):
                        response.detach(None, client.gone or ClientEnd.DISCONNECTED)
                    else:
                        response.abort(client.gone or ClientEnd.DISCONNECTED)

    async def _in_background(
        self,
        prepared: Prepared,
        requester: Requester,
        request_id: str,
        key: str,
        digest: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> int:
        """Start a background response; answer with its initial state, or stream it."""
        assert prepared.begin is not None
        submitter = self._gateway.submitter
        with _bugs_answered(request_id):
            _refuse_last_event_id(scope)
            if key:
                response = await submitter.submit(
                    prepared.request, requester, request_id, key, digest
                )
            else:  # its result is kept under its own id
                response = await submitter.submit_new(
                    prepared.request, requester, request_id, request_id
                )
            scope[ACCEPTED] = True
            answer = await prepared.begin(response)
        headers = [request_id_header(response.request_id), *response.headers]
        if not prepared.stream:
            await send_response(send, 200, [JSON, *headers], answer)
            return 200
        return await follow(
            self._gateway,
            scope,
            receive,
            send,
            response.caller,
            response.request_id,
            prepared.render,
            headers,
        )


@contextlib.contextmanager
def _bugs_answered(request_id: str) -> Iterator[None]:
    """Answer a bug like any other error, and log it."""
    try:
        yield
    except (MillraceError, ClientLeftError):
        raise
    except Exception as error:
        _log.exception("a request failed", extra={"request_id": request_id})
        raise InternalError("The gateway failed to answer this request.") from error


def _refuse_last_event_id(scope: Scope) -> None:
    if header_of(scope, b"last-event-id") is not None:
        raise ParameterError(
            "last-event-id",
            "Follow an answer in the background by GET with stream=true and starting_after.",
        )


def _accepts_events(scope: Scope) -> bool:
    """Return whether the client's ``accept`` header names server-sent events. Several load
    generators parse only ``data:`` lines, as OpenAI's servers send them.
    """
    return _EVENT_STREAM in (header_of(scope, b"accept") or "").lower()


def _idempotency_key(scope: Scope) -> str:
    key = header_of(scope, b"idempotency-key")
    if key is None:
        return ""
    if not _KEY_FORM.fullmatch(key):
        raise ParameterError(
            "idempotency-key", "Idempotency-Key must have 1 to 255 printable ASCII characters."
        )
    return key
