"""The public contract of the bus as an AsyncAPI 3 document, made from the schemas.

``python -m millrace.bus.asyncapi > docs/asyncapi.json`` writes the checked-in copy.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from millrace.bus import codec, subjects
from millrace.bus.tokens import ENVELOPE
from millrace.schemas.control import (
    Cancel,
    Ended,
    HandedOver,
    MoveStreams,
    Prefilled,
    PrefixReport,
    Pulled,
    QueueStatus,
    ResumePoint,
    TelemetryAnswer,
    TelemetryQuery,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.frames import Frame, FrameBatch
from millrace.schemas.jobs import MAX_NAME_CHARACTERS, DeadJob, Job, JobResult, Tier
from millrace.schemas.json_schema import Schema, document_text, without_discriminators
from millrace.schemas.published_jobs import ChatJob, CompletionJob
from millrace.schemas.records import (
    DeliveryRecord,
    RefusalRecord,
    RequestRecord,
    TranscriptRecord,
    WorkerSample,
)

_REF = "#/components/schemas/{name}"
_BOTH = f"{codec.MSGPACK} (no header needed) or {codec.JSON} by the {codec.CONTENT_TYPE} header"

Action = Literal["send", "receive"]


@dataclass(frozen=True)
class _Channel:
    """One kind of subject or topic. ``action`` is what Millrace does with it; ``kinds`` are what it
    carries; ``answer`` comes back on the message's reply subject."""

    key: str
    address: str
    title: str
    action: Action
    kinds: tuple[Any, ...]
    description: str
    answer: Any = None
    protocol: Literal["nats", "kafka"] = "nats"
    content_type: str = codec.MSGPACK


def _records(key: str, subject: str, title: str, kind: type) -> _Channel:
    description = f"The same record is on the NATS subject {subject} first."
    topic = subjects.topic(subject)
    return _Channel(key, topic, title, "send", (kind,), description, protocol="kafka")


_PARAMETERS = {
    "model": "A model of the catalogue, percent-encoded as one subject token.",
    "tier": "The service tier.",
    "reason": "Why the job was given up on.",
    "reply": "Whoever listens: a gateway's id or a name that the publishing service chose; "
    "percent-encoded as one subject token.",
    "gateway": "The gateway's id, percent-encoded as one subject token.",
    "request": "The request id, percent-encoded as one subject token.",
    "tenant": "The tenant, percent-encoded as one subject token.",
    "worker": "The worker's id, percent-encoded as one subject token.",
}

