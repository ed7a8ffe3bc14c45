"""Pipelined connection to Redis: commands follow one another without waiting for replies."""

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
    """Invalid reply. Later replies can no longer be matched to their commands."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Error reply of the server, its code first."""

    text: str


Reply: TypeAlias = bytes | int | list["Reply"] | ErrorReply | None


def pack(command: Sequence[Argument]) -> bytes:
    """Encode a command as an array of bulk strings.

    Raises UnicodeEncodeError for an invalid string.
    """
    pieces = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        pieces.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(pieces)


class ReplyReader:
    """Reader of replies from a stream of bytes in pieces of any size.

    Only an element that is incomplete at a piece's end is read twice, and a long string not even
    then.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._num_needed = 0
        # Incomplete arrays, the outermost first, each with its final length.
        self._open: list[tuple[list[Reply], int]] = []

    def feed(self, piece: bytes) -> list[Reply]:
        """Return the replies that this piece completes. Raises MalformedReplyError."""
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
        """Add complete replies to ``replies``; return how many bytes of ``data`` were read."""
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
        """Add a complete element to the innermost open array, which it may complete."""
        while self._open:
            elements, size = self._open[-1]
            elements.append(reply)
            if len(elements) < size:
                return
            self._open.pop()
            reply = elements
        replies.append(reply)


_SentT = TypeVar("_SentT")

# Number of silent checks before the connection counts as lost. A pause of the machine, or a lack of
# CPU time, delays one check and not the others.
_LOOKS = 4
_ERRORS = ConnectionErrors()


class RedisWire(asyncio.Protocol, Generic[_SentT]):
    """Pipelined protocol on a connection that redis-py has opened and authenticated.

    Each sent item is kept, in order, until its reply comes, and then passed to ``on_reply`` with
    it. If replies are missing for ``timeout_s`` (up to a quarter more), or the connection ends,
    ``on_lost`` is called once with the items without a reply. Nothing follows. A pause of this
    process does not count as the server's silence.

    A pipeline of redis-py costs a task, several timeouts and some twenty coroutines for each batch:
    most of the CPU time of a request's few commands.
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
        # The closing of redis-py's connection waits until its own protocol is told of the end.
        self._former = cast("asyncio.Protocol", self._transport.get_protocol())
        self._transport.set_protocol(self)

    @property
    def is_usable(self) -> bool:
        return not (self._is_lost or self._transport.is_closing())

    def send(self, data: bytes, sent: Sequence[_SentT]) -> None:
        """Write ``data``: one command for each item of ``sent``."""
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
        """End the connection and return the items without a reply. ``on_lost`` is not called."""
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
                self._lose(RedisError("received a reply without a command"))
                return
            self._on_reply(self._sent.popleft(), reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._former.connection_lost(exc)
        self._lose(RedisConnectionError("Connection closed by server.") if exc is None else exc)

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._on_lost(self.close(), error)

    def _look(self) -> None:
        """Check for silence with one periodic timer, in place of a timer for each batch."""
        self._timer = None
        if not self._sent:
            return
        self._silent_looks += 1
        # The first check may follow immediately after data was sent or received.
        if self._silent_looks <= _LOOKS:
            self._timer = self._loop.call_later(self._look_s, self._look)
        else:
            self._lose(RedisTimeoutError("no reply in time"))
