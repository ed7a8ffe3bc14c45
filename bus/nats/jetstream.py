"""JetStream requests of the bus, with their errors as types."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from nats.aio.msg import Msg

from millrace.bus.nats.connection import Connection, status_of
from millrace.bus.storage import NATS
from millrace.schemas.errors import BusUnavailableError, StoreFullError

Json = dict[str, Any]
T = TypeVar("T")

API = "$JS.API"
NOT_FOUND = "404"
_END_OF_BATCH = "204"
_ANSWERS_TIMEOUT_S = 5.0

# Error codes of nats-server.
FULL = 10077
WRONG_LAST_SEQUENCE = 10071
STREAM_NAME_IN_USE = 10058
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
CONSUMER_NOT_UNIQUE = 10100
MESSAGE_NOT_FOUND = 10037
SEQUENCE_NOT_FOUND = 10043
NOT_DELETED = 10057
# No room for a message: the stream takes none of its size (see ``NatsStorage``), or the server or
# account has reached its limit.
_NO_ROOM = frozenset({10002, 10023, 10047, 10054})
_NO_STORE = 10049
# "write <path>: no space left on device", as Go writes errors of files.
_OF_A_FILE = re.compile(r"\w+ \S.*: (.+)")


class JetStreamError(BusUnavailableError):
    """JetStream request that the server refused; ``number`` is its error code."""

    def __init__(self, number: int, description: str) -> None:
        self.reason = f"{description} ({number})"
        super().__init__(f"The message bus refused a request: {self.reason}.")
        self.number = number
        self.description = description


class StoredAt(msgspec.Struct, frozen=True):
    """Place of a stored message; ``duplicate``: it was stored before."""

    seq: int
    duplicate: bool = False


class Delivered(msgspec.Struct, frozen=True):
    stream_seq: int = 0


class _ConsumerConfig(msgspec.Struct, frozen=True):
    pause_until: str = ""


class ConsumerInfo(msgspec.Struct, frozen=True):
    """State of a consumer.

    ``delivered.stream_seq`` is the newest delivered message. ``config.pause_until`` is when the
    last pause ends or ended. ``ts`` is the server's time.
    """

    config: _ConsumerConfig
    delivered: Delivered
    ts: str = ""
    num_pending: int = 0
    num_ack_pending: int = 0

    @property
    def has_messages(self) -> bool:
        """True if messages wait or are leased."""
        return self.num_pending > 0 or self.num_ack_pending > 0


class StreamState(msgspec.Struct, frozen=True):
    messages: int = 0
    last_seq: int = 0
    subjects: dict[str, int] | None = None


class StreamInfo(msgspec.Struct, frozen=True):
    """State of a stream.

    ``total`` counts all requested subjects, of which an answer has a part. ``ts`` is the time of
    the stream's leader.
    """

    config: Json
    state: StreamState
    total: int = 0
    ts: str = ""


class _ConsumerNames(msgspec.Struct, frozen=True):
    consumers: list[str] | None = None
    total: int = 0


class RawMessage(msgspec.Struct, frozen=True):
    """Stored message as the server keeps it."""

    subject: str
    seq: int
    data: str = ""
    hdrs: str = ""
    time: str = ""

    @property
    def payload(self) -> bytes:
        return base64.b64decode(self.data)

    def header(self, name: str) -> str | None:
        for line in base64.b64decode(self.hdrs).decode("utf-8", "replace").splitlines():
            key, colon, value = line.partition(":")
            if colon and key == name:
                return value.strip()
        return None


class _Error(msgspec.Struct, frozen=True):
    code: int
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct, frozen=True):
    error: _Error | None = None


class _MessageReply(msgspec.Struct, frozen=True):
    message: RawMessage


async def call(
    connection: Connection, request: str, body: object = None, timeout_s: float | None = None
) -> bytes:
    """Return the answer of ``$JS.API.<request>``. Raises JetStreamError or BusUnavailableError."""
    payload = b"" if body is None else msgspec.json.encode(body)
    answer, _ = await connection.request_until(f"{API}.{request}", payload, timeout_s=timeout_s)
    _raise_error(answer)
    return answer.data


async def store(
    connection: Connection, subject: str, payload: bytes, headers: Mapping[str, str]
) -> StoredAt:
    """Store a message. Once this returns it is on disk.

    Attempts with a lost acknowledgement are repeated with the same headers. These must identify the
    message, by ``Nats-Msg-Id`` or the expected last sequence. ``duplicate`` is False then, as the
    first attempt may have stored it. Raises PayloadTooLargeError, StoreFullError, JetStreamError,
    or BusUnavailableError.
    """
    answer, num_attempts = await connection.request_until(subject, payload, headers)
    try:
        stored = stored_at(answer)
    except JetStreamError as error:
        if error.number == WRONG_LAST_SEQUENCE and num_attempts > 1:
            return StoredAt(seq=0)
        raise
    return StoredAt(seq=stored.seq) if num_attempts > 1 else stored


async def store_after(
    connection: Connection,
    stream: str,
    subject: str,
    payload: bytes,
    after: int,
    headers: Mapping[str, str],
) -> int | None:
    """Store a message if the last one of its subject has the sequence ``after`` (0: none).

    Returns its sequence, or None if another message is the last one. Raises the errors of
    ``store``.
    """
    guard = {"Nats-Expected-Last-Subject-Sequence": str(after)}
    try:
        stored = await store(connection, subject, payload, {**headers, **guard})
    except JetStreamError as error:
        if error.number != WRONG_LAST_SEQUENCE:
            raise
        return None
    if stored.seq:
        return stored.seq
    # An attempt with a lost acknowledgement was stored, or another process was faster.
    found = await newest(connection, stream, subject)
    if found is not None and found.seq > after and found.payload == payload:
        return found.seq
    return None


def stored_at(answer: Msg) -> StoredAt:
    """Read the server's answer to a store request.

    Raises StoreFullError, JetStreamError, or BusUnavailableError for an unreadable answer.
    """
    with _room_needed():
        _raise_error(answer)
    return msgspec.json.decode(answer.data, type=StoredAt)


@contextmanager
def _room_needed() -> Iterator[None]:
    """Convert the server's errors for lack of room to StoreFullError."""
    try:
        yield
    except JetStreamError as error:
        if error.number in _NO_ROOM:
            raise StoreFullError(NATS, "has no room") from error
        raise


