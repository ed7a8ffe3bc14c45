"""Taking the newest waiting jobs out of a queue that others pull from at the same time."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

from bus import subjects
from bus.codec import CONTENT_TYPE
from bus.nats import jetstream
from bus.nats.connection import MESSAGE_ID, Connection
from bus.nats.jetstream import RawMessage

logger = logging.getLogger(__name__)

# A shedder that dies holds its model's deliveries up for no longer than this.
_PAUSE_S = 2.0
_PAST = datetime.fromtimestamp(0, UTC)


async def take_newest(connection: Connection, model: str, count: int) -> list[RawMessage]:
    """Up to ``count`` of the newest messages that nobody holds, newest first; they are ours now.

    Waiting are the messages behind the newest one that was delivered. Whoever deletes a message
    has it, but a deletion does not stop a delivery that is under way, so deliveries are paused
    meanwhile. Raises JetStreamError or BusUnavailableError; what was deleted before is put back.
    """
    stream, consumer = subjects.JOBS_STREAM, subjects.jobs_consumer(model)
    pause_until = datetime.now(UTC) + timedelta(seconds=_PAUSE_S)
    await jetstream.pause(connection, stream, consumer, pause_until)
    taken: list[RawMessage] = []
    try:
        await _delete_newest(connection, model, count, taken)
        info = await jetstream.consumer_info(connection, stream, consumer)
    except BaseException:
        await _put_back(connection, taken)
        raise
    # If another shedder paused it again, the end of the pause is that one's to tell.
    if info.config.pause_until and _is_same(info.config.pause_until, pause_until):
        await jetstream.pause(connection, stream, consumer, _PAST)
    # The pause may have ended before we had: what may have been delivered is not ours. Put back,
    # it may run twice, which epochs and record identities allow for; dropped, it might never run.
    delivered = info.delivered.stream_seq
    await _put_back(connection, [message for message in taken if message.seq <= delivered])
    return [message for message in taken if message.seq > delivered]


async def _delete_newest(
    connection: Connection, model: str, count: int, taken: list[RawMessage]
) -> None:
    stream, job_filter = subjects.JOBS_STREAM, subjects.jobs_of(model)
    consumer = subjects.jobs_consumer(model)
    delivered = (await jetstream.consumer_info(connection, stream, consumer)).delivered.stream_seq
    while len(taken) < count:
        message = await jetstream.newest(connection, stream, job_filter)
        if message is None or message.seq <= delivered:
            return
        if await jetstream.delete(connection, stream, message.seq):
            taken.append(message)


async def _put_back(connection: Connection, messages: list[RawMessage]) -> None:
    for message in reversed(messages):
        logger.info("a job goes back to the queue", extra={"sequence": message.seq})
        headers = {MESSAGE_ID: f"back:{message.seq}"}
        content_type = message.header(CONTENT_TYPE)
        if content_type is not None:
            headers[CONTENT_TYPE] = content_type
        await jetstream.store(connection, message.subject, message.payload, headers)


def _is_same(timestamp: str, moment: datetime) -> bool:
    return datetime.fromisoformat(timestamp) == moment
