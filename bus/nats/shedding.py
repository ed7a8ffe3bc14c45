"""Removal of waiting jobs, or of an idle consumer, while other processes pull."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

from millrace.bus import subjects
from millrace.bus.codec import CONTENT_TYPE
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import MESSAGE_ID, Connection
from millrace.bus.nats.jetstream import JetStreamError, RawMessage

logger = logging.getLogger(__name__)

# Longest pause of a tenant queue's deliveries, also if this process dies meanwhile.
_PAUSE_S = 2.0
_PAST = datetime.fromtimestamp(0, UTC)


async def take_newest(
    connection: Connection, tenant_queue: TenantQueue, count: int
) -> list[RawMessage]:
    """Delete and return up to ``count`` of the newest messages that are not leased, newest first.

    Waiting messages are those behind the newest delivered one. Deleting a message takes it, but
    does not stop a delivery that is under way, so deliveries are paused meanwhile. Raises
    BusUnavailableError: messages deleted before are stored again.
    """
    stream, consumer = subjects.JOBS_STREAM, subjects.jobs_consumer(tenant_queue)
    pause_until = datetime.now(UTC) + timedelta(seconds=_PAUSE_S)
    await jetstream.pause(connection, stream, consumer, pause_until)
    taken: list[RawMessage] = []
    try:
        await _delete_newest(connection, tenant_queue, count, taken)
        info = await jetstream.consumer_info(connection, stream, consumer)
    except BaseException:
        await _put_back(connection, taken)
        raise
    # If another process paused it again, that process ends the pause.
    if _is_same(info.config.pause_until, pause_until):
        await jetstream.pause(connection, stream, consumer, _PAST)
    # The pause may have ended before the deletions, so messages that may have been delivered are
    # put back. Such a message may run twice, which epochs and record identities allow. Dropped, it
    # might never run.
    delivered = info.delivered.stream_seq
    await _put_back(connection, [message for message in taken if message.seq <= delivered])
    return [message for message in taken if message.seq > delivered]


async def remove_idle(connection: Connection, tenant_queue: TenantQueue) -> bool:
    """Remove an idle tenant queue's consumer; return whether it has jobs.

    Removing a consumer forgets its deliveries, so it must have none: deliveries are paused before
    the check. Raises BusUnavailableError.
    """
    stream, consumer = subjects.JOBS_STREAM, subjects.jobs_consumer(tenant_queue)
    pause_until = datetime.now(UTC) + timedelta(seconds=_PAUSE_S)
    try:
        if (await jetstream.consumer_info(connection, stream, consumer)).has_messages:
            return True
        await jetstream.pause(connection, stream, consumer, pause_until)
        info = await jetstream.consumer_info(connection, stream, consumer)
        if not info.has_messages:
            await jetstream.delete_consumer(connection, stream, consumer, timeout_s=_PAUSE_S / 2)
        elif _is_same(info.config.pause_until, pause_until):
            await jetstream.pause(connection, stream, consumer, _PAST)
    except JetStreamError as error:
        if error.number != jetstream.CONSUMER_NOT_FOUND:
            raise
        return False  # another process removed it, or it was never used
    return info.has_messages


async def _delete_newest(
    connection: Connection, tenant_queue: TenantQueue, count: int, taken: list[RawMessage]
) -> None:
    stream, subject = subjects.JOBS_STREAM, subjects.job(tenant_queue)
    consumer = subjects.jobs_consumer(tenant_queue)
    delivered = (await jetstream.consumer_info(connection, stream, consumer)).delivered.stream_seq
    while len(taken) < count:
        message = await jetstream.newest(connection, stream, subject)
        if message is None or message.seq <= delivered:
            return
        if await jetstream.delete(connection, stream, message.seq):
            taken.append(message)


async def _put_back(connection: Connection, messages: list[RawMessage]) -> None:
    for message in reversed(messages):
        logger.info("putting a job back into the queue", extra={"sequence": message.seq})
        headers = {MESSAGE_ID: f"back:{message.seq}"}
        content_type = message.header(CONTENT_TYPE)
        if content_type is not None:
            headers[CONTENT_TYPE] = content_type
        await jetstream.store(connection, message.subject, message.payload, headers)


def _is_same(timestamp: str, moment: datetime) -> bool:
    return bool(timestamp) and datetime.fromisoformat(timestamp) == moment
