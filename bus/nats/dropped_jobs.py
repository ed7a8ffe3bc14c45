"""Jobs that the server drops because their ``Nats-Msg-Id`` was used: stored anew.

The server acknowledges such a message to its publisher (``duplicate``) and tells no one else. Core
subscribers of the subject hear it all the same. A scheduler stores it again under an id of its own,
and answers it as it answers every message that repeats a request id.
"""

from __future__ import annotations

import hashlib
import logging
import uuid

from millrace.bus import subjects
from millrace.bus.codec import CONTENT_TYPE
from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import MESSAGE_ID, Connection
from millrace.bus.nats.jetstream import JetStreamError
from millrace.bus.transport import Message, Subscription
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.runtime.tracing import HEADER as TRACEPARENT
from millrace.schemas.errors import MillraceError

logger = logging.getLogger(__name__)

# A stored message is announced within milliseconds. The server is asked about one that was not
# announced for this long.
GRACE_S = 1.0
_LOOK_S = 0.25
_MAX_PENDING = 10_000
# Our own messages on these subjects: probes, and jobs that were stored anew.
_REPEAT = "Millrace-Repeat"
_EXPECTED_LAST_ID = "Nats-Expected-Last-Msg-Id"
_WRONG_LAST_ID = 10070


class DroppedJobs:
    """Hears the jobs of services and the announcements of what the server stored. A job without
    an announcement, or one of several that have the same id, may have been dropped: the server is
    asked which message has its id.

    Every scheduler does this. The id under which a job is stored anew is made of its id, its
    publisher's inbox and its payload, so that the server keeps one of the copies.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._pending: dict[str, list[tuple[float, Message]]] = {}
        self._num_pending = 0
        self._subscriptions: list[Subscription] = []
        self._tasks = Tasks()

    async def open(self) -> None:
        """Begin to listen."""
        subscribe = self._connection.subscribe
        self._subscriptions.append(await subscribe(subjects.ALL_STORED_JOBS, self._on_stored))
        for subject in subjects.SERVICE_JOBS:
            self._subscriptions.append(await subscribe(subject, self._on_published))
        self._tasks.repeat(self._look, _LOOK_S, self._clock, "store dropped jobs anew")

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        await self._tasks.close()

    def _on_published(self, message: Message) -> None:
        headers = message.headers or {}
        message_id = headers.get(MESSAGE_ID)
        if not message_id or _REPEAT in headers:
            return
        if self._num_pending >= _MAX_PENDING:
            logger.warning("a job is not checked for being dropped: too many wait for it")
            return
        self._num_pending += 1
        self._pending.setdefault(message_id, []).append((self._clock.monotonic(), message))

    def _on_stored(self, message: Message) -> None:
        message_id = (message.headers or {}).get(MESSAGE_ID)
        if message_id and len(self._pending.get(message_id, ())) == 1:
            self._take(message_id)

    def _take(self, message_id: str) -> list[Message]:
        taken = [message for _, message in self._pending.pop(message_id)]
        self._num_pending -= len(taken)
        return taken

    async def _look(self) -> None:
        due_s = self._clock.monotonic() - GRACE_S
        due = [one for one, heard in self._pending.items() if heard[0][0] <= due_s]
        for message_id in due:
            for message in self._take(message_id):
                try:
                    if await self._was_dropped(message_id, message):
                        await self._store_anew(message_id, message)
                except MillraceError as error:
                    logger.warning(
                        "a job that the server dropped as a duplicate is not answered",
                        extra={"subject": message.subject, "reason": error.message},
                    )

    async def _was_dropped(self, message_id: str, message: Message) -> bool:
        """Whether the server has, or had, another message under this id. False for one that it
        refused, of which its publisher was told, and for a copy of one that waits or runs."""
        sequence = await self._sequence_of(message_id, message.subject)
        if sequence is None:
            return False
        stored = await jetstream.get(self._connection, subjects.JOBS_STREAM, sequence)
        return (
            stored is None or stored.subject != message.subject or stored.payload != message.payload
        )

    async def _sequence_of(self, message_id: str, subject: str) -> int | None:
        """The place of the message that has this id; None if none has it of late.

        The server compares ids before it looks at the message that is expected to be the last,
        which never is: so this message is not stored."""
        headers = {MESSAGE_ID: message_id, _EXPECTED_LAST_ID: uuid.uuid4().hex, _REPEAT: "probe"}
        try:
            return (await jetstream.store(self._connection, subject, b"", headers)).seq or None
        except JetStreamError as error:
            if error.number != _WRONG_LAST_ID:
                raise
            return None

    async def _store_anew(self, message_id: str, message: Message) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for part in (message_id.encode(), message.reply.encode(), message.payload):
            digest.update(len(part).to_bytes(8))
            digest.update(part)
        known = message.headers or {}
        headers = {name: known[name] for name in (CONTENT_TYPE, TRACEPARENT) if name in known}
        headers |= {MESSAGE_ID: f"repeat:{digest.hexdigest()}", _REPEAT: "job"}
        await jetstream.store(self._connection, message.subject, message.payload, headers)
        logger.info("a job with a used id is stored anew", extra={"subject": message.subject})
