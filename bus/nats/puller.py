"""Pulling from a durable consumer through outages, deleted consumers and late deliveries."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import msgspec
from nats.aio.msg import Msg

from bus.nats import jetstream
from bus.nats.connection import NAK, Connection, status_of
from bus.nats.jetstream import nanoseconds
from schemas.errors import BusUnavailableError

# A waiting request is made anew this often, so that one that the server forgot is not for ever.
_MAX_WAIT_S = 5.0
_GRACE_S = 0.5
_RETRY_WAIT_S = 0.05
_SPENT = frozenset({"404", "408"})


class _PullInbox:
    """Where the messages of one pull at a time arrive.

    Messages keep their own subject, so that they are told apart by the inbox alone; what arrives
    when nobody pulls is given back at once, for somebody else.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._prefix = ""
        self._numbers = itertools.count()
        self._reply = ""
        self._wanted = 0
        self._messages: list[Msg] = []
        self._ended = asyncio.Event()
        self._status: str | None = None
        connection.on_loss(self._ended.set)

    async def open(self) -> None:
        self._prefix = await self._connection.open_inbox(self._receive)

    async def _receive(self, message: Msg) -> None:
        if message.reply:
            if len(self._messages) >= self._wanted:
                await self._connection.publish(message.reply, NAK)
                return
            self._messages.append(message)
            if len(self._messages) == self._wanted:
                self._ended.set()
        elif message.subject == self._reply:
            self._status = status_of(message)
            self._ended.set()

    async def request(
        self, subject: str, batch: int, wait_s: float
    ) -> tuple[list[Msg], str | None]:
        """What one pull request brings, and the status that ended it: all that is there, or with
        ``wait_s`` the next messages."""
        body: dict[str, object] = {"batch": batch}
        if wait_s > 0:
            body["expires"] = max(nanoseconds(wait_s), 1_000_000)
        else:
            body["no_wait"] = True
        self._reply = f"{self._prefix}.{next(self._numbers)}"
        self._messages, self._status, self._wanted = [], None, batch
        self._ended.clear()
        try:
            if await self._connection.send(subject, msgspec.json.encode(body), self._reply):
                async with asyncio.timeout(wait_s + _GRACE_S):
                    await self._ended.wait()
        except TimeoutError:
            pass  # the request is lost; if not, a late message is given back
        except asyncio.CancelledError:
            for message in self._messages:
                await self._connection.publish(message.reply, NAK)
            raise
        finally:
            self._wanted = 0
        return self._messages, self._status


class Puller:
    """Pull requests on one consumer; any number of tasks may pull at a time."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        ensure: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._subject = f"{jetstream.API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._ensure = ensure
        self._ensured = False
        self._idle: list[_PullInbox] = []

    async def ensure(self) -> None:
        """The consumer is there once this returns. Raises BusUnavailableError."""
        if not self._ensured:
            await self._ensure()
            self._ensured = True

    async def pull(self, max_messages: int, timeout_s: float) -> list[Msg]:
        """Messages, as soon as there is one; an empty list after ``timeout_s``."""
        if self._idle:
            inbox = self._idle.pop()
        else:
            inbox = _PullInbox(self._connection)
            await inbox.open()
        try:
            return await self._pull(inbox, max_messages, timeout_s)
        finally:
            self._idle.append(inbox)

    async def _pull(self, inbox: _PullInbox, max_messages: int, timeout_s: float) -> list[Msg]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            left_s = deadline_s - loop.time()
            if not await self._ready(left_s):
                if loop.time() >= deadline_s:
                    return []
                continue
            if max_messages > 1 or left_s <= 0:
                messages = await self._request(inbox, max_messages, 0.0)
                left_s = deadline_s - loop.time()
                if messages or left_s <= 0:
                    return messages
            # One message ends the wait; more would have to be waited for.
            messages = await self._request(inbox, 1, min(left_s, _MAX_WAIT_S))
            if messages or loop.time() >= deadline_s:
                return messages

    async def _ready(self, left_s: float) -> bool:
        if not await self._connection.wait_connected(left_s):
            return False
        try:
            async with asyncio.timeout(max(left_s, 0.0) + _GRACE_S):
                await self.ensure()
        except (BusUnavailableError, TimeoutError):
            await asyncio.sleep(min(_RETRY_WAIT_S, max(left_s, 0.0)))
            return False
        return True

    async def _request(self, inbox: _PullInbox, batch: int, wait_s: float) -> list[Msg]:
        messages, status = await inbox.request(self._subject, batch, wait_s)
        if not messages and status is not None and status not in _SPENT:
            # No such consumer, or the server is starting or stopping.
            self._ensured = False
            await asyncio.sleep(_RETRY_WAIT_S)
        return messages
