"""Pulls from a durable consumer through outages, deleted consumers and late deliveries."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg

from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import NAK, Connection, status_of
from millrace.bus.nats.jetstream import nanoseconds
from millrace.schemas.errors import BusUnavailableError, MalformedMessageError

logger = logging.getLogger(__name__)


class Delivery(NamedTuple):
    """Delivery of a stored message; ``stored_ns`` is UTC epoch."""

    num_deliveries: int
    stream_sequence: int
    stored_ns: int


def read_lease(lease: str) -> Delivery:
    """Parse a lease. Raises MalformedMessageError for a string that is not a lease.

    ``$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>``, or
    with domain and account hash after ``$JS.ACK`` and further fields at the end.
    """
    parts = lease.split(".")
    fields = parts[4:] if len(parts) == 9 else parts[6:]
    if parts[:2] == ["$JS", "ACK"] and len(fields) >= 5 and all(map(str.isdecimal, fields[:4])):
        return Delivery(int(fields[0]), int(fields[1]), int(fields[3]))
    raise MalformedMessageError("a lease is the reply subject of a delivery")


def consumer_of(lease: str) -> str:
    """Return ``<stream>.<consumer>`` of a delivery; empty if the string is not a lease."""
    parts = lease.split(".")
    if len(parts) == 9:
        return f"{parts[2]}.{parts[3]}"
    return f"{parts[4]}.{parts[5]}" if len(parts) > 9 else ""


_GRACE_S = 0.5


class _Pull:
    """Open pull request. ``ended`` holds the status that ended it, None for none."""

    __slots__ = ("ended", "messages", "num_wanted")

    def __init__(self, num_wanted: int, ended: asyncio.Future[str | None]) -> None:
        self.num_wanted = num_wanted
        self.messages: list[Msg] = []
        self.ended = ended

    @property
    def has_room(self) -> bool:
        return len(self.messages) < self.num_wanted and not self.ended.done()

    def end(self, status: str | None = None) -> None:
        if not self.ended.done():
            self.ended.set_result(status)


class PullInbox:
    """Inbox that passes deliveries to the pulls of their consumer, the oldest first.

    Messages keep their own subject, and do not name the request that they answer. Only the consumer
    in the lease tells it. A delivery without an open pull is given back at once. ``num_losses``
    counts losses of the connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._prefix = ""
        self._opening = asyncio.Lock()
        self._numbers = itertools.count()
        self._by_reply: dict[str, _Pull] = {}
        self._by_consumer: dict[str, list[_Pull]] = {}
        self.num_losses = 0
        connection.on_loss(self._lose_all)

    async def request(
        self, subject: str, body: bytes, consumer: str, num_wanted: int, wait_s: float
    ) -> tuple[list[Msg], str | None]:
        """Send one pull request; return its messages within ``wait_s`` and the status that ended
        it.

        ``consumer`` is as in ``consumer_of``.
        """
        if not self._prefix:
            await self._open()
        loop = asyncio.get_running_loop()
        pull = _Pull(num_wanted, loop.create_future())
        reply = f"{self._prefix}.{next(self._numbers)}"
        self._by_reply[reply] = pull
        self._by_consumer.setdefault(consumer, []).append(pull)
        # A lost request ends here. If it was not lost, late messages are given back.
        timer = loop.call_later(wait_s + _GRACE_S, pull.end)
        try:
            if not await self._connection.send(subject, body, reply):
                pull.end()
            status = await pull.ended
        except asyncio.CancelledError:
            for message in pull.messages:
                await self._connection.publish(message.reply, NAK)
            raise
        finally:
            timer.cancel()
            pull.end()
            self._forget(reply, consumer, pull)
        return pull.messages, status

    async def _open(self) -> None:
        async with self._opening:
            if not self._prefix:
                self._prefix = await self._connection.open_inbox(self._receive)

    def _forget(self, reply: str, consumer: str, pull: _Pull) -> None:
        del self._by_reply[reply]
        pulls = self._by_consumer[consumer]
        pulls.remove(pull)
        if not pulls:
            del self._by_consumer[consumer]

    async def _receive(self, message: Msg) -> None:
        if not message.reply:
            pull = self._by_reply.get(message.subject)
            if pull is not None:
                pull.end(status_of(message))
            return
        for pull in self._by_consumer.get(consumer_of(message.reply), ()):
            if pull.has_room:
                pull.messages.append(message)
                if len(pull.messages) == pull.num_wanted:
                    pull.end()
                return
        await self._connection.publish(message.reply, NAK)

    def _lose_all(self) -> None:
        self.num_losses += 1
        for pull in self._by_reply.values():
            pull.end()


