"""Permissions of each part and of tenants' services on a NATS server, as narrow as possible.

``python -m millrace.bus.nats.accounts`` writes them for nats-server.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from millrace.bus import subjects
from millrace.bus.nats.jetstream import API
from millrace.bus.subjects import token
from millrace.schemas.jobs import Tier

_INBOX = "_INBOX"
_ACK = "$JS.ACK"
_ON_DISK = tuple(name for name in subjects.STREAMS if name != subjects.WORKERS_STREAM)


class Part(StrEnum):
    """Kind of client. The operator is the command line: ``publish``, ``result``, ``top``."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    TELEMETRY = "telemetry"
    OPERATOR = "operator"


class Grants(NamedTuple):
    """Subjects with wildcards. ``answers``: the client may answer requests."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def inbox_of(part: Part) -> str:
    """Return the prefix of the subjects on which a part gets its answers."""
    return f"{_INBOX}.{part.value}"


def service_inbox(tenant: str) -> str:
    """Return the inbox prefix of a tenant's service."""
    return f"{_INBOX}.service.{token(tenant)}"


def grants_of(part: Part) -> Grants:
    """Return the permissions of a part."""
    make = _GRANTS[part]
    publish, subscribe, answers = make()
    inbox = f"{inbox_of(part)}.>"
    # A message to itself tells a process that the server has read its earlier messages.
    return Grants(
        (inbox, *_each("STREAM.CREATE", subjects.STREAMS), *publish), (inbox, *subscribe), answers
    )


def grants_of_service(tenant: str, tiers: Sequence[Tier], replies: Sequence[str] = ()) -> Grants:
    """Return the permissions of a service that publishes its tenant's jobs in these tiers.

    Its frames go to the tenant's name and to ``replies``.
    """
    names = (tenant, *replies)
    inbox = f"{service_inbox(tenant)}.>"
    result = subjects.results_of(tenant)
    return Grants(
        (
            inbox,
            *(subjects.jobs_of_tenant(tenant, tier) for tier in tiers),
            subjects.owner_cancels_of(tenant),
            subjects.result_requests_of(tenant),
            f"{API}.DIRECT.GET.{subjects.RESULTS_STREAM}.{result}",
        ),
        (
            inbox,
            result,
            *(subjects.frames_of(name) for name in names),
            *(subjects.resumes_of(name) for name in names),
        ),
        answers=True,
    )


def _gateway() -> Grants:
    journals = (subjects.FILES_STREAM, subjects.BATCHES_STREAM)
    return Grants(
        (
            subjects.RESERVED_JOBS,
            subjects.ALL_WORKER_COMMANDS,
            subjects.ALL_CANCELS,
            subjects.ALL_HANDOVERS,
            subjects.TELEMETRY,
            subjects.DELIVERY_RECORD,
            subjects.REFUSAL_RECORD,
            subjects.ALL_FILES,
            subjects.ALL_BATCHES,
            f"{API}.STREAM.MSG.GET.{subjects.JOBS_STREAM}",
            f"{API}.DIRECT.GET.{subjects.RESULTS_STREAM}.{subjects.ALL_RESULTS}",
            *_each("DIRECT.GET", (*journals, subjects.WORKERS_STREAM)),
            *_each("STREAM.MSG.GET", journals),
            *_each("STREAM.INFO", journals),
            *_each("STREAM.PURGE", journals),
            # It checks whether every stream on disk can be written, and closes the queue while one
            # cannot (see ``bus.nats.topology.NatsStorage``).
            *_each("STREAM.MSG.DELETE", _ON_DISK),
            *_each("STREAM.INFO", (subjects.JOBS_STREAM,)),
            *_each("STREAM.UPDATE", (subjects.JOBS_STREAM,)),
        ),
        (
            subjects.ALL_FRAMES,
            subjects.ALL_RESUMES,
            subjects.ALL_HANDOVERS,
            subjects.ALL_RESULTS,
            subjects.ALL_QUEUE_STATUS,
            subjects.ALL_HEARTBEATS,
        ),
        answers=True,
    )


