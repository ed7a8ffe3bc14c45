"""AsyncAPI 3 document of the public bus contract, made from the schemas.

``python -m millrace.bus.asyncapi > docs/asyncapi.json`` writes the checked-in copy.
"""

from __future__ import annotations

import sys

from millrace.bus import codec, subjects
from millrace.bus.contract.document import Channel, document
from millrace.bus.subjects import ENVELOPE
from millrace.schemas.control import (
    Cancel,
    Ended,
    HandedOver,
    MoveStreams,
    Prefilled,
    PrefixReport,
    Pulled,
    QueueStatus,
    ResultError,
    ResumePoint,
    TelemetryAnswer,
    TelemetryQuery,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.frames import Frame, FrameBatch
from millrace.schemas.jobs import MAX_NAME_CHARACTERS, DeadJob, Job, JobResult
from millrace.schemas.json_schema import document_text
from millrace.schemas.published_jobs import ChatJob, CompletionJob
from millrace.schemas.records import (
    DeliveryRecord,
    RefusalRecord,
    RequestRecord,
    TranscriptRecord,
    WorkerLossRecord,
    WorkerSample,
)

_BOTH = f"{codec.MSGPACK} (no header needed) or {codec.JSON} by the {codec.CONTENT_TYPE} header"
_EITHER = (codec.JSON, codec.MSGPACK)


def _records(key: str, subject: str, title: str, kind: type) -> Channel:
    description = f"The same record is on the NATS subject {subject} first."
    topic = subjects.topic(subject)
    return Channel(key, topic, title, "send", (kind,), description, protocol="kafka")


_CHANNELS = (
    Channel(
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
        "the request id, so a retried publish is accepted once, and wait for the "
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
        content_types=_EITHER,
    ),
    Channel(
        "jobsWithoutTenant",
        "jobs.{model}.{tier}",
        "Generation jobs without a tenant",
        "receive",
        (ChatJob, CompletionJob, Job),
        "The same without a tenant: the job is the keyless tenant's, local.",
        content_types=_EITHER,
    ),
    Channel(
        "jobsOfGateways",
        "jobs.{model}.{tier}.{tenant}.reserved",
        "Generation jobs that gateways let in",
        "receive",
        (Job,),
        "The gateway that accepted the request has reserved its usage, and settles the "
        "reservation. For gateways only: a client that may publish here has no limits.",
    ),
    Channel(
        "frames",
        "tok.{reply}.{request}",
        "Frames of one request",
        "send",
        (Frame,),
        "The answer, at most once and in order. Every request ends in exactly one of done, "
        "cancelled, expired, shed and failed. Drop frames of an epoch below the highest seen and "
        "token indices that are there already. In JSON for a job that came in JSON or that set "
        "frames_as_json.",
        content_types=_EITHER,
    ),
    Channel(
        "envelopes",
        f"tok.{{reply}}.{ENVELOPE}",
        "Frames of many requests",
        "send",
        (FrameBatch,),
        "For listeners whose jobs set batch_frames: the frames of one engine step in one message.",
        content_types=_EITHER,
    ),
    Channel(
        "cancels",
        "ctl.cancel.{tenant}.{request}",
        "Cancel a request of a tenant",
        "receive",
        (),
        "From a service of the tenant that owns the request. An empty message will do, as the "
        "payload is not read, and nothing answers it. The request ends with cancelled, whether it "
        "waits, runs or is yet to come. A cancel of another tenant's request, of an ended "
        "request, or of an unknown id changes nothing.",
    ),
    Channel(
        "cancelsOfParts",
        "ctl.cancel.{request}",
        "Cancel any request",
        "receive",
        (Cancel,),
        f"For Millrace's own parts and operators. Encoded as {_BOTH}; an empty message will do.",
        content_types=_EITHER,
    ),
    Channel(
        "results",
        "results.{tenant}.{request}",
        "Final results",
        "send",
        (JobResult,),
        f"JetStream stream {subjects.RESULTS_STREAM}, kept for a day: the last message of the "
        "subject is the result of a job that set store_result.",
        content_types=(codec.JSON,),
    ),
    Channel(
        "resultRequests",
        "ctl.result.{tenant}.{request}",
        "Ask for a stored result",
        "receive",
        (),
        "An empty request from a service of the tenant, answered by a scheduler: with the result, "
        "or with an error whose code is result_not_ready (retryable: the request waits or runs), "
        "result_not_stored (it ended without a result), result_not_found (no such request is "
        "known; retryable while jobs of the tenant wait in the queue, as it may be one of them) or "
        "bus_unavailable (retryable). In JSON, or in MessagePack to a request whose Content-Type "
        "says so.",
        answers=(JobResult, ResultError),
        content_types=_EITHER,
    ),
    Channel(
        "dead",
        "dead.jobs.{reason}",
        "Dead letters",
        "send",
        (DeadJob,),
        f"JetStream stream {subjects.DEAD_STREAM}: dead letters with the reason. A job in "
        "JSON has a dead letter in JSON, with its Content-Type.",
        content_types=_EITHER,
    ),
    Channel(
        "resumes",
        "resume.{reply}.{request}",
        "Ask which tokens the client has",
        "send",
        (),
        "An empty request to the reader of the stream. If the reader does not answer, the job "
        "starts again from its seed. Gateways, never services, also get requests with a "
        "MessagePack map request_ids, and answer with a map of the requests that they hold.",
        answers=(ResumePoint,),
        content_types=_EITHER,
    ),
    Channel(
        "handovers",
        "handover.{gateway}.{request}",
        "Hand over a stream",
        "send",
        (),
        "An empty request from a gateway whose client has reconnected to it, to the gateway that "
        "holds the stream. Others do not answer. A request with the payload ``?`` asks only "
        "if the gateway is alive, which answers and keeps the stream.",
        answers=(HandedOver,),
    ),
    Channel(
        "commands",
        "ctl.worker.{worker}",
        "Commands to a worker",
        "receive",
        (WorkerCommand,),
        "Dispatch, cancel, replay, drain, pull ahead and change of role.",
        answers=(WorkerReply,),
        content_types=_EITHER,
    ),
    Channel(
        "ends",
        "ctl.ended.{worker}",
        "Requests that a worker no longer holds",
        "send",
        (Ended,),
        "From a worker to the schedulers; may be lost.",
    ),
    Channel(
        "prefilled",
        "ctl.prefilled.{worker}",
        "Requests that may continue at another worker",
        "send",
        (Prefilled,),
        "From a worker of the role prefill to the schedulers; may be lost.",
    ),
    Channel(
        "pulled",
        "ctl.pulled.{worker}",
        "Requests that no longer need a worker's KV cache",
        "send",
        (Pulled,),
        "From the worker that continues them to the previous worker; may be lost.",
    ),
    Channel(
        "moves",
        "ctl.move.{worker}",
        "Move a worker's streams to other workers",
        "receive",
        (MoveStreams,),
        "From an operator to the schedulers.",
    ),
    Channel(
        "queueStatus",
        "ctl.queue.{model}",
        "Status of a model's queue",
        "send",
        (QueueStatus,),
        "A few times a second.",
    ),
    Channel(
        "telemetry",
        subjects.TELEMETRY,
        "Saved queries",
        "receive",
        (TelemetryQuery,),
        "Answered by one of the telemetry processes.",
        answers=(TelemetryAnswer,),
        content_types=_EITHER,
    ),
    Channel(
        "heartbeats",
        "hb.{worker}",
        "Capacity and load of a worker",
        "send",
        (WorkerStatus,),
        f"Twice a second; the last one is also in the key-value bucket {subjects.WORKERS_BUCKET}.",
    ),
    Channel(
        "prefixReports",
        "prefix.{worker}",
        "Contents of a worker's prefix cache",
        "send",
        (PrefixReport,),
        "From a worker to the schedulers; may be lost.",
    ),
    _records("requestRecords", subjects.REQUEST_RECORD, "One record a request", RequestRecord),
    _records("deliveryRecords", subjects.DELIVERY_RECORD, "Deliveries to clients", DeliveryRecord),
    _records("workerSamples", subjects.WORKER_RECORD, "Worker load", WorkerSample),
    _records(
        "transcripts",
        subjects.TRANSCRIPT_RECORD,
        "Prompts and answers of tenants with transcripts enabled",
        TranscriptRecord,
    ),
    _records(
        "refusal-records",
        subjects.REFUSAL_RECORD,
        "Requests refused before they became jobs",
        RefusalRecord,
    ),
    _records(
        "worker-loss-records",
        subjects.WORKER_LOSS_RECORD,
        "Lost workers and the cause",
        WorkerLossRecord,
    ),
)


def text() -> str:
    """Return the document as it is checked in."""
    return document_text(document(_CHANNELS))


if __name__ == "__main__":
    sys.stdout.write(text())
