"""One subscription for what every pull of a connection brings."""

from __future__ import annotations

import asyncio
import itertools
import logging

from nats.aio.msg import Msg

from millrace.bus.nats.connection import NAK, Connection, status_of
from millrace.bus.nats.leases import consumer_of

logger = logging.getLogger(__name__)

_GRACE_S = 0.5


class _Pull:
    """A pull request that is out. ``ended`` holds the status that ended it, None for none."""

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
    """Hands deliveries to the pulls of their consumer, the oldest first.

    Messages keep their own subject, and which request brought one is not said; so it is told by
    the consumer in its lease alone. What arrives when nobody pulls is given back at once, for
    somebody else. ``num_losses`` counts those of the connection.
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
        """What one pull request brings within ``wait_s``, and the status that ended it.
        ``consumer`` is as in ``consumer_of``."""
        if not self._prefix:
            await self._open()
        loop = asyncio.get_running_loop()
        pull = _Pull(num_wanted, loop.create_future())
        reply = f"{self._prefix}.{next(self._numbers)}"
        self._by_reply[reply] = pull
        self._by_consumer.setdefault(consumer, []).append(pull)
        # A request that is lost ends here; if it is not, a late message is given back.
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
