"""Results, outbox, worker bucket and journal on JetStream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import msgspec
from nats.aio.msg import Msg

from millrace.bus import codec, subjects
from millrace.bus.api import OutboxMessage
from millrace.bus.jobs.ends import watch_results
from millrace.bus.nats import jetstream, topology
from millrace.bus.nats.connection import MESSAGE_ID, Connection, status_of
from millrace.bus.nats.jetstream import JetStreamError
from millrace.bus.nats.puller import ConsumerPuller, PullInbox, read_lease
from millrace.bus.store.objects import JournalConflictError, JournalEntry
from millrace.bus.transport import Subscription
from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import BusForbiddenError, BusUnavailableError, MillraceError
from millrace.schemas.jobs import JobResult
from millrace.schemas.records import Record

logger = logging.getLogger(__name__)

_ANSWERS_TIMEOUT_S: Final = 1.0


@dataclass(slots=True)
class _Message:
    subject: str
    payload: bytes
    headers: Mapping[str, str]
    answer: asyncio.Future[Msg | None]
    reply: str = ""


class PublishBatcher:
    """Batcher that stores messages in groups.

    A process that sleeps between messages pays each time for waking up and for socket reads and
    writes, most of the cost of storing. A group pays once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: list[_Message] = []
        self._tasks = Tasks()

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str], linger_s: float
    ) -> None:
        """Store a message like ``jetstream.store``, after at most ``linger_s``.

        The first message of a group determines how long it waits.
        """
        loop = asyncio.get_running_loop()
        message = _Message(subject, payload, headers, loop.create_future())
        self._waiting.append(message)
        if len(self._waiting) == 1:
            loop.call_later(linger_s, self._leave)
        answer = await message.answer
        if answer is None or status_of(answer) is not None:
            # Lost, late, or no server: store it alone, for as long as that takes.
            await jetstream.store(self._connection, subject, payload, headers)
        else:
            jetstream.stored_at(answer)

    def _leave(self) -> None:
        group = [message for message in self._waiting if not message.answer.done()]
        self._waiting.clear()
        self._tasks.spawn(self._send(group), "store a batch")

    async def _send(self, group: Sequence[_Message]) -> None:
        try:
            for message in group:
                await self._send_one(message)
            if group:
                answers = [message.answer for message in group]
                await asyncio.wait(answers, timeout=_ANSWERS_TIMEOUT_S)
        finally:
            # Release all waiting callers after any failure.
            for message in group:
                self._connection.forget(message.reply)
                _settle(message.answer, None)

    async def _send_one(self, message: _Message) -> None:
        on_answer = partial(_settle, message.answer)
        try:
            message.reply = await self._connection.ask(
                message.subject, message.payload, on_answer, message.headers
            )
        except MillraceError as error:
            if not message.answer.done():
                message.answer.set_exception(error)


def _settle(future: asyncio.Future[Msg | None], answer: Msg | None) -> None:
    if not future.done():
        future.set_result(answer)


_ACK = b"+ACK"
_SEQUENCE = "Nats-Sequence"
_NS_PER_S = 1e9


class _Found(NamedTuple):
    """Stored result with its place in the stream."""

    result: JobResult
    sequence: int


