"""Names on the bus: subjects, streams, consumers, buckets and topics.

Free strings (models, request ids, tenants, listeners) enter subjects through ``token`` only.
"""

from __future__ import annotations

import functools
import hashlib
import re

from millrace.bus.job_queue import TenantQueue
from millrace.schemas.jobs import Tier
from millrace.schemas.records import (
    DeliveryRecord,
    Record,
    RefusalRecord,
    RequestRecord,
    TranscriptRecord,
    WorkerLossRecord,
    WorkerSample,
)

# Last token of an envelope's subject. ``token`` never returns it.
ENVELOPE = "_"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_NOT_PLAIN = re.compile(rb"[^A-Za-z0-9_-]")
_ENCODED = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+")
_EMPTY = "%"


def token(text: str) -> str:
    """Encode ``text`` as one subject token: percent-encoded UTF-8, one to one.

    Letters, digits, ``-`` and ``_`` stay. The empty string is ``%``. ``_`` alone is encoded, as it
    is the envelope's own token.
    """
    if _PLAIN.fullmatch(text) and text != ENVELOPE:
        return text
    if not text:
        return _EMPTY
    if text == ENVELOPE:
        return "%5F"
    encoded = _NOT_PLAIN.sub(
        lambda match: b"%%%02X" % match[0][0], text.encode("utf-8", "surrogatepass")
    )
    return encoded.decode("ascii")


def untoken(encoded: str) -> str:
    """Decode a token. Raises ValueError for a string that ``token`` cannot return."""
    if encoded == _EMPTY:
        return ""
    if not _ENCODED.fullmatch(encoded):
        raise ValueError("not an encoded subject token")
    if "%" not in encoded and encoded != ENVELOPE:
        return encoded
    raw = re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), encoded)
    try:
        text = raw.encode("latin-1").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError("not an encoded subject token") from error
    if token(text) != encoded:
        raise ValueError("not an encoded subject token")
    return text


# --- streams, consumers, buckets -------------------------------------------------------------

JOBS_STREAM = "JOBS"
DEAD_STREAM = "DEAD"
RESULTS_STREAM = "RESULTS"
OUTBOX_STREAM = "OUTBOX"
FILES_STREAM = "FILES"
BATCHES_STREAM = "BATCHES"
WORKERS_BUCKET = "workers"
WORKERS_STREAM = f"KV_{WORKERS_BUCKET}"
STREAMS = (
    JOBS_STREAM,
    DEAD_STREAM,
    RESULTS_STREAM,
    OUTBOX_STREAM,
    FILES_STREAM,
    BATCHES_STREAM,
    WORKERS_STREAM,
)
BRIDGE_CONSUMER = "bridge"
TELEMETRY_GROUP = "telemetry"
SCHEDULER_GROUP = "schedulers"

_RESERVED = "reserved"
RESERVED_JOBS = f"jobs.*.*.*.{_RESERVED}"
SERVICE_JOBS = ("jobs.*.*", "jobs.*.*.*")
ALL_JOBS = (*SERVICE_JOBS, RESERVED_JOBS)
ANY_JOB = "jobs.>"  # as a filter, all of them at once
ALL_DEAD = "dead.jobs.*"
ALL_RESULTS = "results.*.*"
ALL_RECORDS = "rec.*"
REQUEST_RECORD = "rec.request"
DELIVERY_RECORD = "rec.delivery"
WORKER_RECORD = "rec.worker"
TRANSCRIPT_RECORD = "rec.transcript"
REFUSAL_RECORD = "rec.refusal"
WORKER_LOSS_RECORD = "rec.worker_loss"
ALL_FILES = "files.>"
ALL_BATCHES = "batches.>"
ALL_WORKERS = f"$KV.{WORKERS_BUCKET}.*"
ALL_FRAMES = "tok.*.>"
ALL_RESUMES = "resume.*.*"
ALL_HANDOVERS = "handover.*.*"
ALL_WORKER_COMMANDS = "ctl.worker.*"
ALL_WORKER_NAMES = f"$KV.{WORKERS_BUCKET}.name.*"
ALL_ROLE_TURNS = f"$KV.{WORKERS_BUCKET}.roles.*"
ALL_CANCELS = "ctl.cancel.*"
ALL_OWNER_CANCELS = "ctl.cancel.*.*"
ALL_RESULT_REQUESTS = "ctl.result.*.*"
ALL_ENDED = "ctl.ended.*"
ALL_PREFILLED = "ctl.prefilled.*"
ALL_PULLED = "ctl.pulled.*"
ALL_MOVES = "ctl.move.*"
ALL_QUEUE_STATUS = "ctl.queue.*"
ALL_HEARTBEATS = "hb.*"
ALL_PREFIX_REPORTS = "prefix.*"
TELEMETRY = "ctl.telemetry"

