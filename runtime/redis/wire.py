"""One connection to Redis on which commands follow one another without waiting for replies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.runtime.faults.connections import ConnectionErrors

Argument = str | bytes | int | float
_LINE_END = b"\r\n"
_STATUS, _ERROR, _INTEGER, _BULK, _ARRAY = b"+-:$*"


class MalformedReplyError(Exception):
    """What came is not of the protocol: whose reply is whose is not known any more."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a server says of a command that it did not do, its code first."""

    text: str


Reply: TypeAlias = bytes | int | list["Reply"] | ErrorReply | None


def pack(command: Sequence[Argument]) -> bytes:
    """A command as the server reads it: an array of bulk strings. Raises UnicodeEncodeError for a
    string that is no text."""
    pieces = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        pieces.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(pieces)


class ReplyReader:
    """Reads replies out of a stream of bytes that comes in pieces of any size.

    Nothing is read twice but the part of an element that was there at the end of a piece, and of a
    long string not even that.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._num_needed = 0
        # Arrays that miss elements, the outermost first, each with the length that it will have.
        self._open: list[tuple[list[Reply], int]] = []

    def feed(self, piece: bytes) -> list[Reply]:
        """The replies that are whole with this piece. Raises MalformedReplyError."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes < self._num_needed:
            return []
        data = piece if len(self._pieces) == 1 else b"".join(self._pieces)
        replies: list[Reply] = []
        try:
            num_read = self._read(data, replies)
        except ValueError as error:
            raise MalformedReplyError(str(error)) from error
        rest = data[num_read:]
        self._pieces = [rest] if rest else []
        self._num_bytes = len(rest)
        return replies

    def _read(self, data: bytes, replies: list[Reply]) -> int:
        """How much of ``data`` was read; what was whole is added to ``replies``."""
        self._num_needed = at = 0
        reply: Reply
        while (end := data.find(_LINE_END, at)) >= 0:
            kind, after = data[at], end + 2
            if kind == _BULK:
                size = int(data[at + 1 : end])
                reply = None
                if size >= 0:
                    stop = after + size
                    if stop + 2 > len(data):
                        self._num_needed = stop + 2 - at
                        break
                    reply = data[after:stop]
                    after = stop + 2
            elif kind == _INTEGER:
                reply = int(data[at + 1 : end])
            elif kind == _ARRAY:
                size = int(data[at + 1 : end])
                if size > 0:
                    self._open.append(([], size))
                    at = after
                    continue
                reply = [] if size == 0 else None
            elif kind == _STATUS:
                reply = data[at + 1 : end]
            elif kind == _ERROR:
                reply = ErrorReply(data[at + 1 : end].decode(errors="replace"))
            else:
                raise MalformedReplyError(f"no reply begins with byte {kind}")
            at = after
            self._add(reply, replies)
        return at

    def _add(self, reply: Reply, replies: list[Reply]) -> None:
        """Add what is whole to the innermost open array, which may be whole with it."""
        while self._open:
            elements, size = self._open[-1]
            elements.append(reply)
            if len(elements) < size:
                return
            self._open.pop()
            reply = elements
        replies.append(reply)


_SentT = TypeVar("_SentT")

# How often silence is looked at before it is believed. A machine that paused, or had no CPU time
# for us and the server, makes one look late, and not the others.
_LOOKS = 4
_ERRORS = ConnectionErrors()


class RedisWire(asyncio.Protocol, Generic[_SentT]):
    """Takes over a connection that redis-py has made: its server is found and trusted, and has
    taken our credentials.

    What is sent is kept until its reply comes, in order, and goes to ``on_reply`` with that.
    Silence of ``timeout_s`` (to a quarter more) while replies are missing, and whatever else ends
    the connection, is told to ``on_lost`` once, with what has no reply; nothing comes after that.
    Time in which this process stood still does not count as the server's silence.

    A pipeline of redis-py is a task, several timeouts and some twenty coroutines for each batch:
    most of the CPU time that a request's few commands take.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        timeout_s: float,
        on_reply: Callable[[_SentT, Reply], None],
        on_lost: Callable[[Sequence[_SentT], Exception], None],
    ) -> None:
        self._look_s = timeout_s / _LOOKS
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = ReplyReader()
        self._sent: deque[_SentT] = deque()
        self._silent_looks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_lost = False
        writer = connection._writer
        assert writer is not None, "it has to be connected"
        self._transport = cast("asyncio.Transport", writer.transport)
        # Who closes redis-py's connection waits until its own protocol hears of the end.
        self._former = cast("asyncio.Protocol", self._transport.get_protocol())
        self._transport.set_protocol(self)

    @property
    def is_usable(self) -> bool:
        return not (self._is_lost or self._transport.is_closing())

    def send(self, data: bytes, sent: Sequence[_SentT]) -> None:
        """Write ``data``, commands of which each has one of ``sent``."""
        if not self._sent:
            self._silent_looks = 0
            if self._timer is None:
                self._timer = self._loop.call_later(self._look_s, self._look)
        self._sent.extend(sent)
        try:
            with _ERRORS:
                self._transport.write(data)
        except OSError as error:
            self._lose(error)

    def close(self) -> list[_SentT]:
        """End the connection; what has no reply gets none, and ``on_lost`` is not called."""
        self._is_lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()
        unanswered = list(self._sent)
        self._sent.clear()
        return unanswered

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._reader.feed(data)
        except MalformedReplyError as error:
            self._lose(RedisError(str(error)))
            return
        self._silent_looks = 0
        for reply in replies:
            if self._is_lost:
                return
            if not self._sent:
                self._lose(RedisError("a reply came that nobody waits for"))
                return
            self._on_reply(self._sent.popleft(), reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._former.connection_lost(exc)
        self._lose(RedisConnectionError("Connection closed by server.") if exc is None else exc)

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._on_lost(self.close(), error)

    def _look(self) -> None:
        """Rather than by a timer for each batch, silence is found by one that looks again."""
        self._timer = None
        if not self._sent:
            return
        self._silent_looks += 1
        # The first look may come at once after what was sent or heard.
        if self._silent_looks <= _LOOKS:
            self._timer = self._loop.call_later(self._look_s, self._look)
        else:
            self._lose(RedisTimeoutError("no reply in time"))
