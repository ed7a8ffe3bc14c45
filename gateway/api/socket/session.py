"""Requests of one WebSocket, and its outgoing messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from millrace.gateway.api.socket.messages import SocketRequest
from millrace.gateway.core import Gateway
from millrace.gateway.errors import Refusal, refusal_of
from millrace.gateway.rendering.rendering import encode
from millrace.gateway.request.index import digest_of
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.request.submitter import Requester
from millrace.gateway.streams.stream import Client, OpenStream
from millrace.gateway.tenancy.identity import AuthenticationError, Caller
from millrace.gateway.transport.connection_writer import ConnectionWriter
from millrace.gateway.transport.http import new_request_id
from millrace.registry.requests.parsing import parse_generate
from millrace.schemas.chat.asked import Api, Asked
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import MillraceError, shown
from millrace.schemas.jobs import Source
from millrace.schemas.records import ClientEnd
from millrace.schemas.websocket import Error, Generate, GoingAway, Resume, ServerMessage

_log = logging.getLogger(__name__)

KEY_REVOKED = ClientEnd.KEY_REVOKED
_LAST_WORDS_S = 1.0
_MAX_ID_CHARACTERS = 256
_ROUTE = "/v1/ws"

_Start = Callable[[SocketRequest], Awaitable[ResponseStream]]


class SocketSession(Client):
    """Session that owns the requests of one socket.

    All messages that are ready in one turn of the event loop go out in one write. ``dropped`` is
    the reason for disconnecting the client. ``close`` cancels all running requests, or holds them
    for a returning client. ``caller`` is None until the client has authenticated. ``traceparent``
    came with the handshake: the requests are part of that trace.
    """

    def __init__(
        self,
        gateway: Gateway,
        writer: ConnectionWriter,
        caller: Caller | None,
        traceparent: str | None = None,
    ) -> None:
        super().__init__(gateway.config.client_buffer_bytes)
        self.caller = caller
        self._traceparent = traceparent
        self._gateway = gateway
        self._writer = writer
        writer.on_writable = self._schedule_flush
        self._requests: dict[str, SocketRequest] = {}
        self._ready: list[OpenStream] = []
        self._payloads: list[bytes] = []
        self._is_asked = False
        self._dropped_event = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._holds = False
        self._is_going_away = False
        self._parting = ""
        self._last_words = b""  # behind what there is to say of requests
        self.dropped = ""

    # Callbacks of streams.

    def wake(self, stream: OpenStream) -> None:
        self._ready.append(stream)
        if not self._is_asked:
            self._is_asked = True
            self._gateway.write_coalescer.schedule(self)

    def drop(self, reason: str) -> None:
        self.dropped = self.dropped or reason
        self._dropped_event.set()

    def drop_when_said(self, reason: str) -> None:
        """Disconnect the client once all pending messages were sent."""
        self._parting = reason
        self._schedule_flush()

    def expel(self, why: AuthenticationError) -> None:
        """Tell the client that its key was revoked, and disconnect it, even if it does not read the
        message.
        """
        if self._parting:
            return
        self._last_words = encode(Error(code=why.code, message=why.message))
        self.drop_when_said(KEY_REVOKED)
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.drop, KEY_REVOKED)

    async def wait_dropped(self) -> None:
        await self._dropped_event.wait()

    def announce_going_away(self) -> None:
        """Announce the shutdown of this gateway: the socket ends with its last request."""
        self._is_going_away = True
        self.say(GoingAway())

    # Messages of the client.

    def generate(self, message: Generate) -> None:
        """Start a request in the background, or send a refusal."""
        self._begin(message.id, partial(self._answer_to, message))

    def resume(self, message: Resume) -> None:
        """Resume a request of another socket, or send a refusal."""
        self._begin(message.id, partial(self._resumed, message))

    def runs(self, client_request_id: str) -> bool:
        return client_request_id in self._requests

    def cancel(self, client_request_id: str) -> None:
        """Stop a request; its ``done`` follows."""
        request = self._requests.get(client_request_id)
        if request is None:
            text = f"No generation with the id {shown(client_request_id)!r} runs on this socket."
            self.refuse(
                Error(code="unknown_id", message=text, param="id", id=client_request_id), 404
            )
            return
        request.cancelled = True
        if request.response is not None:
            request.response.cancel(CancelReason.CLIENT)

    def refuse(self, error: Error, status: int, limit: str = "") -> None:
        """Send a refusal of a message. ``status`` is the equivalent HTTP status. An id that is too
        long is left out.
        """
        if error.id is not None and len(error.id) > _MAX_ID_CHARACTERS:
            error = msgspec.structs.replace(error, id=None)
        self.note_refusal(Refusal(status=status, code=error.code, message="", limit=limit))
        self.say(error)

    def note_refusal(
        self, refusal: Refusal, request_id: str = "", caller: Caller | None = None
    ) -> None:
        """Count a refusal."""
        self._gateway.refusals.note(_ROUTE, refusal, caller or self.caller, request_id)

    def say(self, message: ServerMessage) -> None:
        if isinstance(message, Error):
            self._gateway.metrics.refusals.labels(message.code).inc()
        self.say_payload(encode(message))

    def say_payload(self, payload: bytes) -> None:
        """Queue a message. Unread messages count against the client's limit."""
        self._payloads.append(payload)
        self._schedule_flush()
        self.pending_bytes += len(payload)
        if self.pending_bytes > self.limit_bytes:
            self.drop(ClientEnd.SLOW_CLIENT)

    def close(self, *, hold: bool) -> None:
        """Close the session of a closed socket; ``hold`` keeps running requests for a returning
        client.
        """
        self._closed = True
        self._holds = hold
        for request in self._requests.values():
            if request.response is not None:
                self._part_with(request.response)

    # From a message to an accepted answer.

    def _begin(self, client_request_id: str, start: _Start) -> None:
        limit = self._gateway.config.max_generations_per_socket
        if self._parting:
            text = "This socket is being closed."
            self.refuse(Error(code="invalid_api_key", message=text, id=client_request_id), 401)
        elif not 0 < len(client_request_id) <= _MAX_ID_CHARACTERS:
            text = f"id must have 1 to {_MAX_ID_CHARACTERS} characters."
            self.refuse(Error(code="invalid_parameter", message=text, param="id"), 400)
        elif client_request_id in self._requests:
            # Without the id, which would end the running request.
            text = f"A generation with the id {client_request_id!r} runs on this socket."
            self.refuse(Error(code="duplicate_id", message=text, param="id"), 409)
        elif len(self._requests) >= limit:
            text = f"{limit} generations run on this socket; wait for one to end."
            error = Error(code="too_many_generations", message=text, id=client_request_id)
            self.refuse(error, 429, "max_generations_per_socket")
        else:
            now_s = self._gateway.clock.monotonic()
            request = SocketRequest(client_request_id, new_request_id("chatcmpl"), now_s)
            self._requests[client_request_id] = request
            self._spawn(self._start(request, start), request)

    async def _answer_to(self, message: Generate, request: SocketRequest) -> ResponseStream:
        gateway, caller = self._gateway, self._known_caller()
        if gateway.traces is not None:
            request.trace = gateway.traces.start(self._traceparent, _ROUTE, "GET")
        num_items = len(message.messages or message.prompt or ())
        parsed = await gateway.prompts.run(
            caller.tenant, num_items, partial(parse_generate, message)
        )
        requester = Requester(
            caller,
            self,
            Source.WEBSOCKET,
            request,
            request.trace,
            request.arrived_s,
            Asked(api=Api.WEBSOCKET, stream=True),
        )
        key, digest = message.idempotency_key or "", ""
        if key:
            # A repeated request may get a new request id.
            unnamed = msgspec.structs.replace(message, id="")
            digest = digest_of(b"generate", msgspec.json.encode(unnamed))
        return await gateway.submitter.submit(parsed, requester, request.request_id, key, digest)

    async def _resumed(self, message: Resume, request: SocketRequest) -> ResponseStream:
        index = message.next_index
        indices = (index,) if isinstance(index, int) else index
        return await self._gateway.resuming.resume(
            self._known_caller(), message.request_id, indices, self, owner=request
        )

    def _known_caller(self) -> Caller:
        assert self.caller is not None
        return self.caller

    async def _start(self, request: SocketRequest, start: _Start) -> None:
        caller, admission = self._known_caller(), self._gateway.admission
        try:
            async with admission.refusals_count(caller, request.request_id):
                response = await start(request)
        except MillraceError as error:
            refusal = refusal_of(error)
            self.note_refusal(refusal, request.request_id)
            self._forget(request, refusal)
            self._say_refusal(request, refusal)
            return
        request.accept(response)
        if self._closed:
            self._part_with(response)
            return
        self.say(request.accepted(response))
        if request.cancelled:
            response.cancel(CancelReason.CLIENT)
        # Frames may have come before the queue's acknowledgement.
        for choice in response.choices:
            self.wake(choice.stream)

    def _part_with(self, response: ResponseStream) -> None:
        outcome = self.dropped or ClientEnd.DISCONNECTED
        if response.trace is not None:
            response.trace.finish(error=outcome)
        if response.idempotency_key:
            response.detach(None, outcome)
        elif self._holds:
            response.detach(self._gateway.config.resume_grace_s, outcome)
        else:
            response.abort(outcome)

    def _spawn(self, work: Awaitable[None], request: SocketRequest) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._check, request))

    def _check(self, request: SocketRequest, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a request failed in the gateway", exc_info=error)
        failed = Refusal(status=500, code="internal_error", message="The gateway failed.")
        self._forget(request, failed)
        if request.response is not None:
            request.response.abort("failed")
        else:
            self.note_refusal(failed, request.request_id)
        self._say_refusal(request, failed)

    def _forget(self, request: SocketRequest, refusal: Refusal | None = None) -> None:
        if request.trace is not None:
            request.trace.finish(refusal=refusal)
        if self._requests.get(request.id) is request:
            del self._requests[request.id]

    # From answers to the socket.

    def flush(self) -> None:
        """Write pending messages if the client reads."""
        self._is_asked = False
        now_s = self._gateway.clock.monotonic()
        if not self._writer.is_writable:
            self.sending_since_s = self.sending_since_s or now_s
            return
        self.sending_since_s = None
        payloads, self._payloads = self._payloads, []
        self.pending_bytes -= sum(map(len, payloads))
        ready, self._ready = self._ready, []
        for stream in ready:
            self._collect(stream, now_s, payloads)
        if self._last_words:
            payloads.append(self._last_words)
            self._last_words = b""
        if payloads:
            self._writer.write(payloads)
        if self._is_going_away and not self._requests:
            self.drop(ClientEnd.GOING_AWAY)
        if self._parting:
            self.drop(self._parting)

    def _schedule_flush(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._gateway.write_coalescer.schedule(self)

    def _collect(self, stream: OpenStream, now_s: float, payloads: list[bytes]) -> None:
        """Append an answer's messages for its client, its end last."""
        response = stream.owner
        if not isinstance(response, ResponseStream):
            return  # its end was sent
        request = response.owner
        if (
            not isinstance(request, SocketRequest)
            or request.response is not response
            or request.is_concluding
            or self._requests.get(request.id) is not request
        ):
            return
        if stream is response.choices[0].stream:
            request.notes_of(stream, payloads)
        if request.is_plain:
            progress = response.choices[0].read_plain(now_s, self._gateway.metrics.gaps)
            if progress is not None:
                if progress.num_tokens:
                    payloads.append(request.say_plain(progress))
                return
        for part in response.read_parts(now_s):
            payload = request.say(part)
            if payload:
                payloads.append(payload)
        if not response.ended:
            return
        if response.must_conclude:
            request.is_concluding = True
            self._spawn(self._conclude(request, response), request)
        else:
            payloads.append(encode(self._end(request, response)))

    async def _conclude(self, request: SocketRequest, response: ResponseStream) -> None:
        await response.conclude()
        self.say(self._end(request, response))

    def _end(self, request: SocketRequest, response: ResponseStream) -> ServerMessage:
        self._forget(request)
        message = request.end(response)
        response.finish()
        if response.refusal is not None:
            self._spawn(response.release_key(), request)
        return message

    def _say_refusal(self, request: SocketRequest, refusal: Refusal) -> None:
        if not self._closed:
            self.say(request.refuse(refusal))