def _raise_error(answer: Msg) -> None:
    try:
        reply = msgspec.json.decode(answer.data, type=_Reply)
    except msgspec.DecodeError as error:
        raise BusUnavailableError("The message bus answered with something unreadable.") from error
    if reply.error is not None:
        number = reply.error.err_code or reply.error.code
        raise JetStreamError(number, reply.error.description)


async def _unless(asking: Awaitable[T], *numbers: int) -> T | None:
    """Return the answer; None for an error with one of these numbers."""
    try:
        return await asking
    except JetStreamError as error:
        if error.number not in numbers:
            raise
        return None


async def consumer_info(connection: Connection, stream: str, consumer: str) -> ConsumerInfo:
    data = await call(connection, f"CONSUMER.INFO.{stream}.{consumer}")
    return msgspec.json.decode(data, type=ConsumerInfo)


async def find_consumer(connection: Connection, stream: str, consumer: str) -> ConsumerInfo | None:
    return await _unless(consumer_info(connection, stream, consumer), CONSUMER_NOT_FOUND)


async def pause(connection: Connection, stream: str, consumer: str, until: datetime) -> None:
    """Pause deliveries until a time by the server's clock. A past time ends a pause."""
    body = {"pause_until": until.isoformat()}
    await call(connection, f"CONSUMER.PAUSE.{stream}.{consumer}", body)


async def stream_info(
    connection: Connection, stream: str, body: object = None, timeout_s: float | None = None
) -> StreamInfo:
    data = await call(connection, f"STREAM.INFO.{stream}", body, timeout_s)
    return msgspec.json.decode(data, type=StreamInfo)


async def newest(connection: Connection, stream: str, subject_filter: str) -> RawMessage | None:
    """Return the newest message of some subjects, as the stream's leader knows it."""
    return await _message(connection, stream, {"last_by_subj": subject_filter})


async def newest_of_each(
    connection: Connection, stream: str, subject_filters: Sequence[str]
) -> list[Msg]:
    """Return the newest message of each matching subject, as any replica knows it.

    Raises BusUnavailableError.
    """
    found: list[Msg] = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_answer(message: Msg | None) -> None:
        status = "lost" if message is None else status_of(message)
        if message is not None and status is None:
            found.append(message)
        elif status is not None and not ended.done():
            ended.set_result(status)

    body = msgspec.json.encode({"multi_last": list(subject_filters)})
    reply = await connection.ask(f"{API}.DIRECT.GET.{stream}", body, on_answer)
    try:
        async with asyncio.timeout(_ANSWERS_TIMEOUT_S):
            status = await ended
    except TimeoutError:
        status = "timeout"
    finally:
        connection.forget(reply)
    if status not in (_END_OF_BATCH, NOT_FOUND):
        raise BusUnavailableError(f"The message bus could not look {stream} up ({status}).")
    return found