_CHANNELS = (
    _Channel(
        "jobs",
        "jobs.{model}.{tier}.{tenant}",
        "Generation jobs",
        "receive",
        (ChatJob, CompletionJob, Job),
        f"JetStream work queue {subjects.JOBS_STREAM}. A job is the body of a chat completion or "
        "of a completion with the fields of a job beside its own (ChatJob, CompletionJob), or it "
        "has the nested form (Job). Null is a field that is not set, and a float with nothing "
        f"behind its point is an integer. request_id is a string of 1 to {MAX_NAME_CHARACTERS} "
        "characters; a message with another one is refused under its own id, as far as a subject "
        "can hold it, else under %. deadline is a time in ISO 8601 with an offset from UTC, "
        "deadline_ns the same in "
        "nanoseconds since 1970. Publish with the header Nats-Msg-Id set to "
        "the request id, so that a retried publish is accepted once, and wait for the "
        "acknowledgement: from then on the job is answered. reply must be the tenant's name, alone "
        "or with a slash and a name behind it; a job with another one is refused "
        "(reply_forbidden) on tok.<tenant>.<request>. The same job published again under its id "
        "gets the answer of the first on its own reply, another job gets duplicate. Model, tier "
        "and tenant in the body must be those of the subject; an absent tier or tenant is the "
        "subject's, and a body that "
        "names another tenant is refused (tenant_mismatch). Jobs of a subject wait in a line of "
        "their own, and tenants are served in turn; a server that lets a client publish under its "
        "tenant alone knows whose a job is. What a job may use counts against its tenant's limits; "
        "one over a limit ends as shed, which says when to come back, or as failed. Encoded as "
        f"{_BOTH}; a job in JSON gets its frames in JSON.",
    ),
    _Channel(
        "jobs-of-anybody",
        "jobs.{model}.{tier}",
        "Generation jobs without a tenant",
        "receive",
        (ChatJob, CompletionJob, Job),
        "The same without a tenant: the job is the keyless tenant's, local.",
    ),
    _Channel(
        "jobs-of-gateways",
        "jobs.{model}.{tier}.{tenant}.reserved",
        "Generation jobs that gateways let in",
        "receive",
        (Job,),
        "What these may use was set aside by the gateway that took the request in, which settles "
        "it too. For gateways only: whoever may publish here is under no limit.",
    ),
    _Channel(
        "frames",
        "tok.{reply}.{request}",
        "Frames of one request",
        "send",
        (Frame,),
        "What streams back, at most once and in order. Every request ends in exactly one of done, "
        "cancelled, expired, shed and failed. Drop frames of an epoch below the highest seen and "
        "token indices that are there already.",
    ),
    _Channel(
        "envelopes",
        f"tok.{{reply}}.{ENVELOPE}",
        "Frames of many requests",
        "send",
        (FrameBatch,),
        "For listeners whose jobs set batch_frames: what one engine step made, in one message.",
    ),
    _Channel(
        "cancels",
        "ctl.cancel.{request}",
        "Cancel a request",
        "receive",
        (Cancel,),
        f"From anyone who owns the request. Encoded as {_BOTH}; an empty message will do.",
    ),
    _Channel(
        "results",
        "results.{tenant}.{request}",
        "Final results",
        "send",
        (JobResult,),
        f"JetStream stream {subjects.RESULTS_STREAM}, kept for a day: the last message of the "
        "subject is the result of a job that set store_result.",
        content_type=codec.JSON,
    ),
    _Channel(
        "dead",
        "dead.jobs.{reason}",
        "Dead letters",
        "send",
        (DeadJob,),
        f"JetStream stream {subjects.DEAD_STREAM}: jobs given up on, with why. Those of jobs in "
        "JSON are JSON, with its Content-Type.",
    ),
    _Channel(
        "resumes",
        "resume.{reply}.{request}",
        "Which tokens has the client got?",
        "send",
        (),
        "An empty request to whoever reads the stream, who may stay silent: the job then starts "
        "again from its seed. Gateways, never services, are also asked with a list of ids, a "
        "MessagePack map with request_ids, and answer with a map of those that they hold.",
        answer=ResumePoint,
    ),
    _Channel(
        "handovers",
        "handover.{gateway}.{request}",
        "Let go of a stream",
        "send",
        (),
        "An empty request from a gateway whose client went on there to the one that holds the "
        "stream. Who does not hold it stays silent. A request whose payload is ``?`` asks only "
        "whether that gateway is there, which answers and lets go of nothing.",
        answer=HandedOver,
    ),
    _Channel(
        "commands",
        "ctl.worker.{worker}",
        "Commands to a worker",
        "receive",
        (WorkerCommand,),
        "Dispatch, cancel, replay, drain, pull ahead and change of role.",
        answer=WorkerReply,
    ),
    _Channel(
        "ends",
        "ctl.ended.{worker}",
        "Requests that a worker holds no more",
        "send",
        (Ended,),
        "From a worker to the schedulers; may be lost.",
    ),
    _Channel(
        "prefilled",
        "ctl.prefilled.{worker}",
        "Requests that may go on elsewhere",
        "send",
        (Prefilled,),
        "From a worker of the role prefill to the schedulers; may be lost.",
    ),
    _Channel(
        "pulled",
        "ctl.pulled.{worker}",
        "Requests that need nothing of a worker's KV cache any more",
        "send",
        (Pulled,),
        "From the worker that went on with them to the one that had them; may be lost.",
    ),
    _Channel(
        "moves",
        "ctl.move.{worker}",
        "Have others go on with what a worker runs",
        "receive",
        (MoveStreams,),
        "From an operator to the schedulers.",
    ),
    _Channel(
        "queue-status",
        "ctl.queue.{model}",
        "How a model's queue stands",
        "send",
        (QueueStatus,),
        "A few times a second.",
    ),
    _Channel(
        "telemetry",
        subjects.TELEMETRY,
        "Saved queries",
        "receive",
        (TelemetryQuery,),
        "Answered by one of the telemetry processes.",
        answer=TelemetryAnswer,
    ),
    _Channel(
        "heartbeats",
        "hb.{worker}",
        "Capacity and load of a worker",
        "send",
        (WorkerStatus,),
        f"Twice a second; the last one is also in the key-value bucket {subjects.WORKERS_BUCKET}.",
    ),
    _Channel(
        "prefix-reports",
        "prefix.{worker}",
        "What a worker's prefix cache holds",
        "send",
        (PrefixReport,),
        "From a worker to the schedulers; may be lost.",
    ),
    _records("request-records", subjects.REQUEST_RECORD, "One record a request", RequestRecord),
    _records("delivery-records", subjects.DELIVERY_RECORD, "What clients saw", DeliveryRecord),
    _records("worker-samples", subjects.WORKER_RECORD, "Worker load", WorkerSample),
    _records(
        "transcripts",
        subjects.TRANSCRIPT_RECORD,
        "Prompts and answers of tenants that have them kept",
        TranscriptRecord,
    ),
    _records(
        "refusal-records",
        subjects.REFUSAL_RECORD,
        "What was refused before it was a job",
        RefusalRecord,
    ),
)


