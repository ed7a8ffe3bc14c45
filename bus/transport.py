"""Core messaging below frames, control and heartbeats: at most once, by subject.

``bus.nats`` and ``bus.memory`` implement it; what is said over it is written once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from millrace.schemas.errors import MalformedMessageError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Subscription(Protocol):
    """Something that delivers to a callback until it is closed."""

    async def close(self) -> None: ...


class Message(NamedTuple):
    """One message as it came. ``reply`` is where an answer goes, empty if none is wanted."""

    subject: str
    payload: bytes
    content_type: str | None
    reply: str
    headers: Mapping[str, str] | None = None


OnMessage = Callable[[Message], None]


class Transport(Protocol):
    """One connection."""

    @property
    def max_payload_bytes(self) -> int: ...

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand a message over; while the server is unreachable it is dropped."""

    async def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> Subscription:
        """Once this returns every later message arrives; one member of ``group`` gets each."""

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        """The first answer, or None if nobody gave one in time."""

    async def probe(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        """As ``request``. Raises BusUnavailableError where the silence says nothing about the
        listener: the server is unreachable, or forbids this process the subject."""


async def listen(
    transport: Transport,
    subject: str,
    read: Callable[[Message], T],
    callback: Callable[[T], None],
) -> Subscription:
    """Call back with each message of a subject that can be read. A message for which ``read``
    raises MalformedMessageError or ValueError is dropped, and what ``callback`` raises is logged.
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
    """Log that a message could not be read."""
    logger.warning(
        "dropped a message that could not be read",
        extra={"subject": message.subject, "size_bytes": len(message.payload)},
    )
