"""One connection to Redis on which commands follow one another without waiting for replies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.runtime.faults.connections import ConnectionErrors
from millrace.runtime.redis.protocol import MalformedReplyError, Reply, ReplyReader

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
