"""A connection that comes back by itself, and requests that outlive its interruptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from bus.codec import CONTENT_TYPE
from bus.nats.forbidden import Forbidden
from bus.nats.inbox import Inbox, OnAnswer
from bus.nats.security import Refusals, SecureClient, connect_options, servers_of
from bus.transport import Message, OnMessage
from schemas.config import NatsConfig
from schemas.errors import (
    BusForbiddenError,
    BusUnavailableError,
    MillraceError,
    PayloadTooLargeError,
)
from schemas.redaction import redact_urls

logger = logging.getLogger(__name__)

NAK = b"-NAK"
MESSAGE_ID = "Nats-Msg-Id"

_RECONNECT_WAIT_S = 0.1
_PING_INTERVAL_S = 5
_PENDING_BYTES = 32 * 1024 * 1024
_SUBSCRIPTION_MESSAGES = 1024 * 1024
_SUBSCRIPTION_BYTES = 512 * 1024 * 1024
_SETTLE_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 2.0
_ATTEMPT_TIMEOUT_S = 1.0
_RETRY_WAIT_S = 0.05
_HEADER_LINE_BYTES = len(b"NATS/1.0\r\n\r\n")
_NO_RESPONDERS = "503"

# What nats-py raises when a message cannot leave, besides a bug of ours.
_AWAY = (nats.errors.Error, OSError)


class NoAnswerError(Exception):
    """A request got no answer: timed out, nobody listens, or the connection was lost."""


def status_of(message: Msg) -> str | None:
    """The status line of a message without payload, such as 404 or 503."""
    return message.headers.get("Status") if message.headers and not message.data else None


class Connection:
    """Owns the client, its inbox and its subscriptions; ``close`` ends them all.

    It is a ``bus.transport.Transport``: at most once, nothing is buffered while the server is
    away. Stored messages go through ``request_until``.
    """

    def __init__(self, config: NatsConfig, name: str, inbox_prefix: str = "_INBOX") -> None:
        self._config = config
        self._name = name
        self._options = connect_options(config)
        self._servers = servers_of(config)
        self._client = SecureClient()
        self._inbox_prefix = inbox_prefix
        self._inbox = Inbox()
        self._forbidden = Forbidden()
        self._up = asyncio.Event()
        self._refusals = Refusals(config)
        self._on_reconnect_calls: list[Callable[[], None]] = []
        self._on_loss_calls: list[Callable[[], None]] = [self._inbox.lose_all]
        self.num_dropped = 0

    async def open(self) -> None:
        """Raises BusUnavailableError if no server answers within ``connect_timeout_s``;
        UntrustedServerError or CredentialsRefusedError as soon as all of them failed so."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._client.connect(
                    servers=self._servers,
                    name=self._name,
                    inbox_prefix=self._inbox_prefix,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                    connect_timeout=2,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    max_reconnect_attempts=-1,
                    ping_interval=_PING_INTERVAL_S,
                    max_outstanding_pings=2,
                    pending_size=_PENDING_BYTES,
                    skip_subject_validation=True,
                    **self._options,
                )
        except MillraceError:
            await self.close()
            raise
        except (TimeoutError, *_AWAY) as error:
            await self.close()
            if self._refusals.last is not None:
                raise self._refusals.last from error
            raise BusUnavailableError(
                f"No NATS server answers at {self._where}. Start one, or correct nats.url."
            ) from error
        self._refusals.on_connected()
        self._inbox.open(await self.open_inbox(self._inbox.receive))
        self._up.set()
        await self._settle()
        try:
            self._forbidden.check_subscribed(f"{self._inbox.prefix}.*")
        except BusForbiddenError:
            await self.close()
            raise

    @property
    def _where(self) -> str:
        return redact_urls(self._config.url)

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        return self._client.max_payload

    @property
    def server_version(self) -> tuple[int, int]:
        """Major and minor."""
        version = self._client.connected_server_version
        return version.major, version.minor

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect_calls.append(callback)

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call back whenever the connection is lost: what was asked is not answered any more."""
        self._on_loss_calls.append(callback)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether the connection is there, or came back within ``timeout_s``."""
        if self.connected:
            return True
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                while not self._client.is_connected:
                    if self._up.is_set():
                        await asyncio.sleep(_RETRY_WAIT_S)  # the loss is just being noticed
                    await self._up.wait()
        except TimeoutError:
            return False
        return True

    # --- core messaging ---

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Drops the message while the server is unreachable. Raises PayloadTooLargeError."""
        await self.send(subject, payload, "", headers)

    async def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> NatsCallback:
        async def receive(message: Msg) -> None:
            headers = message.headers
            content_type = headers.get(CONTENT_TYPE) if headers else None
            on_message(Message(message.subject, message.data, content_type, message.reply))

        subscription = await self._client.subscribe(
            subject,
            queue=group,
            cb=receive,
            pending_msgs_limit=_SUBSCRIPTION_MESSAGES,
            pending_bytes_limit=_SUBSCRIPTION_BYTES,
        )
        await self._settle()
        self._forbidden.check_subscribed(subject)
        return NatsCallback(subscription)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        try:
            answer = await self.request_once(subject, payload, timeout_s)
        except (NoAnswerError, BusForbiddenError):
            return None
        content_type = answer.headers.get(CONTENT_TYPE) if answer.headers else None
        return Message(answer.subject, answer.data, content_type, answer.reply)

    async def _settle(self) -> None:
        """Returns once the server has read everything sent so far, or is unreachable.

        A message to ourselves: the client's own flush sends its PING past what is still buffered.
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
        """The answer. Raises NoAnswerError as soon as it is known that none will come, and
        BusForbiddenError if this process may not ask."""
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()

        def on_answer(message: Msg | None) -> None:
            if not future.done():
                future.set_result(message)

        def on_forbidden(error: BusForbiddenError) -> None:
            if not future.done():
                future.set_exception(error)

        reply = self._inbox.expect(on_answer)
        try:
            with self._forbidden.asking(subject, on_forbidden):
                if not await self.send(subject, payload, reply, headers):
                    raise NoAnswerError("the server is unreachable")
                async with asyncio.timeout(timeout_s):
                    answer = await future
        except TimeoutError as error:
            raise NoAnswerError("no answer in time") from error
        finally:
            self._inbox.forget(reply)
        if answer is None:
            raise NoAnswerError("the connection was lost")
        if status_of(answer) == _NO_RESPONDERS:
            raise NoAnswerError("nobody answers there")
        return answer

    async def request_until(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Msg, int]:
        """The answer to a request that may safely be made again, and how often it was made.

        Waits for the server to come back. Raises BusUnavailableError after ``timeout_s``
        (``connect_timeout_s`` unless told), BusForbiddenError at once.
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
                    attempt_s = max(min(left_s, _ATTEMPT_TIMEOUT_S), _RETRY_WAIT_S)
                    answer = await self.request_once(subject, payload, attempt_s, headers)
                except NoAnswerError as error:
                    cause = str(error)
                else:
                    return answer, num_attempts
            else:
                cause = "the server is unreachable"
            if loop.time() + _RETRY_WAIT_S >= deadline_s:
                raise BusUnavailableError(f"The message bus cannot be reached: {cause}.")
            await asyncio.sleep(_RETRY_WAIT_S)

    async def ask(
        self,
        subject: str,
        payload: bytes,
        on_answer: OnAnswer,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Start a request that is not waited for; the caller forgets the returned reply subject.
        Without a server the only answer is None. Raises PayloadTooLargeError."""
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

    async def open_inbox(self, receive: Callable[[Msg], Awaitable[None]]) -> str:
        """A new inbox of the caller's own; it gets everything sent to ``<inbox>.*``."""
        prefix = self._client.new_inbox()
        await self._client.subscribe(
            f"{prefix}.*", cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        return prefix

    async def send(
        self,
        subject: str,
        payload: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Hand a message over; False if the server is unreachable, and then it is never sent.
        Raises PayloadTooLargeError."""
        size_bytes = len(payload) + (_size(headers) if headers else 0)
        if size_bytes > self._client.max_payload:
            raise PayloadTooLargeError(size_bytes, self._client.max_payload)
        # Buffered by the client, it would be sent after its sender gave up.
        if not self._client.is_connected:
            self.num_dropped += 1
            return False
        try:
            await self._client.publish(subject, payload, reply, dict(headers) if headers else None)
        except _AWAY as error:
            self.num_dropped += 1
            logger.debug("a message was dropped", extra={"cause": repr(error)})
            return False
        return True

    # --- life ---

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            logger.error("messages were dropped unread", extra={"subject": error.subject})
            return
        if self._forbidden.note(error):
            return
        logger.debug("nats", extra={"cause": repr(error)})
        self._refusals.note(error, self._client)

    async def _on_disconnect(self) -> None:
        if self._up.is_set():
            self._up.clear()
            logger.warning("the NATS server is unreachable", extra={"url": self._where})
        self._lose_all()

    async def _on_reconnect(self) -> None:
        self._up.set()
        self._forbidden.forget()
        self._refusals.on_connected()
        logger.info("the NATS server is reachable again", extra={"url": self._where})
        for callback in self._on_reconnect_calls:
            try:
                callback()
            except Exception:
                logger.exception("a reconnect callback failed")

    async def close(self) -> None:
        """Send what is pending if the server is there, then end. Never raises."""
        if self._client.is_connected:
            await self._settle()
        self._up.clear()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._client.close()
                await self._end_reconnecting()
        except Exception:
            # nats-py raises assorted errors when it is closed during a reconnect.
            logger.debug("the client did not close cleanly", exc_info=True)
        self._lose_all()

    async def _end_reconnecting(self) -> None:
        """nats-py cancels its attempts once, in ``asyncio.wait_for``, which up to Python 3.11 may
        drop that in the moment in which an attempt fails. They would go on for ever then, and the
        end of the event loop would wait for them."""
        while (task := self._client._reconnection_task) is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_RETRY_WAIT_S)
        if self._client.is_connected:
            # The attempt in that moment went well.
            await self._client.close()

    def _lose_all(self) -> None:
        for callback in self._on_loss_calls:
            callback()


class NatsCallback:
    """A subscription; closing it is safe at any time."""

    def __init__(self, subscription: NatsSubscription) -> None:
        self._subscription = subscription

    async def close(self) -> None:
        try:
            await self._subscription.unsubscribe()
        except _AWAY as error:
            logger.debug("already unsubscribed", extra={"cause": repr(error)})


def _size(headers: Mapping[str, Any]) -> int:
    """Headers count towards the server's payload limit."""
    return _HEADER_LINE_BYTES + sum(
        len(key.encode()) + len(str(value).encode()) + 4 for key, value in headers.items()
    )