async def get(connection: Connection, stream: str, sequence: int) -> RawMessage | None:
    """Return a message that is still stored, as the stream's leader knows it."""
    return await _message(connection, stream, {"seq": sequence})


async def _message(
    connection: Connection, stream: str, which: Mapping[str, str | int]
) -> RawMessage | None:
    asking = call(connection, f"STREAM.MSG.GET.{stream}", which)
    data = await _unless(asking, SEQUENCE_NOT_FOUND, MESSAGE_NOT_FOUND)
    return None if data is None else msgspec.json.decode(data, type=_MessageReply).message


async def exists(connection: Connection, stream: str, sequence: int) -> bool:
    """Return whether a message is still stored."""
    return await get(connection, stream, sequence) is not None


async def subjects_in(connection: Connection, stream: str, subject_filter: str) -> dict[str, int]:
    """Return the number of messages by subject."""
    found: dict[str, int] = {}
    offset = 0
    while True:
        body = {"subjects_filter": subject_filter, "offset": offset}
        info = await stream_info(connection, stream, body)
        page = info.state.subjects or {}
        found.update(page)
        offset += len(page)
        if not page or offset >= info.total:
            return found


async def create_consumer(
    connection: Connection, stream: str, name: str, config: Mapping[str, object]
) -> ConsumerInfo:
    """Create a durable consumer or update the existing one.

    Raises StoreFullError, JetStreamError or BusUnavailableError.
    """
    # The filter may also be in the subject, but a long one then exceeds the request's limit.
    body = {
        "stream_name": stream,
        "config": {"name": name, "durable_name": name, **config},
        "action": "",
    }
    with _room_needed():
        data = await call(connection, f"CONSUMER.CREATE.{stream}.{name}", body)
    return msgspec.json.decode(data, type=ConsumerInfo)


async def consumer_names(connection: Connection, stream: str) -> list[str]:
    names: list[str] = []
    while True:
        data = await call(connection, f"CONSUMER.NAMES.{stream}", {"offset": len(names)})
        page = msgspec.json.decode(data, type=_ConsumerNames)
        names += page.consumers or ()
        if not page.consumers or len(names) >= page.total:
            return names


async def delete_consumer(
    connection: Connection, stream: str, name: str, timeout_s: float | None = None
) -> None:
    """Delete a consumer, which may be gone already."""
    request = f"CONSUMER.DELETE.{stream}.{name}"
    await _unless(call(connection, request, timeout_s=timeout_s), CONSUMER_NOT_FOUND)


async def delete(connection: Connection, stream: str, sequence: int) -> bool:
    """Delete a message; return False if it was gone already.

    An attempt with a lost answer counts as ours, so the message is answered in any case.
    """
    # By default the server overwrites the message on disk, which blocks its stream meanwhile.
    body = msgspec.json.encode({"seq": sequence, "no_erase": True})
    answer, num_attempts = await connection.request_until(f"{API}.STREAM.MSG.DELETE.{stream}", body)
    try:
        _raise_error(answer)
    except JetStreamError as error:
        gone = error.number in (SEQUENCE_NOT_FOUND, MESSAGE_NOT_FOUND)
        # A lost race against another deletion or an ack is reported as a failure to delete.
        if not gone and await exists(connection, stream, sequence):
            raise
        return num_attempts > 1
    return True


def epoch_ns(timestamp: str) -> int:
    """Return the UTC epoch in ns of an RFC 3339 time, truncated to microseconds."""
    whole = datetime.fromisoformat(timestamp)
    return round(whole.timestamp() * 1_000_000) * 1_000


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1_000_000_000)


def cause_in_a_file(error: JetStreamError) -> str:
    """Return the error that the server got when writing its files; empty for other errors."""
    found = _OF_A_FILE.fullmatch(error.description)
    return "" if found is None else found[1]


def is_of_a_file(error: JetStreamError) -> bool:
    """Return whether the server could not write its files."""
    return error.number == _NO_STORE or bool(cause_in_a_file(error))
