"""Broker that the clients of the in-memory bus share: subscribers, streams, outages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence

from millrace.bus.codec import CONTENT_TYPE
from millrace.bus.memory.queue import StoredJobs
from millrace.bus.memory.stores import (
    MemoryBucket,
    MemoryJournal,
    MemoryOutbox,
    MemoryServer,
    StoredResults,
)
from millrace.bus.transport import Message, OnMessage
from millrace.runtime.clock import Clock, SystemClock
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import DeadJob

DEFAULT_MAX_PAYLOAD_BYTES = 1024 * 1024


class Subscriber:
    """Subscription that the broker calls until it is closed. ``number`` is its order."""

    def __init__(
        self, broker: MemoryBroker, number: int, subject: str, on_message: OnMessage, group: str
    ) -> None:
        self._broker = broker
        self.number = number
        self.subject = subject
        self.parts = subject.split(".")
        self.on_message = on_message
        self.group = group
        self.closed = False

    @property
    def is_pattern(self) -> bool:
        return "*" in self.parts or ">" in self.parts

    def matches(self, parts: Sequence[str]) -> bool:
        """Return whether the subscription matches the subject with these parts."""
        for index, wanted in enumerate(self.parts):
            if wanted == ">":
                return len(parts) > index
            if index >= len(parts) or wanted not in ("*", parts[index]):
                return False
        return len(parts) == len(self.parts)

    def deliver(self, message: Message) -> None:
        if not self.closed:
            self.on_message(message)

    async def close(self) -> None:
        self.closed = True
        self._broker.remove(self)


class _Subscribers:
    """Subscribers by subject, or by the first part of their pattern.

    So a publisher pays nothing for hundreds of clients that do not match.
    """

    def __init__(self) -> None:
        self._exact: dict[str, list[Subscriber]] = {}
        self._patterns: dict[str, list[Subscriber]] = {}

    def add(self, subscriber: Subscriber) -> None:
        self._shelf(subscriber).append(subscriber)

    def remove(self, subscriber: Subscriber) -> None:
        shelf = self._shelf(subscriber)
        if subscriber in shelf:
            shelf.remove(subscriber)
        if not shelf and not subscriber.is_pattern:
            del self._exact[subscriber.subject]

    def of(self, subject: str) -> list[Subscriber]:
        """Return the subscribers of a subject, the oldest first."""
        parts = subject.split(".")
        found = list(self._exact.get(subject, ()))
        for first in (parts[0], "*", ">"):
            found += [one for one in self._patterns.get(first, ()) if one.matches(parts)]
        return sorted(found, key=lambda one: one.number) if len(found) > 1 else found

    def _shelf(self, subscriber: Subscriber) -> list[Subscriber]:
        if subscriber.is_pattern:
            return self._patterns.setdefault(subscriber.parts[0], [])
        return self._exact.setdefault(subscriber.subject, [])


class MemoryBroker(MemoryServer):
    """Memory server.

    ``stop`` and ``start`` simulate an outage: stored messages stay, core messages published
    meanwhile are lost, and leases run on. ``failed_streams`` (with the cause) accept nothing until
    the next start.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        config: NatsConfig | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        super().__init__(clock or SystemClock(), config or NatsConfig(), max_payload_bytes)
        self.jobs = StoredJobs(self.clock, self.config)
        self.dead: list[DeadJob] = []
        self.results = StoredResults(self.clock, self.config.results_ttl_s)
        self.journal = MemoryJournal(self)
        self.outbox = MemoryOutbox(self)
        self.workers = MemoryBucket(self)
        self.admits_jobs = True
        self.num_recovering = 0
        self.on_start: list[Callable[[], None]] = []
        self._subscribers = _Subscribers()
        self._numbers = itertools.count()
        self._inboxes = itertools.count(1)
        self._turns = itertools.count()

    def stop(self) -> None:
        self.up = False

    def start(self, *, lost_deliveries: bool = False) -> None:
        """Start the server again.

        ``lost_deliveries``: it was killed before it stored which jobs are leased.
        """
        self.up = True
        self.num_starts += 1
        self.failed_streams = {}
        if lost_deliveries:
            self.jobs.lose_deliveries()
        self.jobs.wake()
        self.outbox.wake()
        for callback in list(self.on_start):
            callback()

    # --- core messaging ---

    def publish(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> bool:
        """Deliver to every subscriber in the loop's next turn; return whether there was one."""
        if not self.up:
            return False
        self.require_fits(len(payload))
        content_type = headers.get(CONTENT_TYPE) if headers else None
        message = Message(subject, payload, content_type, reply, headers)
        matching = self._subscribers.of(subject)
        chosen = [one for one in matching if not one.group]
        for group in sorted({one.group for one in matching if one.group}):
            members = [one for one in matching if one.group == group]
            chosen.append(members[next(self._turns) % len(members)])
        loop = asyncio.get_running_loop()
        for subscriber in chosen:
            loop.call_soon(subscriber.deliver, message)
        return bool(chosen)

    def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> Subscriber:
        subscriber = Subscriber(self, next(self._numbers), subject, on_message, group)
        self._subscribers.add(subscriber)
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        self._subscribers.remove(subscriber)

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._inboxes)}"
