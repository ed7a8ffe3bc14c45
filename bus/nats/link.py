"""NATS client that reconnects by itself."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import nats.errors
from nats.aio.client import Srv
from nats.aio.msg import Msg

from millrace.bus.nats.security import ConnectionRefusals, connect_options, servers_of
from millrace.bus.nats.servers.client import SecureClient
from millrace.bus.nats.servers.home import Home
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import (
    BusForbiddenError,
    BusUnavailableError,
    MillraceError,
    PayloadTooLargeError,
)
from millrace.schemas.redaction import redact_urls

logger = logging.getLogger(__name__)

# nats-py lowercases the server's messages.
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')

OnForbidden = Callable[[BusForbiddenError], None]


class Forbidden:
    """Forbidden subjects of one connection.

    Pending requests on such a subject fail at once. Each subject is logged once for a connection.
    """

    def __init__(self) -> None:
        self._asking: dict[str, list[tuple[str, OnForbidden]]] = {}
        self._publish: set[str] = set()
        self._subscription: set[str] = set()

    def note(self, error: Exception) -> bool:
        """Record a permission error; return whether the error was one."""
        found = _VIOLATION.search(str(error).lower())
        if found is None:
            return False
        kind, subject = found.groups()
        known = self._publish if kind == "publish" else self._subscription
        if subject not in known:
            known.add(subject)
            logger.error(
                "the NATS server forbids a subject to this process",
                extra={"action": kind, "subject": subject},
            )
        if kind == "publish":
            for asked, on_forbidden in self._asking.get(subject, ())[:]:
                on_forbidden(_error("publish to", asked))
        return True

    def forget(self) -> None:
        """Forget the subjects, as a new connection may have other permissions."""
        self._publish.clear()
        self._subscription.clear()

    def check_subscribed(self, subject: str) -> None:
        """Raise BusForbiddenError if the server refused a subscription that it has read."""
        if subject.lower() in self._subscription:
            raise _error("subscribe to", subject)

    @contextlib.contextmanager
    def asking(self, subject: str, on_forbidden: OnForbidden) -> Iterator[None]:
        """Call ``on_forbidden`` if publishing on the subject turns out to be forbidden."""
        key = subject.lower()
        callbacks = self._asking.setdefault(key, [])
        entry = (subject, on_forbidden)
        callbacks.append(entry)
        try:
            yield
        finally:
            callbacks.remove(entry)
            if not callbacks:
                self._asking.pop(key, None)


def _error(action: str, subject: str) -> BusForbiddenError:
    return BusForbiddenError(
        f"The NATS server does not let this process {action} {subject}. Give its user the "
        "permissions of this part (deploy/nats/accounts.conf), or correct the user in nats.url."
    )


_RECONNECT_WAIT_S = 0.1
_PING_INTERVAL_S = 5
_PENDING_BYTES = 32 * 1024 * 1024
_CLOSE_TIMEOUT_S = 2.0
_HEADER_LINE_BYTES = len(b"NATS/1.0\r\n\r\n")

RETRY_WAIT_S = 0.05
# Errors of nats-py for a message that cannot be sent.
UNSENT = (nats.errors.Error, OSError)


class Link:
    """Link to NATS that owns the client; ``close`` ends it with its subscriptions.

    It connects only to ``server`` if that is given, else to the servers of ``config``.
    """

    def __init__(
        self,
        config: NatsConfig,
        name: str,
        inbox_prefix: str = "_INBOX",
        server: Srv | None = None,
    ) -> None:
        self._config = config
        self._name = name
        self._options = connect_options(config)
        self._servers = servers_of(config)
        if server is not None:
            self._servers = [server.uri.geturl()]
            if server.tls_name is not None:
                self._options["tls_hostname"] = server.tls_name
        self._client = SecureClient()
        self._home = Home(self._client)
        self._inbox_prefix = inbox_prefix
        self._forbidden = Forbidden()
        self._up = asyncio.Event()
        self._refusals = ConnectionRefusals(config)
        self._on_reconnect_calls: list[Callable[[], Callable[[], None] | None]] = []
        self._on_loss_calls: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Connect to a server.

        Raises:
            BusUnavailableError: No server answers within ``connect_timeout_s``.
            UntrustedServerError: No server can be trusted. Raised at once when all have failed.
            CredentialsRefusedError: No server accepts the credentials. Raised at once when all have
                failed.
        """
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
        except (TimeoutError, *UNSENT) as error:
            await self.close()
            if self._refusals.last is not None:
                raise self._refusals.last from error
            raise BusUnavailableError(
                f"No NATS server answers at {self._where}. Start one, or correct nats.url."
            ) from error
        self._refusals.on_connected()
        self._home.note_connected()
        self._up.set()

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
        """Major and minor version of the server."""
        version = self._client.connected_server_version
        return version.major, version.minor

    @property
    def other_servers(self) -> list[Srv]:
        """Known servers of this cluster except the present one."""
        return self._client.other_servers

    async def move_to(self, server: Srv) -> None:
        """Move to another server, which becomes the home.

        Messages published before are not lost. Messages of others during the move are lost, as with
        every reconnect.
        """
        self._home.settle(server)
        await self._client.move_to(server)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each reconnect.

        A bound method is held weakly, so a failed worker or scheduler does not stay in memory.
        """
        is_method = inspect.ismethod(callback)
        self._on_reconnect_calls.append(
            weakref.WeakMethod(callback) if is_method else lambda: callback
        )

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call back whenever the connection is lost: pending requests get no answer."""
        self._on_loss_calls.append(callback)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Return whether the connection is up, or comes back within ``timeout_s``."""
        if self.connected:
            return True
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                while not self._client.is_connected:
                    if self._up.is_set():
                        await asyncio.sleep(RETRY_WAIT_S)  # the loss is being processed
                    await self._up.wait()
        except TimeoutError:
            return False
        return True

    async def open_inbox(self, receive: Callable[[Msg], Awaitable[None]]) -> str:
        """Open a new inbox, which gets all messages to ``<inbox>.*``; return its prefix."""
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
        """Send a message; return False if the server is unreachable, and then it is never sent.

        Raises PayloadTooLargeError.
        """
        size_bytes = len(payload) + (_size(headers) if headers else 0)
        if size_bytes > self._client.max_payload:
            raise PayloadTooLargeError(size_bytes, self._client.max_payload)
        # The client would buffer it and send it after its sender gave up.
        if not self._client.is_connected:
            return False
        try:
            await self._client.publish(subject, payload, reply, dict(headers) if headers else None)
        except UNSENT as error:
            logger.debug("a message was dropped", extra={"cause": repr(error)})
            return False
        return True

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
            if not self._client.is_moving:
                logger.warning("the NATS server is unreachable", extra={"url": self._where})
        self._lose_all()

    async def _on_reconnect(self) -> None:
        self._up.set()
        self._forbidden.forget()
        self._refusals.on_connected()
        self._home.note_connected()
        logger.info("the NATS server is reachable again", extra={"url": self._where})
        self._on_reconnect_calls = [one for one in self._on_reconnect_calls if one() is not None]
        for reference in self._on_reconnect_calls:
            callback = reference()
            if callback is None:
                continue
            try:
                callback()
            except Exception:
                logger.exception("a reconnect callback failed")

    async def close(self) -> None:
        """Close the client. Never raises."""
        self._up.clear()
        self._home.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._client.close()
                await self._end_reconnecting()
        except Exception:
            # nats-py raises various errors when it is closed during a reconnect.
            logger.debug("the client did not close cleanly", exc_info=True)
        finally:
            # A cancelled close must stop the watchdog, too.
            self._client.abort()
            self._lose_all()

    async def _end_reconnecting(self) -> None:
        """Cancel reconnect attempts until they end.

        nats-py cancels them once, in ``asyncio.wait_for``. Up to Python 3.11 that may drop a
        cancellation at the moment in which an attempt fails. The attempts would then go on forever,
        and the end of the event loop would wait for them.
        """
        while (task := self._client._reconnection_task) is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=RETRY_WAIT_S)
        if self._client.is_connected:
            # The attempt succeeded at that moment.
            await self._client.close()

    def _lose_all(self) -> None:
        for callback in self._on_loss_calls:
            callback()


def _size(headers: Mapping[str, Any]) -> int:
    """Return the size of headers, which count towards the server's payload limit."""
    return _HEADER_LINE_BYTES + sum(
        len(key.encode()) + len(str(value).encode()) + 4 for key, value in headers.items()
    )