_STORED = "stored."
ALL_STORED_JOBS = f"{_STORED}jobs.>"
# subjects that the server repeats without payload, and where
STORED_JOBS = ("jobs.>", ALL_STORED_JOBS)
_TENANT_QUEUE_CONSUMER = "line-"

# --- Kafka -----------------------------------------------------------------------------------

REQUESTS_TOPIC = "millrace.requests.v1"
DELIVERIES_TOPIC = "millrace.deliveries.v1"
WORKERS_TOPIC = "millrace.workers.v1"
TRANSCRIPTS_TOPIC = "millrace.transcripts.v1"
REFUSALS_TOPIC = "millrace.refusals.v1"
WORKER_LOSSES_TOPIC = "millrace.worker-losses.v1"
DEAD_TOPIC = "millrace.dlq"
BRIDGE_TOPIC = "millrace.bridge"  # signed by the bridge: a Kafka without it is new

_CACHED_LINES = 4096


# --- jobs and results ------------------------------------------------------------------------


def job(tenant_queue: TenantQueue) -> str:
    """Return the subject of a tenant queue's jobs."""
    subject = f"jobs.{token(tenant_queue.model)}.{tenant_queue.tier.value}"
    if tenant_queue.tenant is None:
        return subject
    subject = f"{subject}.{token(tenant_queue.tenant)}"
    return f"{subject}.{_RESERVED}" if tenant_queue.reserved else subject


def jobs_of_tenant(tenant: str, tier: Tier) -> str:
    """Return the subjects of a tenant's jobs in a tier, for all models."""
    return f"jobs.*.{tier.value}.{token(tenant)}"


def jobs_of(model: str) -> str:
    """Return the subjects of one model's tenant queues."""
    return f"jobs.{token(model)}.>"


def is_reserved(job_subject: str) -> bool:
    """Return whether only gateways, which may name any listener, publish on the subject."""
    return job_subject.count(".") == 4 and job_subject.endswith(f".{_RESERVED}")


def is_stored_reserved(stored_subject: str) -> bool:
    """Return whether an announced subject is that of a gateway's job."""
    return is_reserved(stored_subject.removeprefix(_STORED))


@functools.lru_cache(_CACHED_LINES)
def tenant_queue_of(job_subject: str) -> TenantQueue:
    """Return the tenant queue of a job's subject. Raises ValueError for another subject."""
    kind, *tokens = job_subject.split(".")
    reserved = is_reserved(job_subject)
    if reserved:
        tokens.pop()
    if kind != "jobs" or len(tokens) not in (2, 3):
        raise ValueError("not a job subject")
    model, tier, *tenant = map(untoken, tokens)
    return TenantQueue(model, Tier(tier), tenant[0] if tenant else None, reserved)


def stored_job(job_subject: str) -> str:
    """Return the subject on which the server announces a stored job."""
    return f"{_STORED}{job_subject}"


def stored_tenant_queue_of(subject: str) -> TenantQueue:
    """Return the tenant queue of an announced job. Raises ValueError for another subject."""
    return tenant_queue_of(subject.removeprefix(_STORED))


