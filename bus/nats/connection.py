"""Messages and requests over one link to a NATS server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from nats.aio.client import Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from millrace.bus.codec import CONTENT_TYPE
from millrace.bus.nats.link import RETRY_WAIT_S, UNSENT, Link
from millrace.bus.transport import Message, OnMessage
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusForbiddenError, BusUnavailableError, PayloadTooLargeError

logger = logging.getLogger(__name__)

# Called with each answer, and with None when the connection is lost and no answer will come.
OnAnswer = Callable[[Msg | None], None]


class Inbox:
    """Inbox that passes answers to their callbacks and drops late ones."""

    def __init__(self) -> None:
        self._expected: dict[str, OnAnswer] = {}
        self.prefix = ""
        self._numbers = itertools.count()

    async def receive(self, message: Msg) -> None:
        on_answer = self._expected.get(message.subject)
        if on_answer is not None:
            on_answer(message)

    def expect(self, on_answer: OnAnswer) -> str:
        """Register ``on_answer`` for a new reply subject, until ``forget``; return the subject."""
        subject = f"{self.prefix}.{next(self._numbers)}"
        self._expected[subject] = on_answer
        return subject

    def forget(self, subject: str) -> None:
        self._expected.pop(subject, None)

    def lose_all(self) -> None:
        """Tell all waiting callbacks that the connection is lost."""
        for on_answer in list(self._expected.values()):
            on_answer(None)


NAK = b"-NAK"
MESSAGE_ID = "Nats-Msg-Id"

_SUBSCRIPTION_MESSAGES = 1024 * 1024
_SUBSCRIPTION_BYTES = 512 * 1024 * 1024
_SETTLE_TIMEOUT_S = 2.0
_ATTEMPT_TIMEOUT_S = 1.0
_NO_RESPONDERS = "503"


class NoAnswerError(Exception):
    """Request without an answer: it timed out, had no listener, or lost the connection."""


class LostRequestError(NoAnswerError):
    """Request that may not have reached the server, or whose answer may be lost."""


def status_of(message: Msg) -> str | None:
    """Return the status of a message without payload, such as 404 or 503; else None."""
    return message.headers.get("Status") if message.headers and not message.data else None


class Connection(Link):
    """Link with requests, some of which outlive its interruptions.

    It is a ``bus.transport.Transport``: at most once, nothing is buffered while the server is
    unreachable. Stored messages go through ``request_until``.
    """

    def __init__(
        self,
        config: NatsConfig,
        name: str,
        inbox_prefix: str = "_INBOX",
        server: Srv | None = None,
    ) -> None:
        super().__init__(config, name, inbox_prefix, server)
        self._inbox = Inbox()
        self.on_loss(self._inbox.lose_all)

    def beside(self, server: Srv, timeout_s: float) -> Connection:
        """Make another connection of this process to one server.

        The server has ``timeout_s`` to accept it. The caller opens and closes it.
        """
        config = replace(self._config, connect_timeout_s=timeout_s)
        return Connection(config, self._name, self._inbox_prefix, server)

    async def open(self) -> None:
        """Open the link. See ``Link.open``. Raises BusForbiddenError if answers may not be read."""
        await super().open()
        self._inbox.prefix = await self.open_inbox(self._inbox.receive)
        await self._settle()
        try:
            self._forbidden.check_subscribed(f"{self._inbox.prefix}.*")
        except BusForbiddenError:
            await self.close()
            raise

    async def close(self) -> None:
        """Send pending messages if the server is reachable, then close. Never raises."""
        if self.connected:
            await self._settle()
        await super().close()

    # --- messages ---

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish a message; drops it while the server is unreachable.

        Raises PayloadTooLargeError.
        """
        await self.send(subject, payload, "", headers)

    async def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> NatsCallback:
        async def receive(message: Msg) -> None:
            headers = message.headers
            content_type = headers.get(CONTENT_TYPE) if headers else None
            on_message(Message(message.subject, message.data, content_type, message.reply, headers))

        try:
            subscription = await self._client.subscribe(
                subject,
                queue=group,
                cb=receive,
                pending_msgs_limit=_SUBSCRIPTION_MESSAGES,
                pending_bytes_limit=_SUBSCRIPTION_BYTES,
            )
        except UNSENT as error:
            raise BusUnavailableError(f"The message bus cannot be reached: {error}.") from error
        await self._settle()
        self._forbidden.check_subscribed(subject)
        return NatsCallback(subscription)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        try:
            return await self.probe(subject, payload, timeout_s)
        except BusUnavailableError:
            return None

    async def probe(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        try:
            answer = await self.request_once(subject, payload, timeout_s)
        except LostRequestError as error:
            raise BusUnavailableError(f"The message bus cannot be reached: {error}.") from error
        except NoAnswerError:
            return None
        content_type = answer.headers.get(CONTENT_TYPE) if answer.headers else None
        return Message(answer.subject, answer.data, content_type, answer.reply)

    async def _settle(self) -> None:
        """Wait until the server has read all sent messages, or is unreachable.

        Sends a message to this process. The client's own flush is unsuitable: its PING overtakes
        buffered messages.
        """
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_answer(_message: Msg | None) -> None:
            if not arrived.done():
                arrived.set_result(None)

        reply = self._inbox.expect(on_answer)
        try:
            if await self.send(reply, b""):
                async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                    await arrived
        except TimeoutError:
            logger.warning("the NATS server is slow to answer")
        finally:
            self._inbox.forget(reply)

    # --- requests ---

    async def request_once(
        self,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """Send a request once and return the answer.

        Raises NoAnswerError as soon as it is known that no answer will come, BusForbiddenError if
        this process may not ask.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Msg | None] = loop.create_future()

        def on_answer(message: Msg | None) -> None:
            if not future.done():
                future.set_result(message)

        def on_failure(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        reply = self._inbox.expect(on_answer)
        timer: asyncio.TimerHandle | None = None
        try:
            with self._forbidden.asking(subject, on_failure):
                if not await self.send(subject, payload, reply, headers):
                    raise LostRequestError("the server is unreachable")
                timer = loop.call_later(timeout_s, on_failure, NoAnswerError("no answer in time"))
                answer = await future
        finally:
            self._inbox.forget(reply)
            if timer is not None:
                timer.cancel()
        if answer is None:
            raise LostRequestError("the connection was lost")
        if status_of(answer) == _NO_RESPONDERS:
            raise NoAnswerError("there is no listener")
        return answer

    async def request_until(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Msg, int]:
        """Send an idempotent request until it is answered.

        Waits for the server to come back.

        Args:
            subject: Subject of the request.
            payload: Its payload.
            headers: Its headers.
            timeout_s: Longest time; by default ``connect_timeout_s``.

        Returns:
            The answer, and the number of attempts.

        Raises:
            BusUnavailableError: No answer within ``timeout_s``.
            BusForbiddenError: This process may not ask. Raised at once.
        """
        loop = asyncio.get_running_loop()
        limit_s = self._config.connect_timeout_s if timeout_s is None else timeout_s
        deadline_s = loop.time() + limit_s
        num_attempts = 0
        while True:
            if self._client.is_closed:
                raise BusUnavailableError("This connection to the message bus is closed.")
            left_s = deadline_s - loop.time()
            if await self.wait_connected(left_s):
                num_attempts += 1
                try:
                    attempt_s = max(min(left_s, _ATTEMPT_TIMEOUT_S), RETRY_WAIT_S)
                    answer = await self.request_once(subject, payload, attempt_s, headers)
                except NoAnswerError as error:
                    cause = str(error)
                else:
                    return answer, num_attempts
            else:
                cause = "the server is unreachable"
            if loop.time() + RETRY_WAIT_S >= deadline_s:
                raise BusUnavailableError(f"The message bus cannot be reached: {cause}.")
            await asyncio.sleep(RETRY_WAIT_S)

    async def ask(
        self,
        subject: str,
        payload: bytes,
        on_answer: OnAnswer,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Start a request without waiting; the caller forgets the returned reply subject.

        Without a server the only answer is None. Raises PayloadTooLargeError.
        """
        reply = self._inbox.expect(on_answer)
        try:
            if not await self.send(subject, payload, reply, headers):
                on_answer(None)
        except PayloadTooLargeError:
            self._inbox.forget(reply)
            raise
        return reply

    def forget(self, reply: str) -> None:
        self._inbox.forget(reply)


class NatsCallback:
    """Subscription that may be closed at any time."""

    def __init__(self, subscription: NatsSubscription) -> None:
        self._subscription = subscription

    async def close(self) -> None:
        try:
            await self._subscription.unsubscribe()
        except UNSENT as error:
            logger.debug("already unsubscribed", extra={"cause": repr(error)})
