"""MessagePack inside, JSON for those who say so by their Content-Type header."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from millrace.runtime.json.faults import json_fault
from millrace.schemas.control import (
    Cancel,
    Ended,
    HandedOver,
    Held,
    MoveStreams,
    NameLease,
    Prefilled,
    PrefixReport,
    Pulled,
    QueueStatus,
    ResumePoint,
    TelemetryAnswer,
    TelemetryQuery,
    WhichHeld,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.frames import Frame, FrameBatch
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.records import Record

CONTENT_TYPE = "Content-Type"
JSON = "application/json"
MSGPACK = "application/msgpack"
JSON_HEADERS: Mapping[str, str] = {CONTENT_TYPE: JSON}
MSGPACK_HEADERS: Mapping[str, str] = {CONTENT_TYPE: MSGPACK}

# The decoder's sentence has the path of a field, and the name of a missing or unknown field.
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])*`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]+)`")
# Where a JSON object begins at the latest, if blanks stand before it.
_LEADING_BYTES = 256

_MSGPACK_ENCODER = msgspec.msgpack.Encoder()
_JSON_ENCODER = msgspec.json.Encoder()

T = TypeVar("T")


def encode(message: object) -> bytes:
    """MessagePack, which is what a message without Content-Type is."""
    return _MSGPACK_ENCODER.encode(message)


def encode_json(message: object) -> bytes:
    return _JSON_ENCODER.encode(message)


def encoded(message: object, *, as_json: bool) -> tuple[bytes, Mapping[str, str] | None]:
    """Return a message as the payload and the headers to publish."""
    return (encode_json(message), JSON_HEADERS) if as_json else (encode(message), None)


def is_json(content_type: str | None) -> bool:
    """Whether a Content-Type header announces JSON; parameters after ``;`` do not matter."""
    return content_type is not None and _media_type(content_type) == JSON


def is_msgpack(content_type: str | None) -> bool:
    """The same of MessagePack. A message without the header is not meant here."""
    return content_type is not None and _media_type(content_type) == MSGPACK


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def stated_or_seen(payload: bytes, content_type: str | None) -> str | None:
    """The Content-Type of a message that people write by hand, too: without a header, JSON if it
    begins as an object does, which no object in MessagePack does."""
    if content_type is None and payload[:_LEADING_BYTES].lstrip(b" \t\r\n")[:1] == b"{":
        return JSON
    return content_type


def _field_of(why: str) -> str:
    """The path of the field that the decoder's sentence names; empty if it names none."""
    place, field = _PLACE.search(why), _FIELD.search(why)
    names = (place[1] if place else "", field[1] if field else "")
    return ".".join(filter(None, names))


class Codec(Generic[T]):
    """Decodes one kind of message."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self._msgpack = msgspec.msgpack.Decoder(kind)
        self._json = msgspec.json.Decoder(kind)

    def decode(self, payload: bytes, content_type: str | None = None) -> T:
        """Raises MalformedMessageError, whose message names the field but quotes no text."""
        try:
            if content_type is None or content_type == MSGPACK:
                return self._msgpack.decode(payload)
            if is_json(content_type):
                return self._json.decode(payload)
            if is_msgpack(content_type):
                return self._msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = json_fault(payload, error) if is_json(content_type) else str(error)
            raise MalformedMessageError(why, _field_of(why)) from error
        except RecursionError as error:
            raise MalformedMessageError("it is nested too deeply") from error
        raise MalformedMessageError(
            f"the Content-Type must be {JSON} or {MSGPACK}, or absent for MessagePack"
        )


JOB: Codec[Job] = Codec(Job)
JOB_RESULT: Codec[JobResult] = Codec(JobResult)
FRAME: Codec[Frame] = Codec(Frame)  # type: ignore[arg-type]  # a union is a type to msgspec
FRAME_BATCH: Codec[FrameBatch] = Codec(FrameBatch)
WORKER_COMMAND: Codec[WorkerCommand] = Codec(WorkerCommand)  # type: ignore[arg-type]
WORKER_REPLY: Codec[WorkerReply] = Codec(WorkerReply)
WORKER_STATUS: Codec[WorkerStatus] = Codec(WorkerStatus)
NAME_LEASE: Codec[NameLease] = Codec(NameLease)
PREFIX_REPORT: Codec[PrefixReport] = Codec(PrefixReport)
CANCEL: Codec[Cancel] = Codec(Cancel)
ENDED: Codec[Ended] = Codec(Ended)
PREFILLED: Codec[Prefilled] = Codec(Prefilled)
PULLED: Codec[Pulled] = Codec(Pulled)
MOVE_STREAMS: Codec[MoveStreams] = Codec(MoveStreams)
RESUME_POINT: Codec[ResumePoint] = Codec(ResumePoint)
WHICH_HELD: Codec[WhichHeld] = Codec(WhichHeld)
HELD: Codec[Held] = Codec(Held)
HANDED_OVER: Codec[HandedOver] = Codec(HandedOver)
QUEUE_STATUS: Codec[QueueStatus] = Codec(QueueStatus)
TELEMETRY_QUERY: Codec[TelemetryQuery] = Codec(TelemetryQuery)
TELEMETRY_ANSWER: Codec[TelemetryAnswer] = Codec(TelemetryAnswer)
RECORD: Codec[Record] = Codec(Record)  # type: ignore[arg-type]