def _scheduler() -> Grants:
    jobs = subjects.JOBS_STREAM
    return Grants(
        (
            *subjects.ALL_JOBS,
            subjects.ALL_DEAD,
            subjects.ALL_FRAMES,
            subjects.ALL_RESULTS,
            subjects.REQUEST_RECORD,
            subjects.WORKER_LOSS_RECORD,
            subjects.ALL_WORKER_COMMANDS,
            subjects.ALL_CANCELS,
            subjects.ALL_RESUMES,
            subjects.ALL_QUEUE_STATUS,
            subjects.ALL_ROLE_TURNS,
            *_each("STREAM.UPDATE", subjects.STREAMS),
            *_each("STREAM.INFO", subjects.STREAMS),
            *_each("STREAM.MSG.GET", (jobs,)),
            *_each("STREAM.MSG.DELETE", (jobs,)),
            *_each("CONSUMER.NAMES", (jobs,)),
            f"{API}.DIRECT.GET.{subjects.RESULTS_STREAM}.{subjects.ALL_RESULTS}",
            *(
                f"{API}.CONSUMER.{verb}.{jobs}.*"
                for verb in ("CREATE", "INFO", "DELETE", "PAUSE", "MSG.NEXT")
            ),
            *_each("DIRECT.GET", (subjects.WORKERS_STREAM,)),
            f"{_ACK}.{jobs}.>",
        ),
        (
            subjects.ALL_CANCELS,
            subjects.ALL_OWNER_CANCELS,
            subjects.ALL_RESULT_REQUESTS,
            subjects.ALL_ENDED,
            subjects.ALL_PREFILLED,
            subjects.ALL_MOVES,
            subjects.ALL_STORED_JOBS,
            # For jobs of services that the server drops as duplicates.
            *subjects.SERVICE_JOBS,
            subjects.ALL_HEARTBEATS,
            subjects.ALL_PREFIX_REPORTS,
        ),
        answers=True,
    )


def _worker() -> Grants:
    jobs = subjects.JOBS_STREAM
    return Grants(
        (
            subjects.ALL_FRAMES,
            subjects.ALL_RESUMES,
            subjects.ALL_RESULTS,
            subjects.REQUEST_RECORD,
            subjects.WORKER_RECORD,
            subjects.WORKER_LOSS_RECORD,
            subjects.TRANSCRIPT_RECORD,
            subjects.ALL_ENDED,
            subjects.ALL_PREFILLED,
            subjects.ALL_PULLED,
            subjects.ALL_HEARTBEATS,
            subjects.ALL_WORKERS,
            subjects.ALL_WORKER_NAMES,
            subjects.ALL_PREFIX_REPORTS,
            *_each("STREAM.MSG.GET", (jobs, subjects.WORKERS_STREAM)),
            f"{API}.DIRECT.GET.{subjects.RESULTS_STREAM}.{subjects.ALL_RESULTS}",
            # For comparing weights with the other workers of its model.
            *_each("DIRECT.GET", (subjects.WORKERS_STREAM,)),
            *_each("STREAM.MSG.DELETE", (jobs,)),
            f"{_ACK}.{jobs}.>",
        ),
        (
            subjects.ALL_WORKER_COMMANDS,
            subjects.ALL_CANCELS,
            subjects.ALL_OWNER_CANCELS,
            subjects.ALL_QUEUE_STATUS,
            subjects.ALL_PULLED,
        ),
        answers=True,
    )


def _telemetry() -> Grants:
    outbox, bridge = subjects.OUTBOX_STREAM, subjects.BRIDGE_CONSUMER
    return Grants(
        (
            *_each("STREAM.INFO", (outbox,)),
            *(
                f"{API}.CONSUMER.{verb}.{outbox}.{bridge}"
                for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")
            ),
            f"{_ACK}.{outbox}.{bridge}.>",
            *_each("DIRECT.GET", (subjects.WORKERS_STREAM,)),
        ),
        (subjects.TELEMETRY, subjects.ALL_HEARTBEATS),
        answers=True,
    )


def _operator() -> Grants:
    """Return the operator's permissions: any tenant's jobs within its limits, views and repairs."""
    return Grants(
        (
            *subjects.SERVICE_JOBS,
            subjects.ALL_WORKER_COMMANDS,
            subjects.ALL_CANCELS,
            subjects.ALL_MOVES,
            subjects.ALL_RESULT_REQUESTS,
            subjects.TELEMETRY,
            f"{API}.>",
        ),
        (
            subjects.ALL_FRAMES,
            subjects.ALL_RESUMES,
            subjects.ALL_RESULTS,
            subjects.ALL_QUEUE_STATUS,
            subjects.ALL_HEARTBEATS,
            subjects.ALL_STORED_JOBS,
        ),
        answers=True,
    )


_GRANTS = {
    Part.GATEWAY: _gateway,
    Part.SCHEDULER: _scheduler,
    Part.WORKER: _worker,
    Part.TELEMETRY: _telemetry,
    Part.OPERATOR: _operator,
}


def _each(request: str, streams: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{API}.{request}.{stream}" for stream in streams)
