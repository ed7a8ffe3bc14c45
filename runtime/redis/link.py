"""Link to Redis with bounded waits for an unreachable server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError

from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.faults.connections import BrokenConnectionError, ConnectionErrors
from millrace.runtime.redis.client import error_of, open_redis, why_refused
from millrace.runtime.redis.wire import Argument, ErrorReply, RedisWire, Reply, pack
from millrace.schemas.config import RedisConfig
from millrace.schemas.errors import MillraceError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 0.3
_PAUSE_S = 1.0
_CANNOT_WRITE = "MISCONF"
_ERRORS = ConnectionErrors(RedisError)
_AOF, _RDB = "aof_last_write_status", "rdb_last_bgsave_status"

_Command = tuple[Argument, ...]
_Call = tuple[_Command, asyncio.Future[Any]]


class RedisUnreachableError(
    MillraceError, code="state_unavailable", retryable=True, http_status=503
):
    """Redis is unreachable, or does not work as it is full or a replica.

    The command may or may not have been executed.
    """

    def __init__(
        self, message: str = "The store of request state is unreachable. Try again in a moment."
    ) -> None:
        super().__init__(message)


class RedisFullError(RedisUnreachableError, code="storage_full"):
    """Redis cannot write to its disk and refuses all changes."""

    def __init__(self) -> None:
        super().__init__(
            "The store of request state, redis, cannot write to its disk. Try again when there is "
            "room."
        )


def reachable(link: RedisLink | None) -> RedisLink:
    """Return the link if there is one. Raises RedisUnreachableError."""
    if link is None:
        raise RedisUnreachableError
    return link


class RedisLink:
    """Link to Redis: commands by ``call``, Lua by ``evaluate``.

    Calls of one turn of the event loop are sent together, and none waits for other replies.

    After a failure the link does not retry for a second: calls raise RedisUnreachableError at once.
    A command that the server refuses raises it, too, and is logged by its name when that begins and
    ends. Replies are bytes. Owns its connection and the task that makes it. ``close`` ends them.
    ``is_full`` is True from the first command that Redis refused because it cannot write to its
    disk, until ``look_for_room`` finds that it can. The error is RedisFullError then.
    """

    def __init__(self, config: RedisConfig, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._config = config
        self._redis, self._sentinel = open_redis(config, _TIMEOUT_S)
        self._read_reply = dict(self._redis.response_callbacks)
        self._connection: AbstractConnection | None = None
        self._wire: RedisWire[_Call] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._refusal: MillraceError | None = None
        self._waiting: list[_Call] = []
        self._is_unreachable = False
        self._next_try_s = 0.0
        self._refused: set[str] = set()
        self._closed = False
        # Field of ``INFO`` that tells what Redis cannot write; empty if it can write.
        self._unwritten = ""

    @property
    def is_full(self) -> bool:
        return bool(self._unwritten)

    async def look_for_room(self) -> None:
        """Ask a Redis that could not write whether it can now."""
        if not self._unwritten:
            return
        try:
            told = await self.call("INFO", "persistence")
        except RedisUnreachableError:
            return
        if _is_well(told, self._unwritten):
            self._unwritten = ""
            logger.info("Redis can write to its disk again")

    async def call(self, *command: Argument) -> Any:
        """Send a command and return the reply. Raises RedisUnreachableError."""
        if self._closed or (self._is_unreachable and self._clock.monotonic() < self._next_try_s):
            raise RedisUnreachableError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((command, future))
        return await future

    async def evaluate(
        self, script: Script, keys: Sequence[str | bytes], arguments: Sequence[Argument] = ()
    ) -> Any:
        """Run a script; its source is sent once. Raises RedisUnreachableError."""
        rest = (len(keys), *keys, *arguments)
        try:
            return await self.call("EVALSHA", script.sha, *rest)
        except NoScriptError:
            return await self.call("EVAL", script.source, *rest)

    async def check(self) -> None:
        """Raise UntrustedServerError or CredentialsRefusedError if Redis cannot be used.

        An unreachable Redis raises nothing: it may come back.
        """
        try:
            await self.call("PING")
        except RedisUnreachableError:
            if self._refusal is not None:
                raise self._refusal from None

    async def close(self) -> None:
        """Close the link. Pending calls end as if Redis were unreachable."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None:
            self._give_up(self._wire.close())
        self._give_up(self._waiting)
        self._waiting = []
        try:
            with _ERRORS:
                if self._connection is not None:
                    await self._connection.disconnect(nowait=True)
                await self._redis.aclose()
                if self._sentinel is not None:
                    await self._sentinel.aclose()
        except (RedisError, OSError) as error:
            logger.debug("Redis did not close cleanly", extra={"cause": repr(error)})

    def _send(self) -> None:
        """Send pending commands; without a connection, connect first."""
        wire = self._wire
        if wire is not None and not wire.is_usable:
            self._give_up(wire.close())
            wire = self._wire = None
        if wire is None:
            if not self._closed and (self._connecting is None or self._connecting.done()):
                self._connecting = asyncio.ensure_future(self._connect())
            return
        waiting, self._waiting = self._waiting, []
        packed: list[bytes] = []
        calls: list[_Call] = []
        for call in waiting:
            try:
                packed.append(pack(call[0]))
            except UnicodeEncodeError as error:
                # For example, a lone surrogate.
                logger.exception("a command could not be sent to Redis")
                _fail([call], error)
            else:
                calls.append(call)
        if calls:
            wire.send(b"".join(packed), calls)

    async def _connect(self) -> None:
        pool = self._redis.connection_pool
        try:
            with _ERRORS:
                if self._connection is None:
                    self._connection = await pool.get_connection()  # type: ignore[no-untyped-call]
                else:
                    await self._connection.disconnect(nowait=True)
                    await pool.ensure_connection(self._connection)
                self._wire = RedisWire(self._connection, _TIMEOUT_S, self._answer, self._lose)
        except (RedisError, OSError) as error:
            if isinstance(error, BrokenConnectionError):
                # The connection may be broken for good. The next attempt opens a new one.
                self._connection = None
                pool.reset()  # type: ignore[no-untyped-call]
            self._lose([], error)
            return
        self._send()

    def _lose(self, unanswered: Sequence[_Call], error: Exception) -> None:
        """Handle the loss of the connection, or a failed attempt to connect."""
        self._wire = None
        if not unanswered and not self._waiting:
            return  # no call was lost: the next call reconnects
        self._note_loss(error)
        self._give_up(unanswered)
        self._give_up(self._waiting)
        self._waiting = []

    def _answer(self, call: _Call, reply: Reply) -> None:
        command, future = call
        if isinstance(reply, ErrorReply):
            self._answer_error(call, error_of(reply.text))
            return
        self._note_return()
        if self._refused:
            self._note_success(command)
        if future.done():
            return
        read = self._read_reply.get(str(command[0]))
        try:
            answer = reply if read is None else read(reply)
        except Exception as error:
            logger.exception("a reply of Redis could not be read")
            future.set_exception(error)
        else:
            future.set_result(answer)

    def _answer_error(self, call: _Call, error: RedisError) -> None:
        was_master = isinstance(error, ReadOnlyError) and self._sentinel is not None
        if was_master or not isinstance(error, ResponseError):
            # The connection executes no commands, so look for another.
            unanswered = [] if self._wire is None else self._wire.close()
            self._lose([call, *unanswered], error)
            return
        self._note_return()
        command, future = call
        told: Exception = RedisUnreachableError()
        if isinstance(error, NoScriptError):
            told = error  # ``evaluate`` then sends the whole script
        else:
            self._note_refusal(command, error)
            if _CANNOT_WRITE in str(error):
                self._unwritten = _AOF if "AOF" in str(error) else _RDB
                told = RedisFullError()
        if not future.done():
            future.set_exception(told)

    def _give_up(self, calls: Sequence[_Call]) -> None:
        _fail(calls, RedisUnreachableError())

    def _note_loss(self, error: Exception) -> None:
        self._next_try_s = self._clock.monotonic() + _PAUSE_S
        refusal = why_refused(error, self._config)
        if refusal is not None and repr(refusal) != repr(self._refusal):
            logger.error("Redis cannot be used", extra={"cause": refusal.message})
        self._refusal = refusal
        if not self._is_unreachable:
            self._is_unreachable = True
            if refusal is None:
                logger.warning("Redis is unreachable", extra={"cause": repr(error)})

    def _note_refusal(self, command: _Command, error: ResponseError) -> None:
        """Log a refused command once.

        A wrong type or a failing script is a bug of Millrace, and callers cannot tell it from an
        outage. So it must stand out in the log.
        """
        name = _name_of(command)
        if name not in self._refused:
            self._refused.add(name)
            # The error for an unknown command contains its arguments, which are private.
            cause = str(error).partition(", with args")[0]
            logger.error("Redis refuses a command", extra={"command": name, "cause": cause})

    def _note_success(self, command: _Command) -> None:
        name = _name_of(command)
        if name in self._refused:
            self._refused.discard(name)
            logger.info("Redis accepts a command again", extra={"command": name})

    def _note_return(self) -> None:
        if self._is_unreachable:
            self._is_unreachable = False
            self._refusal = None
            logger.info("Redis is reachable again")


def _is_well(told: Any, field: str) -> bool:
    """Return whether ``INFO`` reports ok for a field; redis-py may have parsed it already."""
    if isinstance(told, dict):
        return bool(told.get(field) == "ok")
    return f"{field}:ok".encode() in bytes(told).splitlines()


def _fail(calls: Sequence[_Call], error: Exception) -> None:
    for _, future in calls:
        if not future.done():
            future.set_exception(error)


def _name_of(command: _Command) -> str:
    """Return a command's name for the log: without keys and values, but with a script's digest."""
    name, *rest = map(str, command[:2])
    if name == "EVAL":
        return f"EVALSHA {Script(rest[0]).sha}"
    return f"{name} {rest[0]}" if name == "EVALSHA" else name


class Script:
    """Lua script that runs atomically in Redis."""

    def __init__(self, source: str) -> None:
        self.source = source
        # Redis names scripts by this digest. Security does not depend on it.
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