def jobs_consumer(tenant_queue: TenantQueue) -> str:
    """Return the durable consumer of a tenant queue.

    Its filter names the tenant queue, so a digest is enough.
    """
    digest = hashlib.blake2b(job(tenant_queue).encode(), digest_size=16).hexdigest()
    return f"{_TENANT_QUEUE_CONSUMER}{digest}"


def is_outdated_consumer(name: str) -> bool:
    """Return whether a consumer is of an earlier version, which had one for each model."""
    return not name.startswith(_TENANT_QUEUE_CONSUMER)


def dead_job(reason: str) -> str:
    return f"dead.jobs.{token(reason)}"


def result(tenant: str, request_id: str) -> str:
    return f"results.{token(tenant)}.{token(request_id)}"


def results_of(tenant: str) -> str:
    """Return the subjects of one tenant's results."""
    return f"results.{token(tenant)}.*"


# --- files and batches -----------------------------------------------------------------------
# None in place of a free string yields a pattern for all.


def object_entry(owner: str, name: str | None = None) -> str:
    """Return the subject of an object's description."""
    return f"files.entry.{token(owner)}.{_token_or_all(name)}"


def object_chunks(upload_id: str) -> str:
    """Return the subject of an object's bytes, as written by one attempt."""
    return f"files.chunks.{token(upload_id)}"


def batch_state(tenant: str, batch_id: str | None = None) -> str:
    return f"batches.state.{token(tenant)}.{_token_or_all(batch_id)}"


def batch_log(batch_id: str) -> str:
    """Return the subject of a batch's log, in order."""
    return f"batches.log.{token(batch_id)}"


def open_batch(tenant: str | None = None, batch_id: str | None = None) -> str:
    """Return the subject of an entry that exists until the batch is finished."""
    return f"batches.open.{_token_or_all(tenant)}.{_token_or_all(batch_id)}"


def open_batch_of(subject: str) -> tuple[str, str]:
    """Return the tenant and the batch in an ``open_batch`` subject."""
    tenant, batch_id = subject.split(".")[2:]
    return untoken(tenant), untoken(batch_id)


def journal_stream(name: str) -> str:
    """Return the stream of a name of files or batches."""
    return FILES_STREAM if name.startswith("files.") else BATCHES_STREAM


def _token_or_all(text: str | None) -> str:
    return "*" if text is None else token(text)


# --- frames, control -------------------------------------------------------------------------


def frames(reply: str, request_id: str) -> str:
    return f"tok.{token(reply)}.{token(request_id)}"


def envelope(reply: str) -> str:
    """Return the subject for frames of many requests of one listener in one message."""
    return f"tok.{token(reply)}.{ENVELOPE}"


def frames_of(reply: str) -> str:
    """Return the subjects of one listener's messages."""
    return f"tok.{token(reply)}.>"


def worker_commands(worker_id: str) -> str:
    return f"ctl.worker.{token(worker_id)}"


def cancel(request_id: str) -> str:
    return f"ctl.cancel.{token(request_id)}"


def owner_cancel(tenant: str, request_id: str) -> str:
    """Return the subject on which a tenant's service cancels its own request."""
    return f"ctl.cancel.{token(tenant)}.{token(request_id)}"


def owner_cancels_of(tenant: str) -> str:
    """Return the subjects of all cancels by one tenant's services."""
    return f"ctl.cancel.{token(tenant)}.*"


def result_request(tenant: str, request_id: str) -> str:
    """Return the subject on which a scheduler answers with a request's stored result."""
    return f"ctl.result.{token(tenant)}.{token(request_id)}"


def result_requests_of(tenant: str) -> str:
    """Return the subjects of all requests for one tenant's results."""
    return f"ctl.result.{token(tenant)}.*"


def tenant_and_request(subject: str) -> tuple[str, str]:
    """Return the tenant and request id at a subject's end.

    Raises ValueError for a subject that does not end in two encoded tokens.
    """
    *_, tenant, request_id = subject.split(".")
    return untoken(tenant), untoken(request_id)