class NatsResults:
    """Results on NATS. See ``bus.api.Results``. They are JSON for readers outside Millrace."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def store(self, result: JobResult) -> None:
        if await self._store_after(result, 0) or result.is_of_no_job:
            return
        try:
            found = await self._find(result.tenant, result.request_id)
        except BusForbiddenError:
            return  # permissions of an earlier version: the first result stays
        if found is not None and found.result.is_of_no_job:
            await self._store_after(result, found.sequence)

    async def _store_after(self, result: JobResult, sequence: int) -> bool:
        """Store a result if the newest of its request is at ``sequence`` (0: none)."""
        headers = {**codec.JSON_HEADERS, "Nats-Expected-Last-Subject-Sequence": str(sequence)}
        subject = subjects.result(result.tenant, result.request_id)
        try:
            await jetstream.store(self._connection, subject, codec.encode_json(result), headers)
        except JetStreamError as error:
            if error.number != jetstream.WRONG_LAST_SEQUENCE:
                raise
            return False
        return True

    async def fetch(self, tenant: str, request_id: str) -> JobResult | None:
        found = await self._find(tenant, request_id)
        return None if found is None else found.result

    async def _find(self, tenant: str, request_id: str) -> _Found | None:
        # The request's subject contains the result's, so permissions can separate tenants.
        result = subjects.result(tenant, request_id)
        request = f"{jetstream.API}.DIRECT.GET.{subjects.RESULTS_STREAM}.{result}"
        answer, _ = await self._connection.request_until(request, b"")
        status = status_of(answer)
        if status == jetstream.NOT_FOUND:
            return None
        if status is not None:
            raise BusUnavailableError(f"The message bus could not look a result up ({status}).")
        sequence = int((answer.headers or {}).get(_SEQUENCE, "0"))
        return _Found(codec.JOB_RESULT.decode(answer.data, codec.JSON), sequence)

    async def watch(self, tenant: str, on_stored: Callable[[str], None]) -> Subscription:
        return await watch_results(self._connection, tenant, on_stored)


class NatsOutbox:
    """Outbox on NATS. See ``bus.api.Outbox``."""

    def __init__(self, connection: Connection, inbox: PullInbox) -> None:
        self._connection = connection
        self._batcher = PublishBatcher(connection)
        self._puller = ConsumerPuller(
            connection,
            inbox,
            subjects.OUTBOX_STREAM,
            subjects.BRIDGE_CONSUMER,
            lambda: topology.ensure_bridge(connection),
        )

    async def publish(self, record: Record, linger_s: float = 0.0) -> None:
        headers = {MESSAGE_ID: subjects.record_identity(record)}
        subject, payload = subjects.record(record), codec.encode(record)
        if linger_s > 0.0:
            await self._batcher.store(subject, payload, headers, linger_s)
        else:
            await jetstream.store(self._connection, subject, payload, headers)

    async def pull(self, max_records: int, timeout_s: float) -> list[OutboxMessage]:
        messages = await self._puller.pull(max_records, timeout_s)
        return [
            OutboxMessage(
                sequence=read_lease(message.reply).stream_sequence,
                subject=message.subject,
                payload=message.data,
                lease=message.reply,
            )
            for message in messages
        ]

    async def ack(self, messages: Sequence[OutboxMessage]) -> None:
        """Acknowledge messages.

        The server reads the acks of a connection in order, so its answer to the last one confirms
        all.
        """
        if not messages:
            return
        for message in messages[:-1]:
            await self._connection.publish(message.lease, _ACK)
        await self._connection.request_until(messages[-1].lease, _ACK)

    async def rewind(self, sequence: int) -> None:
        last = await self.last_sequence()
        if sequence > last:
            logger.warning(
                "the outbox does not reach the requested sequence; rewinding to its beginning",
                extra={"sequence": sequence, "last_sequence": last},
            )
            sequence = 0
        await topology.ensure_bridge(self._connection, after_sequence=sequence)

    async def last_sequence(self) -> int:
        return (
            await jetstream.stream_info(self._connection, subjects.OUTBOX_STREAM)
        ).state.last_seq

    async def num_waiting(self) -> int:
        stream, name = subjects.OUTBOX_STREAM, subjects.BRIDGE_CONSUMER
        consumer = await jetstream.find_consumer(self._connection, stream, name)
        if consumer is not None:
            return consumer.num_pending + consumer.num_ack_pending
        return (await jetstream.stream_info(self._connection, stream)).state.messages


class NatsWorkerBucket:
    """Worker bucket on NATS. See ``bus.fleet.directory.WorkerBucket``.

    Puts are not confirmed: the next heartbeat follows soon.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def put(self, subject: str, payload: bytes) -> None:
        await self._connection.publish(subject, payload)

    async def entries(self) -> Sequence[bytes]:
        return [message.data for message in await self._newest()]

    async def ages(self) -> Sequence[tuple[bytes, float]]:
        # In this order, an entry written meanwhile does not appear older than it is.
        info = await jetstream.stream_info(self._connection, subjects.WORKERS_STREAM)
        now_ns = jetstream.epoch_ns(info.ts)
        messages = await self._newest()
        return [(message.data, (now_ns - _stored_ns(message)) / _NS_PER_S) for message in messages]

    async def put_after(self, subject: str, payload: bytes, after: int) -> int | None:
        return await jetstream.store_after(
            self._connection, subjects.WORKERS_STREAM, subject, payload, after, {}
        )

    async def get(self, subject: str) -> tuple[bytes, int] | None:
        found = await jetstream.newest(self._connection, subjects.WORKERS_STREAM, subject)
        return None if found is None else (found.payload, found.seq)

    async def _newest(self) -> list[Msg]:
        return await jetstream.newest_of_each(
            self._connection, subjects.WORKERS_STREAM, [subjects.ALL_WORKERS]
        )


def _stored_ns(message: Msg) -> int:
    assert message.headers is not None
    return jetstream.epoch_ns(message.headers["Nats-Time-Stamp"])


_SUBJECT = "Nats-Subject"


class NatsJournal:
    """Journal on NATS. See ``bus.store.journal.Journal``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        stream, headers = subjects.journal_stream(name), {"Nats-Rollup": "sub"} if replace else {}
        sequence = await jetstream.store_after(
            self._connection, stream, name, payload, after, headers
        )
        if sequence is None:
            raise JournalConflictError
        return sequence

    async def next(self, name: str, after: int) -> JournalEntry | None:
        body = {"seq": after + 1, "next_by_subj": name}
        request = f"{jetstream.API}.DIRECT.GET.{subjects.journal_stream(name)}"
        answer, _ = await self._connection.request_until(request, msgspec.json.encode(body))
        status = status_of(answer)
        if status == jetstream.NOT_FOUND:
            return None
        if status is not None:
            raise BusUnavailableError(f"The message bus could not look an entry up ({status}).")
        return _entry(answer)

    async def last(self, name: str) -> JournalEntry | None:
        stream = subjects.journal_stream(name)
        found = await jetstream.newest(self._connection, stream, name)
        return None if found is None else JournalEntry(sequence=found.seq, payload=found.payload)

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        if not names:
            return {}
        stream = subjects.journal_stream(names[0])
        messages = await jetstream.newest_of_each(self._connection, stream, names)
        return {_header(message, _SUBJECT): _entry(message) for message in messages}

    async def names(self, pattern: str) -> list[str]:
        stream = subjects.journal_stream(pattern)
        found = await jetstream.subjects_in(self._connection, stream, pattern)
        return sorted(found)

    async def drop(self, name: str) -> None:
        request = f"STREAM.PURGE.{subjects.journal_stream(name)}"
        await jetstream.call(self._connection, request, {"filter": name})


def _entry(message: Msg) -> JournalEntry:
    return JournalEntry(sequence=int(_header(message, _SEQUENCE)), payload=message.data)


def _header(message: Msg, name: str) -> str:
    assert message.headers is not None
    return str(message.headers[name])