# A waiting request is renewed this often, in case the server forgot it.
_MAX_WAIT_S = 5.0
_ENSURE_S = 0.5
_RETRY_WAIT_S = 0.05
_SPENT = frozenset({"404", "408"})


class ConsumerPuller:
    """Puller of one consumer; any number of tasks may pull at a time.

    ``ensure`` creates a missing consumer. It is called before the first pull, after each loss of
    the connection, and when the server reports that the consumer is gone.
    """

    def __init__(
        self,
        connection: Connection,
        inbox: PullInbox,
        stream: str,
        consumer: str,
        ensure: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._inbox = inbox
        self._consumer = f"{stream}.{consumer}"
        self._subject = f"{jetstream.API}.CONSUMER.MSG.NEXT.{self._consumer}"
        self._ensure = ensure
        self._ensured_after = -1
        self._refused = ""

    async def ensure(self) -> None:
        """Ensure that the consumer exists. Raises BusUnavailableError."""
        num_losses = self._inbox.num_losses
        if self._ensured_after != num_losses:
            await self._ensure()
            self._ensured_after = num_losses

    async def pull(self, max_messages: int, timeout_s: float) -> list[Msg]:
        """Return messages as soon as there is one; an empty list after ``timeout_s``.

        With a timeout of 0 this takes one round trip.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        may_retry = True
        while True:
            left_s = deadline_s - loop.time()
            if not await self._ready(left_s):
                if loop.time() >= deadline_s:
                    return []
                continue
            messages: list[Msg] = []
            if max_messages > 1 or left_s <= 0:
                messages = await self._request(max_messages, 0.0)
                left_s = deadline_s - loop.time()
            if not messages and left_s > 0 and self._is_ensured:
                # One message ends the wait. A larger batch would wait for more.
                messages = await self._request(1, min(left_s, _MAX_WAIT_S))
            if messages:
                return messages
            if not self._is_ensured and may_retry:
                # An idle consumer was removed, so the queue may still have messages.
                may_retry = False
                continue
            if loop.time() >= deadline_s:
                return []
            if not self._is_ensured:
                await asyncio.sleep(_RETRY_WAIT_S)

    @property
    def _is_ensured(self) -> bool:
        return self._ensured_after == self._inbox.num_losses

    async def _ready(self, left_s: float) -> bool:
        if not self._connection.connected and not await self._connection.wait_connected(left_s):
            return False
        if self._is_ensured:
            return True
        try:
            async with asyncio.timeout(max(left_s, 0.0) + _ENSURE_S):
                await self.ensure()
        except (BusUnavailableError, TimeoutError) as error:
            self._warn(str(error))
            await asyncio.sleep(min(_RETRY_WAIT_S, max(left_s, 0.0)))
            return False
        self._refused = ""
        return True

    def _warn(self, cause: str) -> None:
        """Log each cause once: a queue that cannot be read must not be silent."""
        if self._connection.connected and cause != self._refused:
            self._refused = cause
            logger.warning(
                "messages cannot be pulled", extra={"consumer": self._consumer, "cause": cause}
            )

    async def _request(self, batch: int, wait_s: float) -> list[Msg]:
        body = _waiting(wait_s) if wait_s > 0 else _at_once(batch)
        messages, status = await self._inbox.request(
            self._subject, body, self._consumer, batch, wait_s
        )
        if not messages and status is not None and status not in _SPENT:
            # The consumer is missing, or the server is starting or stopping.
            self._ensured_after = -1
        return messages


@functools.lru_cache(1024)
def _at_once(batch: int) -> bytes:
    """Encode a request for the messages that are available now."""
    return msgspec.json.encode({"batch": batch, "no_wait": True})


def _waiting(wait_s: float) -> bytes:
    """Encode a request that waits for the next message."""
    return msgspec.json.encode({"batch": 1, "expires": max(nanoseconds(wait_s), 1_000_000)})