def ended(worker_id: str) -> str:
    return f"ctl.ended.{token(worker_id)}"


def prefilled(worker_id: str) -> str:
    return f"ctl.prefilled.{token(worker_id)}"


def pulled(worker_id: str) -> str:
    return f"ctl.pulled.{token(worker_id)}"


def move_streams(worker_id: str) -> str:
    return f"ctl.move.{token(worker_id)}"


def resume(reply: str, request_id: str) -> str:
    return f"resume.{token(reply)}.{token(request_id)}"


def resumes_of(reply: str) -> str:
    return f"resume.{token(reply)}.*"


def handover(gateway_id: str, request_id: str) -> str:
    return f"handover.{token(gateway_id)}.{token(request_id)}"


def handovers_of(gateway_id: str) -> str:
    return f"handover.{token(gateway_id)}.*"


def queue_status(model: str) -> str:
    return f"ctl.queue.{token(model)}"


def last_token(subject: str) -> str:
    """Return the decoded string at a subject's end. Raises ValueError if it is not a token."""
    return untoken(subject[subject.rfind(".") + 1 :])


# --- workers ---------------------------------------------------------------------------------


def heartbeat(worker_id: str) -> str:
    return f"hb.{token(worker_id)}"


def prefix_report(worker_id: str) -> str:
    return f"prefix.{token(worker_id)}"


def worker_entry(worker_id: str) -> str:
    """Return a worker's key in the bucket.

    Keys may not contain ``%``, and ``token`` never returns ``=``.
    """
    return f"$KV.{WORKERS_BUCKET}.{_bucket_key(worker_id)}"


def worker_name(name: str) -> str:
    """Return the key of the lease on a worker's name, in the same bucket."""
    return f"$KV.{WORKERS_BUCKET}.name.{_bucket_key(name)}"


def role_turn(model: str) -> str:
    """Return the key of the turn to change a model's roles, in the same bucket."""
    return f"$KV.{WORKERS_BUCKET}.roles.{_bucket_key(model)}"


def _bucket_key(text: str) -> str:
    return token(text).replace("%", "=")


# --- records ---------------------------------------------------------------------------------


def record(item: Record) -> str:
    """Return the subject of a record, which ends in its tag."""
    return f"rec.{item.__struct_config__.tag}"


def record_identity(item: Record) -> str:
    """Return the id by which JetStream and telemetry recognize a record that is sent twice."""
    match item:
        case RequestRecord():
            return f"request:{token(item.request_id)}"
        case DeliveryRecord():
            # A gateway that took over a stream has a record of more than the previous gateway.
            place = f"{token(item.gateway_id)}:{item.num_resumes}"
            return f"delivery:{token(item.request_id)}:{place}"
        case WorkerSample():
            return f"worker:{token(item.worker_id)}:{item.sampled_ns}"
        case TranscriptRecord():
            return f"transcript:{token(item.request_id)}"
        case RefusalRecord():
            return f"refusal:{token(item.gateway_id)}:{item.recorded_ns}:{item.number}"
        case WorkerLossRecord():
            return f"worker_loss:{token(item.worker_id)}:{item.observer.value}:{item.lost_ns}"


def topic(record_subject: str) -> str:
    """Return the Kafka topic of a record's subject. Raises KeyError for another subject."""
    return _TOPICS[record_subject]


_TOPICS = {
    REQUEST_RECORD: REQUESTS_TOPIC,
    DELIVERY_RECORD: DELIVERIES_TOPIC,
    WORKER_RECORD: WORKERS_TOPIC,
    TRANSCRIPT_RECORD: TRANSCRIPTS_TOPIC,
    REFUSAL_RECORD: REFUSALS_TOPIC,
    WORKER_LOSS_RECORD: WORKER_LOSSES_TOPIC,
}
RECORD_TOPICS = tuple(_TOPICS.values())
