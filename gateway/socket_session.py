"""The generations of one WebSocket, and the messages on their way to its client."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from gateway.chunks import usage_info
from gateway.core import Gateway
from gateway.errors import Refusal, refusal_of, refusal_of_end
from gateway.http import Send, new_request_id
from gateway.parsing import socket_ask
from gateway.stream import Client, OpenStream
from schemas.control import CancelReason
from schemas.errors import MillraceError
from schemas.frames import Cancelled
from schemas.frames import Done as DoneFrame
from schemas.jobs import Source
from schemas.websocket import Accepted, Done, Error, Generate, Queued, ServerMessage, Started

_log = logging.getLogger(__name__)

_MAX_ID_CHARACTERS = 128
_encode_text = msgspec.json.encode


class Generation:
    """One generation of a socket, from its message to its ``done`` or ``error``."""

    __slots__ = ("cancelled", "delta_head", "id", "queued", "request_id", "started", "stream")

    def __init__(self, generation_id: str, request_id: str) -> None:
        self.id = generation_id
        self.request_id = request_id
        self.stream: OpenStream | None = None
        self.cancelled = False
        self.queued: object = None
        self.started: object = None
        names = _encode_text({"id": generation_id, "request_id": request_id}).decode()
        self.delta_head = f'{{"type":"delta",{names[1:-1]},"index":'


class SocketSession(Client):
    """Owns the generations of one socket.

    Whatever is ready in one turn of the event loop goes out together. ``dropped`` says why the
    client must be parted with; ``close`` cancels everything that still runs.
    """

    def __init__(self, gateway: Gateway, send: Send) -> None:
        super().__init__(gateway.config.client_buffer_bytes)
        self._gateway = gateway
        self._send = send
        self._generations: dict[str, Generation] = {}
        self._by_request: dict[str, Generation] = {}
        self._ready: list[OpenStream] = []
        self._texts: list[str] = []
        self._wakeup = asyncio.Event()
        self._dropped_event = asyncio.Event()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self.dropped = ""

    # What streams call.

    def wake(self, stream: OpenStream) -> None:
        self._ready.append(stream)
        self._wakeup.set()

    def drop(self, reason: str) -> None:
        self.dropped = self.dropped or reason
        self._dropped_event.set()

    async def wait_dropped(self) -> None:
        await self._dropped_event.wait()

    # What the client asks for.

    def generate(self, message: Generate) -> Error | None:
        """Start a generation in the background; or say why not."""
        limit = self._gateway.config.max_generations_per_socket
        if not 0 < len(message.id) <= _MAX_ID_CHARACTERS:
            text = f"id must have 1 to {_MAX_ID_CHARACTERS} characters."
            return Error(code="invalid_parameter", message=text, param="id")
        if message.id in self._generations:
            # Without its id, which would end the one that runs.
            text = f"A generation with the id {message.id!r} runs on this socket."
            return Error(code="duplicate_id", message=text, param="id")
        if len(self._generations) >= limit:
            text = f"{limit} generations run on this socket; wait for one to end."
            return Error(code="too_many_generations", message=text, id=message.id)
        generation = Generation(message.id, new_request_id("chatcmpl"))
        self._generations[message.id] = generation
        task = asyncio.create_task(self._start(generation, message))
        self._starting.add(task)
        task.add_done_callback(partial(self._check_start, generation))
        return None

    def runs(self, generation_id: str) -> bool:
        return generation_id in self._generations

    def cancel(self, generation_id: str) -> None:
        """Stop a generation; its ``done`` follows."""
        generation = self._generations.get(generation_id)
        if generation is None:
            text = f"No generation with the id {generation_id!r} runs on this socket."
            self.say(Error(code="unknown_id", message=text, param="id", id=generation_id))
            return
        generation.cancelled = True
        if generation.stream is not None:
            self._gateway.streams.cancel(generation.stream, CancelReason.CLIENT)

    def say(self, message: ServerMessage) -> None:
        if isinstance(message, Error):
            self._gateway.metrics.refusals.labels(message.code).inc()
        self.say_text(_encode_text(message).decode())

    def say_text(self, text: str) -> None:
        """Queue a message. What the client asks for and does not read counts against its bound."""
        self._texts.append(text)
        self._wakeup.set()
        self.pending_bytes += len(text)
        if self.pending_bytes > self.limit_bytes:
            self.drop("slow_client")

    def close(self) -> None:
        """The socket is gone: cancel what runs."""
        self._closed = True
        outcome = self.dropped or "disconnect"
        for generation in self._generations.values():
            if generation.stream is not None:
                self._gateway.streams.leave(generation.stream, outcome)

    # From a message to an accepted stream.

    async def _start(self, generation: Generation, message: Generate) -> None:
        gateway = self._gateway
        try:
            ask = socket_ask(message)
            stream = await gateway.begin(ask, generation.request_id, Source.WEBSOCKET, self)
        except MillraceError as error:
            self._forget(generation)
            self._say_refusal(generation, refusal_of(error), accepted=False)
            return
        generation.stream = stream
        if self._closed:
            gateway.streams.leave(stream, self.dropped or "disconnect")
            return
        self._by_request[stream.request_id] = generation
        self.say(Accepted(id=generation.id, request_id=stream.request_id))
        if generation.cancelled:
            gateway.streams.cancel(stream, CancelReason.CLIENT)
        # Frames may have come before the queue's answer did.
        self.wake(stream)

    def _check_start(self, generation: Generation, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a generation could not be started", exc_info=error)
        self._forget(generation)
        failed = Refusal(status=500, code="internal_error", message="The gateway failed.")
        self._say_refusal(generation, failed, accepted=False)

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.id, None)
        self._by_request.pop(generation.request_id, None)

    # From streams to the socket.

    async def send_all(self) -> None:
        """Send what is ready, for as long as the socket lives."""
        monotonic = self._gateway.clock.monotonic
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            while self._texts or self._ready:
                texts, self._texts = self._texts, []
                self.pending_bytes -= sum(map(len, texts))
                ready, self._ready = self._ready, []
                now_s = monotonic()
                for stream in ready:
                    self._collect(stream, now_s, texts)
                self.sending_since_s = now_s
                for text in texts:
                    await self._send({"type": "websocket.send", "text": text})
                self.sending_since_s = None

    def _collect(self, stream: OpenStream, now_s: float, texts: list[str]) -> None:
        """Append what a stream has for its client, its end last."""
        generation = self._by_request.get(stream.request_id)
        if generation is None:
            return
        reader = stream.reader
        if reader.queued is not generation.queued and reader.queued is not None:
            generation.queued = reader.queued
            texts.append(self._queued(generation, stream))
        if reader.started is not generation.started and reader.started is not None:
            generation.started = reader.started
            texts.append(self._started(generation, stream))
        index, num_tokens, text = stream.take(now_s, self._gateway.metrics.gaps)
        if num_tokens:
            texts.append(
                f'{generation.delta_head}{index},"num_tokens":{num_tokens},"text":'
                f"{_encode_text(text).decode()}}}"
            )
        if stream.ended:
            texts.append(self._end(generation, stream))

    def _queued(self, generation: Generation, stream: OpenStream) -> str:
        queued = stream.reader.queued
        assert queued is not None
        message = Queued(
            id=generation.id,
            request_id=stream.request_id,
            position=queued.position,
            eta_s=queued.eta_s,
        )
        return _encode_text(message).decode()

    def _started(self, generation: Generation, stream: OpenStream) -> str:
        started = stream.reader.started
        assert started is not None
        message = Started(
            id=generation.id,
            request_id=stream.request_id,
            prompt_tokens=started.num_prompt_tokens,
            cached_tokens=started.num_cached_tokens,
        )
        return _encode_text(message).decode()

    def _end(self, generation: Generation, stream: OpenStream) -> str:
        self._forget(generation)
        self._gateway.streams.finish(stream)
        end = stream.reader.terminal
        assert end is not None
        usage = stream.reader.usage
        cancelled = isinstance(end, Cancelled) and stream.cancel_reason is CancelReason.CLIENT
        if isinstance(end, DoneFrame) or cancelled:
            message: ServerMessage = Done(
                id=generation.id,
                request_id=stream.request_id,
                finish_reason=end.finish_reason if isinstance(end, DoneFrame) else "cancelled",
                usage=None if usage is None else usage_info(usage),
            )
        else:
            message = self._error(generation, refusal_of_end(end), accepted=True)
        return _encode_text(message).decode()

    def _say_refusal(self, generation: Generation, refusal: Refusal, *, accepted: bool) -> None:
        if not self._closed:
            self.say(self._error(generation, refusal, accepted=accepted))

    def _error(self, generation: Generation, refusal: Refusal, *, accepted: bool) -> Error:
        return Error(
            id=generation.id,
            request_id=generation.request_id if accepted else None,
            code=refusal.code,
            message=refusal.message,
            param=refusal.param,
            retry_after_s=refusal.retry_after_s,
        )
