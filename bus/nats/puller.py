"""Pulling from a durable consumer through outages, deleted consumers and late deliveries."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

import msgspec
from nats.aio.msg import Msg

from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.jetstream import nanoseconds
from millrace.bus.nats.pull_inbox import PullInbox
from millrace.schemas.errors import BusUnavailableError

logger = logging.getLogger(__name__)

# A waiting request is made anew this often, so that one that the server forgot is not for ever.
_MAX_WAIT_S = 5.0
_ENSURE_S = 0.5
_RETRY_WAIT_S = 0.05
_SPENT = frozenset({"404", "408"})


class ConsumerPuller:
    """Pull requests on one consumer; any number of tasks may pull at a time.

    ``ensure`` makes the consumer if it is not there. It is called before the first pull, after
    each loss of the connection, and when the server says that the consumer is gone.
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
        """The consumer is there once this returns. Raises BusUnavailableError."""
        num_losses = self._inbox.num_losses
        if self._ensured_after != num_losses:
            await self._ensure()
            self._ensured_after = num_losses

    async def pull(self, max_messages: int, timeout_s: float) -> list[Msg]:
        """Messages, as soon as there is one; an empty list after ``timeout_s``. With 0 that is
        one round trip."""
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
                # One message ends the wait; more would have to be waited for.
                messages = await self._request(1, min(left_s, _MAX_WAIT_S))
            if messages:
                return messages
            if not self._is_ensured and may_retry:
                # Somebody removed an idle consumer: that there is nothing is not said by that.
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
        """Once for each cause: with jobs in it, a queue that cannot be read must not be silent."""
        if self._connection.connected and cause != self._refused:
            self._refused = cause
            logger.warning(
                "a queue cannot be read", extra={"consumer": self._consumer, "cause": cause}
            )

    async def _request(self, batch: int, wait_s: float) -> list[Msg]:
        body = _waiting(wait_s) if wait_s > 0 else _at_once(batch)
        messages, status = await self._inbox.request(
            self._subject, body, self._consumer, batch, wait_s
        )
        if not messages and status is not None and status not in _SPENT:
            # No such consumer, or the server is starting or stopping.
            self._ensured_after = -1
        return messages


@functools.lru_cache(1024)
def _at_once(batch: int) -> bytes:
    """A request for what is there now."""
    return msgspec.json.encode({"batch": batch, "no_wait": True})


def _waiting(wait_s: float) -> bytes:
    """A request for the next message."""
    return msgspec.json.encode({"batch": 1, "expires": max(nanoseconds(wait_s), 1_000_000)})
