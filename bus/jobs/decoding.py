"""Decoding of stored messages to jobs, with the checks that hold for every publisher."""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from millrace.bus import codec, subjects
from millrace.bus.jobs.published import read_published
from millrace.bus.subjects import token, untoken
from millrace.runtime.json.faults import check_outline
from millrace.runtime.json.tolerant import without_mark
from millrace.runtime.tracing import parse_traceparent
from millrace.schemas.errors import (
    ForeignReplyError,
    ForeignTenantError,
    MalformedMessageError,
    ParameterError,
    shown,
)
from millrace.schemas.jobs import (
    GATEWAY_SOURCES,
    MAX_LABEL_CHARACTERS,
    MAX_NAME_CHARACTERS,
    Job,
    Source,
    check_length,
)
from millrace.schemas.tenants import LOCAL_TENANT, may_reply_to

logger = logging.getLogger(__name__)

_ABSENT = msgspec.Raw(b"")
MALFORMED = "malformed"
TOO_MANY_DELIVERIES = "too_many_deliveries"
NOT_A_TENANT_QUEUE = "the subject is neither jobs.<model>.<tier> nor jobs.<model>.<tier>.<tenant>"
FOREIGN_TENANT = (
    "The job names another tenant than its subject does. Publish it under "
    "jobs.<model>.<tier>.<tenant>."
)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Publisher of a message that is not a job, as far as it can be read.

    Without a ``request_id`` it is answered under the empty id.
    """

    request_id: str = ""
    reply: str = ""
    tenant: str = LOCAL_TENANT
    model: str = ""
    store_result: bool = False
    frames_as_json: bool = False

    @property
    def has_valid_id(self) -> bool:
        """True if a job may have its request id."""
        return 0 < len(self.request_id) <= MAX_NAME_CHARACTERS


class _Stated(msgspec.Struct, frozen=True):
    """Tier and tenant as written. The subject supplies absent ones."""

    tier: str | None = None
    tenant: str | None = None


# Raw fields of an owner.
_OwnerFields = msgspec.defstruct(
    "_OwnerFields",
    [(name, msgspec.Raw, _ABSENT) for name in Owner.__struct_fields__],
    frozen=True,
)

_OWNER_FIELDS: codec.Codec[msgspec.Struct] = codec.Codec(_OwnerFields)
_LABEL: codec.Codec[str] = codec.Codec(str)
_FLAG: codec.Codec[bool] = codec.Codec(bool)
_ID: codec.Codec[str | int | float] = codec.Codec(str | int | float)  # type: ignore[arg-type]
# Length of the longest name: four bytes a character, each percent-encoded.
_MAX_TOKEN_CHARACTERS = 12 * MAX_NAME_CHARACTERS
_MAX_CHARACTERS = {
    "reply": MAX_NAME_CHARACTERS,
    "tenant": MAX_NAME_CHARACTERS,
    "model": MAX_LABEL_CHARACTERS,
}
_FLAGS = ("store_result", "frames_as_json")
# Pair of a JSON object that is broken elsewhere. Within a string its quotes would be escaped.
_PAIR = re.compile(rb'"(request_id|reply)"\s*:\s*("(?:[^"\\]|\\.)*")')
_STATED: codec.Codec[_Stated] = codec.Codec(_Stated)


def read_job(
    subject: str,
    payload: bytes,
    content_type: str | None,
    stored_ns: int,
    traceparent: str | None = None,
) -> Job:
    """Read the job in a message of the stream JOBS, from a gateway or a service.

    For services see ``published.read_published``. The model in the body must be the subject's, and
    so must tier and tenant if both state them. Under a subject without a tenant a job is the
    keyless tenant's. ``received_ns`` defaults to the time of storing. A JSON job's listener gets
    JSON. A service's job has the source NATS, even if it states another. A job without a trace
    takes the message's header ``traceparent`` if it is valid. A message without a Content-Type is
    MessagePack, unless it begins like a JSON object.

    Raises:
        MalformedMessageError: The message is not a job.
        ForeignTenantError: The job names another tenant.
        ForeignReplyError: A service's job names another tenant's listener.
    """
    payload = without_mark(payload)
    content_type = codec.stated_or_seen(payload, content_type)
    try:
        check_outline(payload, is_json=codec.is_json(content_type))
    except ParameterError as error:
        raise MalformedMessageError(error.message, error.param) from error
    if subjects.is_reserved(subject):
        job = codec.JOB.decode(payload, content_type)
    else:
        job = _published(payload, content_type)
    try:
        tenant_queue = subjects.tenant_queue_of(subject)
    except ValueError as error:
        raise MalformedMessageError(NOT_A_TENANT_QUEUE) from error
    if job.model != tenant_queue.model:
        raise MalformedMessageError(
            f"model is {shown(job.model)!r}, but the subject names {tenant_queue.model!r}", "model"
        )
    changes: dict[str, object] = {}
    tenant = LOCAL_TENANT if tenant_queue.tenant is None else tenant_queue.tenant
    if job.tier != tenant_queue.tier or job.tenant != tenant:
        stated = _STATED.decode(payload, content_type)
        if stated.tier is not None and job.tier != tenant_queue.tier:
            raise MalformedMessageError(
                f"tier is {job.tier.value!r}, but the subject names {tenant_queue.tier.value!r}",
                "tier",
            )
        if stated.tenant is not None and job.tenant != tenant:
            raise ForeignTenantError(FOREIGN_TENANT, "tenant")
        changes["tier"] = tenant_queue.tier
        changes["tenant"] = tenant
    if not tenant_queue.reserved and job.source in GATEWAY_SOURCES:
        changes["source"] = Source.NATS
    if job.received_ns == 0:
        changes["received_ns"] = stored_ns
    if codec.is_json(content_type):
        changes["frames_as_json"] = True
    if traceparent and not job.traceparent:
        context = parse_traceparent(traceparent)
        if context is not None:
            # Rewritten here: a header of another version may be of any length.
            changes["traceparent"] = context.traceparent
    try:
        job = msgspec.structs.replace(job, **changes) if changes else job
    except ValueError as error:
        raise MalformedMessageError(str(error)) from error
    if not tenant_queue.reserved and not may_reply_to(job.tenant, job.reply):
        raise ForeignReplyError(job.tenant)
    return job


def _published(payload: bytes, content_type: str | None) -> Job:
    try:
        return read_published(payload, content_type)
    except MalformedMessageError:
        raise
    except Exception as error:
        # A bug here refuses one message. Otherwise it would end each scheduler that pulls it.
        logger.exception("a message could not be read")
        raise MalformedMessageError(f"it cannot be read: {type(error).__name__}") from error


def read_owner(subject: str, payload: bytes, content_type: str | None) -> Owner:
    """Read as much as possible of a malformed job's publisher.

    The subject's tenant overrides the body, so a client that may publish only under its own tenant
    cannot cause answers to others. If ``reply`` is another tenant's or unreadable, the tenant's own
    listener is used. An empty ``reply`` names no listener. A request id may be invalid for a job (a
    number, or too long). The answer still goes to this id, which the publisher listens for, if a
    subject can hold it.
    """
    payload = without_mark(payload)
    is_json = codec.is_json(codec.stated_or_seen(payload, content_type))
    if not is_json and content_type is not None and content_type != codec.MSGPACK:
        # A refused type does not tell the encoding.
        is_json = codec.is_json(codec.stated_or_seen(payload, None))
    fields = _owner_fields(payload, codec.JSON if is_json else codec.MSGPACK)
    if is_json:
        fields["frames_as_json"] = True
    fields["tenant"] = tenant = _tenant_of(subject)
    if not subjects.is_reserved(subject):
        reply = fields.get("reply")
        if reply is None or not may_reply_to(tenant, reply):
            fields["reply"] = tenant
    owner: Owner = msgspec.convert(fields, Owner)
    return owner


def _owner_fields(payload: bytes, content_type: str) -> dict[str, Any]:
    """Return the readable fields within their length limits, each read by itself."""
    try:
        read = _OWNER_FIELDS.decode(payload, content_type)
        raw = {name: bytes(getattr(read, name)) for name in read.__struct_fields__}
    except MalformedMessageError:
        pairs = _PAIR.findall(payload) if content_type == codec.JSON else []
        # The enclosing object is unknown, so the first pair of each name counts.
        raw = {name.decode(): value for name, value in reversed(pairs)}
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        if not value:
            continue
        try:
            if name == "request_id":
                fields[name] = _listened_id(value, content_type)
            elif name in _FLAGS:
                fields[name] = _FLAG.decode(value, content_type)
            else:
                text = _LABEL.decode(value, content_type)
                check_length(name, text, _MAX_CHARACTERS[name])
                fields[name] = text
        except (MalformedMessageError, ValueError):
            continue
    return fields


def _listened_id(raw: bytes, content_type: str) -> str:
    """Return the request id as it is in the subject of the publisher's listener.

    Raises ValueError for an id that is too long for a subject, or a value of another type.
    """
    value = _ID.decode(raw, content_type)
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value
    text = str(value)
    if len(token(text)) > _MAX_TOKEN_CHARACTERS:
        raise ValueError("request_id is too long")
    return text


def _tenant_of(subject: str) -> str:
    """Return the tenant in a subject; the keyless tenant if there is none or it is unreadable."""
    parts = subject.split(".")
    try:
        tenant = untoken(parts[3]) if len(parts) in (4, 5) else LOCAL_TENANT
    except ValueError:
        return LOCAL_TENANT
    return tenant if len(tenant) <= MAX_NAME_CHARACTERS else LOCAL_TENANT


def owner_of(job: Job) -> Owner:
    return Owner(**{name: getattr(job, name) for name in Owner.__struct_fields__})
