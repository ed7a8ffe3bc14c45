"""Core messaging below frames, control and heartbeats: at most once, by subject.

``bus.nats`` and ``bus.memory`` implement it. Code above it is written once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from millrace.schemas.errors import MalformedMessageError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Subscription(Protocol):
    """Subscription that calls back until it is closed."""

    async def close(self) -> None: ...


class Message(NamedTuple):
    """Received message. ``reply`` is the subject for an answer, empty if none is wanted."""

    subject: str
    payload: bytes
    content_type: str | None
    reply: str
    headers: Mapping[str, str] | None = None


OnMessage = Callable[[Message], None]


class Transport(Protocol):
    """Connection for core messages."""

    @property
    def max_payload_bytes(self) -> int: ...

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish a message; it is dropped while the server is unreachable."""

    async def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> Subscription:
        """Subscribe to later messages; each goes to one member of ``group``."""

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        """Return the first answer; None without one within ``timeout_s``."""

    async def probe(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        """Send a request like ``request``, but distinguish silence from an outage.

        Raises BusUnavailableError if the server is unreachable or forbids the subject.
        """


async def listen(
    transport: Transport,
    subject: str,
    read: Callable[[Message], T],
    callback: Callable[[T], None],
) -> Subscription:
    """Call back with each readable message of a subject.

    A message for which ``read`` raises MalformedMessageError or ValueError is dropped. Errors of
    ``callback`` are logged.
    """

    def on_message(message: Message) -> None:
        try:
            item = read(message)
        except (MalformedMessageError, ValueError):
            log_dropped(message)
            return
        try:
            callback(item)
        except Exception:
            logger.exception("a listener failed", extra={"subject": message.subject})

    return await transport.subscribe(subject, on_message)


def log_dropped(message: Message) -> None:
    """Log a message that could not be read."""
    logger.warning(
        "dropped a message that could not be read",
        extra={"subject": message.subject, "size_bytes": len(message.payload)},
    )
