"""Codec of messages: MessagePack by default, JSON if the Content-Type header says so."""

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

# msgspec's error messages contain the path of a field, or the name of a missing or unknown one.
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])*`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]+)`")
# Largest number of blanks in front of a JSON object.
_LEADING_BYTES = 256

_MSGPACK_ENCODER = msgspec.msgpack.Encoder()
_JSON_ENCODER = msgspec.json.Encoder()

T = TypeVar("T")


def encode(message: object) -> bytes:
    """Encode a message as MessagePack, the default without a Content-Type."""
    return _MSGPACK_ENCODER.encode(message)


def encode_json(message: object) -> bytes:
    return _JSON_ENCODER.encode(message)


def encoded(message: object, *, as_json: bool) -> tuple[bytes, Mapping[str, str] | None]:
    """Return a message as the payload and the headers to publish."""
    return (encode_json(message), JSON_HEADERS) if as_json else (encode(message), None)


def is_json(content_type: str | None) -> bool:
    """Return whether a Content-Type announces JSON. Parameters after ``;`` are ignored."""
    return content_type is not None and _media_type(content_type) == JSON


def is_msgpack(content_type: str | None) -> bool:
    """Return whether a Content-Type announces MessagePack. False without the header."""
    return content_type is not None and _media_type(content_type) == MSGPACK


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def stated_or_seen(payload: bytes, content_type: str | None) -> str | None:
    """Return the Content-Type of a message that may be written by hand.

    A message without the header is JSON if it begins like an object, which no MessagePack map does.
    """
    if content_type is None and payload[:_LEADING_BYTES].lstrip(b" \t\r\n")[:1] == b"{":
        return JSON
    return content_type


def _field_of(why: str) -> str:
    """Return the field path in a decoder's error message; empty if there is none."""
    place, field = _PLACE.search(why), _FIELD.search(why)
    names = (place[1] if place else "", field[1] if field else "")
    return ".".join(filter(None, names))


class Codec(Generic[T]):
    """Decoder of one kind of message."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self._msgpack = msgspec.msgpack.Decoder(kind)
        self._json = msgspec.json.Decoder(kind)

    def decode(self, payload: bytes, content_type: str | None = None) -> T:
        """Decode a message.

        Raises MalformedMessageError, which names the field but quotes no text.
        """
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