def document() -> Schema:
    """The whole document, ready for JSON."""
    kinds = [kind for one in _CHANNELS for kind in (*one.kinds, one.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    payloads = {_name(kind): {"payload": it} for kind, it in zip(kinds, schemas, strict=True)}
    messages: dict[str, Schema] = {}
    channels: dict[str, Schema] = {}
    operations: dict[str, Schema] = {}

    def carry(names: list[str], content_type: str) -> dict[str, Schema]:
        for name in names:
            messages[name] = {"name": name, "contentType": content_type, **payloads.get(name, {})}
        return {name: _reference("components/messages", name) for name in names}

    for one in _CHANNELS:
        names = [_name(kind) for kind in one.kinds] or ["Empty"]
        channels[one.key] = {
            "address": one.address,
            "title": one.title,
            "description": one.description,
            "messages": carry(names, one.content_type),
            "servers": [_reference("servers", one.protocol)],
            **_parameters(one.address),
        }
        operation: Schema = {
            "action": one.action,
            "channel": _reference("channels", one.key),
            "title": one.title,
        }
        operations[f"{one.action}-{one.key}"] = operation
        if one.answer is not None:
            answers = f"{one.key}-answers"
            operation["reply"] = {"channel": _reference("channels", answers)}
            channels[answers] = {
                "address": None,
                "title": f"Answers: {one.title}",
                "messages": carry([_name(one.answer)], codec.MSGPACK),
                "servers": [_reference("servers", "nats")],
            }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Millrace",
            "version": "1.0.0",
            "description": "Generation jobs in, frames and records out. Made from schemas/ by "
            "python -m millrace.bus.asyncapi.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": codec.MSGPACK,
        "servers": {
            "nats": {"host": "127.0.0.1:4222", "protocol": "nats"},
            "kafka": {"host": "127.0.0.1:9092", "protocol": "kafka"},
        },
        "channels": channels,
        "operations": operations,
        "components": without_discriminators({"messages": messages, "schemas": components}),
    }


def _name(kind: Any) -> str:
    """A struct's own name; unions are named after what they are unions of."""
    if kind is Frame:
        return "Frame"
    if kind == WorkerCommand:
        return "WorkerCommand"
    name: str = kind.__name__
    return name


def _reference(section: str, name: str) -> Schema:
    return {"$ref": f"#/{section}/{name}"}


def _parameters(address: str) -> Schema:
    names = re.findall(r"\{(\w+)\}", address)
    if not names:
        return {}
    parameters: Schema = {name: {"description": _PARAMETERS[name]} for name in names}
    if "tier" in parameters:
        parameters["tier"]["enum"] = [tier.value for tier in Tier]
    return {"parameters": parameters}


def text() -> str:
    """The document as it is checked in."""
    return document_text(document())


if __name__ == "__main__":
    sys.stdout.write(text())
