"""What the clients of the in-memory bus share: subscribers, streams, and whether it is up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

from bus.clock import Clock, SystemClock
from bus.codec import CONTENT_TYPE
from bus.memory.journal import StoredJournal
from bus.memory.queue import StoredJobs
from bus.memory.stores import Entries, OutboxLog, StoredResults
from bus.transport import Message, OnMessage
from schemas.config import NatsConfig
from schemas.errors import BusUnavailableError, PayloadTooLargeError
from schemas.jobs import DeadJob

DEFAULT_MAX_PAYLOAD_BYTES = 1024 * 1024


class Subscriber:
    """One subscription; the broker calls it until it is closed."""

    def __init__(self, broker: MemoryBroker, subject: str, on_message: OnMessage, group: str):
        self._broker = broker
        self._parts = subject.split(".")
        self.on_message = on_message
        self.group = group
        self.closed = False

    def matches(self, subject: str) -> bool:
        parts = subject.split(".")
        for index, wanted in enumerate(self._parts):
            if wanted == ">":
                return len(parts) > index
            if index >= len(parts) or wanted not in ("*", parts[index]):
                return False
        return len(parts) == len(self._parts)

    def deliver(self, message: Message) -> None:
        if not self.closed:
            self.on_message(message)

    async def close(self) -> None:
        self.closed = True
        self._broker.remove(self)


class MemoryBroker:
    """A server in memory. ``stop`` and ``start`` play an outage: stored work stays, core messages
    published meanwhile are lost, leases run on."""

    def __init__(
        self,
        clock: Clock | None = None,
        config: NatsConfig | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.config = config or NatsConfig()
        self.max_payload_bytes = max_payload_bytes
        self.up = True
        self.jobs = StoredJobs(self.clock, self.config)
        self.dead: list[DeadJob] = []
        self.results = StoredResults(self.clock, self.config.results_ttl_s)
        self.journal = StoredJournal(self.clock, self.config.files_ttl_s)
        self.outbox = OutboxLog(self.clock, self.config.outbox_max_age_s)
        self.workers = Entries(self.clock)
        self.on_start: list[Callable[[], None]] = []
        self._subscribers: list[Subscriber] = []
        self._inboxes = itertools.count(1)
        self._turns = itertools.count()

    def stop(self) -> None:
        self.up = False

    def start(self) -> None:
        self.up = True
        self.jobs.wake()
        self.outbox.wake()
        for callback in list(self.on_start):
            callback()

    def require_up(self) -> None:
        """Raises BusUnavailableError while the broker is stopped."""
        if not self.up:
            raise BusUnavailableError("The message bus cannot be reached. Try again later.")

    def require_fits(self, size_bytes: int) -> None:
        """Raises PayloadTooLargeError."""
        if size_bytes > self.max_payload_bytes:
            raise PayloadTooLargeError(size_bytes, self.max_payload_bytes)

    # --- core messaging ---

    def publish(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> bool:
        """Deliver to every subscriber in the loop's next turn; whether there was one."""
        if not self.up:
            return False
        self.require_fits(len(payload))
        content_type = headers.get(CONTENT_TYPE) if headers else None
        message = Message(subject, payload, content_type, reply)
        matching = [one for one in self._subscribers if one.matches(subject)]
        chosen = [one for one in matching if not one.group]
        for group in sorted({one.group for one in matching if one.group}):
            members = [one for one in matching if one.group == group]
            chosen.append(members[next(self._turns) % len(members)])
        loop = asyncio.get_running_loop()
        for subscriber in chosen:
            loop.call_soon(subscriber.deliver, message)
        return bool(chosen)

    def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> Subscriber:
        subscriber = Subscriber(self, subject, on_message, group)
        self._subscribers.append(subscriber)
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._inboxes)}"
