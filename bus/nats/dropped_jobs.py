"""Recovery of jobs that the server dropped because their ``Nats-Msg-Id`` was used before.

The server acknowledges such a message to its publisher (``duplicate``) and does not store it. Core
subscribers of the subject hear it all the same. A scheduler stores it again under a new id, and
answers it like every message that repeats a request id.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass

from millrace.bus import subjects
from millrace.bus.codec import CONTENT_TYPE
from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import MESSAGE_ID, Connection
from millrace.bus.nats.topology import DUPLICATE_WINDOW_S
from millrace.bus.transport import Message, Subscription
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.runtime.tracing import HEADER as TRACEPARENT
from millrace.schemas.errors import MillraceError

logger = logging.getLogger(__name__)

# A stored message is announced within milliseconds. A message without an announcement after this
# time was dropped, or refused.
GRACE_S = 1.0
_LOOK_S = 0.25
_MAX_PENDING = 10_000
_MAX_PENDING_BYTES = 64 * 1024 * 1024
_MAX_KNOWN = 65_536
# An id may be as long as a header of the server. Longer ids are kept as digests.
_MAX_ID_CHARACTERS = 128
# The header of a job that was stored again.
_REPEAT = "Millrace-Repeat"
_SEQUENCE = "Nats-Sequence"


@dataclass(slots=True)
class _Announced:
    """Message that the server stored.

    ``is_heard``: its publication was received, too. Publication and announcement may arrive in any
    order over different servers.
    """

    sequence: int
    announced_s: float
    is_heard: bool


class DroppedJobs:
    """Listener to services' jobs and to the server's announcements of stored messages.

    A job without an announcement, and each of several jobs with the same id, is compared with the
    message that was announced under its id. If they differ, the job was dropped.

    Every scheduler does this. The new id of a job is a digest of its id, its publisher's inbox and
    its payload, so the server keeps one of the copies. The server is never asked for an id:
    nats-server 2.15 has no such request, and a replicated stream stops accepting messages after a
    wrong ``Nats-Expected-Last-Msg-Id``.

    Up to ``_MAX_KNOWN`` ids are remembered. A duplicate of an older id is not answered.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._pending: dict[str, list[tuple[float, Message]]] = {}
        self._num_pending = 0
        self._pending_bytes = 0
        self._num_unchecked = 0
        # Announcements by key, the oldest first.
        self._known: OrderedDict[str, _Announced] = OrderedDict()
        self._subscriptions: list[Subscription] = []
        self._tasks = Tasks()

    async def open(self) -> None:
        """Subscribe to jobs and announcements."""
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
        if not message_id or _REPEAT in headers or any(map(_is_condition, headers)):
            return
        key = _key(message_id)
        now_s = self._clock.monotonic()
        known = self._known.get(key)
        if known is not None and not known.is_heard and known.announced_s >= now_s - GRACE_S:
            known.is_heard = True
            return
        num_bytes = self._pending_bytes + len(message.payload)
        if self._num_pending >= _MAX_PENDING or num_bytes > _MAX_PENDING_BYTES:
            self._num_unchecked += 1
            return
        self._num_pending += 1
        self._pending_bytes = num_bytes
        self._pending.setdefault(key, []).append((now_s, message))

    def _on_stored(self, message: Message) -> None:
        headers = message.headers or {}
        message_id, sequence = headers.get(MESSAGE_ID), headers.get(_SEQUENCE, "")
        if (
            not message_id
            or not sequence.isdecimal()
            or subjects.is_stored_reserved(message.subject)
        ):
            return
        key = _key(message_id)
        num_heard = len(self._pending.get(key, ()))
        now_s = self._clock.monotonic()
        self._known[key] = _Announced(int(sequence), now_s, is_heard=num_heard > 0)
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        if num_heard == 1:
            self._take(key)

    def _take(self, key: str) -> list[Message]:
        """Remove and return the pending messages of a key; none if they were taken meanwhile."""
        taken = [message for _, message in self._pending.pop(key, ())]
        self._num_pending -= len(taken)
        self._pending_bytes -= sum(len(message.payload) for message in taken)
        return taken

    async def _look(self) -> None:
        due_s = self._clock.monotonic() - GRACE_S
        forgotten_s = self._clock.monotonic() - DUPLICATE_WINDOW_S
        while self._known and next(iter(self._known.values())).announced_s < forgotten_s:
            self._known.popitem(last=False)
        if self._num_unchecked:
            logger.warning(
                "duplicates of jobs may stay unanswered: too many jobs wait to be checked",
                extra={"num_unchecked": self._num_unchecked},
            )
            self._num_unchecked = 0
        due = [key for key, heard in self._pending.items() if heard[0][0] <= due_s]
        for key in due:
            for message in self._take(key):
                try:
                    if await self._was_dropped(key, message):
                        await self._store_anew(message)
                except MillraceError as error:
                    logger.warning(
                        "a job that the server dropped as a duplicate could not be stored again",
                        extra={"subject": message.subject, "reason": error.message},
                    )

    async def _was_dropped(self, key: str, message: Message) -> bool:
        """Return whether another message has the id, as far as this process knows.

        False for a message that the server refused, since its publisher was told, and for a copy of
        a job that waits or runs.
        """
        known = self._known.get(key)
        if known is None:
            return False
        stored = await jetstream.get(self._connection, subjects.JOBS_STREAM, known.sequence)
        return (
            stored is None or stored.subject != message.subject or stored.payload != message.payload
        )

    async def _store_anew(self, message: Message) -> None:
        known = message.headers or {}
        digest = hashlib.blake2b(digest_size=16)
        for part in (known[MESSAGE_ID].encode(), message.reply.encode(), message.payload):
            digest.update(len(part).to_bytes(8))
            digest.update(part)
        headers = {name: known[name] for name in (CONTENT_TYPE, TRACEPARENT) if name in known}
        headers |= {MESSAGE_ID: f"repeat:{digest.hexdigest()}", _REPEAT: "job"}
        await jetstream.store(self._connection, message.subject, message.payload, headers)
        logger.info(
            "stored a job with a used message id under a new id",
            extra={"subject": message.subject},
        )


def _key(message_id: str) -> str:
    if len(message_id) <= _MAX_ID_CHARACTERS:
        return message_id
    return hashlib.blake2b(message_id.encode(), digest_size=32).hexdigest()


def _is_condition(header: str) -> bool:
    """Return whether a header is a condition for storing. The publisher is told if it fails."""
    return header.startswith("Nats-Expected-")
