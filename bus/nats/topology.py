"""Streams and consumers, and the processes that create and change them.

Gateways, schedulers, workers and telemetry create missing streams. Only schedulers change existing
streams. The command line does neither.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from millrace.bus import subjects
from millrace.bus.fleet.directory import ENTRY_TTL_S
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.jetstream import JetStreamError, Json, nanoseconds
from millrace.bus.storage import NATS
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusForbiddenError, ConfigError, StoreFullError

logger = logging.getLogger(__name__)

DUPLICATE_WINDOW_S = 600.0
# The server removes a tenant queue's consumer that is unused for this long: no scheduler is left to
# forget the tenant queue, and consumers cost memory.
QUEUE_IDLE_S = 3_600.0
# Since 2.15 a stream without a bound may have 1,000 consumers. Earlier versions allow any number
# and cannot change a stream's bound.
MAX_JOBS_CONSUMERS = 100_000
_BOUNDED_SINCE = (2, 15)
DEAD_MAX_AGE_S = 30 * 86_400.0
DEAD_MAX_MESSAGES = 100_000
BRIDGE_ACK_WAIT_S = 30.0
ANY_SIZE = -1
_LIMITS = frozenset({"num_replicas", "max_age", "max_msgs", "max_consumers", "duplicate_window"})


def streams(config: NatsConfig, server_version: tuple[int, int]) -> list[Json]:
    """Return the configuration of every stream for a server version."""

    def stream(name: str, *names: str, max_age_s: float = 0.0, **more: object) -> Json:
        window_s = min(DUPLICATE_WINDOW_S, max_age_s or DUPLICATE_WINDOW_S)
        return {
            "name": name,
            "subjects": names,
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": nanoseconds(max_age_s),
            "num_replicas": config.replicas,
            "duplicate_window": nanoseconds(window_s),
            "allow_direct": True,
            **more,
        }

    stored, told = subjects.STORED_JOBS
    return [
        stream(
            subjects.JOBS_STREAM,
            *subjects.ALL_JOBS,
            retention="workqueue",
            discard="new",
            max_msgs=config.max_stored_jobs,
            max_msg_size=ANY_SIZE,
            **({"max_consumers": MAX_JOBS_CONSUMERS} if server_version >= _BOUNDED_SINCE else {}),
            republish={"src": stored, "dest": told, "headers_only": True},
        ),
        stream(
            subjects.DEAD_STREAM,
            subjects.ALL_DEAD,
            max_age_s=DEAD_MAX_AGE_S,
            max_msgs=DEAD_MAX_MESSAGES,
        ),
        stream(subjects.RESULTS_STREAM, subjects.ALL_RESULTS, max_age_s=config.results_ttl_s),
        stream(subjects.OUTBOX_STREAM, subjects.ALL_RECORDS, max_age_s=config.outbox_max_age_s),
        stream(subjects.FILES_STREAM, subjects.ALL_FILES, max_age_s=config.files_ttl_s),
        stream(
            subjects.BATCHES_STREAM,
            subjects.ALL_BATCHES,
            max_age_s=config.files_ttl_s,
            allow_rollup_hdrs=True,
        ),
        stream(
            subjects.WORKERS_STREAM,
            subjects.ALL_WORKERS,
            subjects.ALL_WORKER_NAMES,
            subjects.ALL_ROLE_TURNS,
            max_age_s=ENTRY_TTL_S,
            storage="memory",
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
        ),
    ]


def names_on_disk(config: NatsConfig, server_version: tuple[int, int]) -> list[str]:
    """Return the names of the streams that are stored in files."""
    return [one["name"] for one in streams(config, server_version) if one["storage"] == "file"]


async def require_streams(connection: Connection, address: str) -> None:
    """Raise ConfigError if Millrace's streams are not on this server. Creates nothing."""
    try:
        await jetstream.stream_info(connection, subjects.JOBS_STREAM)
    except BusForbiddenError:
        return  # A tenant's service may publish without seeing streams.
    except JetStreamError as error:
        if error.number != jetstream.STREAM_NOT_FOUND:
            raise
        raise ConfigError(
            f"No Millrace system uses the NATS server at {address}: it has no stream "
            f"{subjects.JOBS_STREAM}, which a scheduler, a gateway, a worker or telemetry creates "
            "when it starts. Start the system, or correct the address."
        ) from error


async def ensure_streams(
    connection: Connection, config: NatsConfig, *, changes_existing: bool
) -> None:
    """Create missing streams; with ``changes_existing`` also update existing ones.

    Raises ConfigError if an existing stream cannot be changed into ours.
    """
    version = connection.server_version
    defaults = streams(NatsConfig(), version)
    await asyncio.gather(
        *(
            _ensure_stream(connection, wanted, default if changes_existing else None)
            for wanted, default in zip(streams(config, version), defaults, strict=True)
        )
    )


async def _ensure_stream(connection: Connection, wanted: Json, default: Json | None) -> None:
    """Create or update a stream.

    ``default`` is its configuration without settings; None leaves an existing stream unchanged.
    Without permission the stream stays as it is.
    """
    name = wanted["name"]
    try:
        try:
            await jetstream.call(connection, f"STREAM.CREATE.{name}", wanted)
        except JetStreamError as error:
            if error.number != jetstream.STREAM_NAME_IN_USE:
                raise
            if default is not None:
                await _update_stream(connection, wanted, default)
    except BusForbiddenError:
        logger.info("this process may not create or change a stream", extra={"stream": name})
    except JetStreamError as error:
        if jetstream.is_of_a_file(error):
            raise StoreFullError(NATS, f"cannot set up its stream {name}") from error
        raise ConfigError(f"the stream {name} cannot be set up: {error.reason}") from error


async def _update_stream(connection: Connection, wanted: Json, default: Json) -> None:
    name = wanted["name"]
    try:
        await update_stream(connection, name, lambda existing: updated(existing, wanted, default))
    except JetStreamError as error:
        if not jetstream.is_of_a_file(error):
            raise
        # It goes on unchanged, so accepted jobs can end.
        logger.warning("a stream cannot be updated", extra={"stream": name, "cause": error.reason})


async def update_stream(
    connection: Connection,
    stream: str,
    change: Callable[[Json], Json],
    timeout_s: float | None = None,
) -> None:
    """Change a stream's configuration by ``change``. Sends nothing if it stays the same."""
    existing = (await jetstream.stream_info(connection, stream, timeout_s=timeout_s)).config
    # As JSON, so that a tuple equals a list.
    wanted: Json = msgspec.json.decode(msgspec.json.encode(change(existing)))
    changed = {key for key in wanted if (wanted[key] or None) != (existing.get(key) or None)}
    if not changed:
        return
    await jetstream.call(connection, f"STREAM.UPDATE.{stream}", wanted, timeout_s=timeout_s)
    logger.info(
        "a stream's configuration was updated",
        extra={"stream": stream, "changed": ", ".join(sorted(changed))},
    )


def updated(existing: Json, wanted: Json, default: Json) -> Json:
    """Merge the existing configuration with ours.

    Keys that we do not set stay. A limit with its default value is only raised. A setting that
    differs from its default applies as it is.
    """
    merged = dict(existing)
    for key, value in wanted.items():
        kept = existing.get(key)
        if key in _LIMITS and value == default[key] and _size(kept) > _size(value):
            logger.info(
                "a stream keeps a limit that is above the default",
                extra={"stream": wanted["name"], "limit": key, "kept": kept, "default": value},
            )
        else:
            merged[key] = value
    if merged["max_age"]:
        merged["duplicate_window"] = min(merged["duplicate_window"], merged["max_age"])
    return merged


def _size(limit: float | None) -> float:
    """Return a limit's size. The server writes no limit as 0, -1 or nothing."""
    return limit if limit and limit > 0 else math.inf


async def ensure_jobs_consumer(
    connection: Connection, config: NatsConfig, tenant_queue: TenantQueue
) -> int:
    """Ensure a tenant queue's durable pull consumer; return the server's time, UTC epoch in ns.

    BackOff is not set: it would override AckWait. The puller counts deliveries, as the server would
    leave a job over its limit in the queue.
    """
    name = subjects.jobs_consumer(tenant_queue)
    body = {
        "filter_subject": subjects.job(tenant_queue),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(config.ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "replay_policy": "instant",
        "inactive_threshold": nanoseconds(QUEUE_IDLE_S),
    }
    stream = subjects.JOBS_STREAM
    try:
        info = await jetstream.create_consumer(connection, stream, name, body)
    except JetStreamError as error:
        if jetstream.is_of_a_file(error):
            # On a full disk the existing consumer goes on, so accepted jobs can end.
            known = await jetstream.find_consumer(connection, stream, name)
            if known is None:
                raise
            return jetstream.epoch_ns(known.ts)
        if error.number != jetstream.CONSUMER_NOT_UNIQUE:
            raise
        await _remove_outdated_consumers(connection)
        info = await jetstream.create_consumer(connection, stream, name, body)
    return jetstream.epoch_ns(info.ts)


async def _remove_outdated_consumers(connection: Connection) -> None:
    """Remove consumers of an earlier version, which had one for each model.

    Jobs that they held are redelivered as ``uncertain``.
    """
    stream = subjects.JOBS_STREAM
    for name in await jetstream.consumer_names(connection, stream):
        if subjects.is_outdated_consumer(name):
            logger.warning("removing an outdated consumer of jobs", extra={"consumer": name})
            await jetstream.delete_consumer(connection, stream, name)


async def ensure_bridge(connection: Connection, after_sequence: int | None = None) -> None:
    """Ensure the outbox's consumer.

    It keeps its place, unless ``after_sequence`` says where to restart.
    """
    name = subjects.BRIDGE_CONSUMER
    stream = subjects.OUTBOX_STREAM
    start: Json = {"deliver_policy": "all"}
    if after_sequence:
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": after_sequence + 1}
    if after_sequence is not None:
        await jetstream.delete_consumer(connection, stream, name)
    elif await jetstream.find_consumer(connection, stream, name) is not None:
        return
    body = {
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(BRIDGE_ACK_WAIT_S),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "replay_policy": "instant",
        **start,
    }
    await jetstream.create_consumer(connection, stream, name, body)


# Sequence that no stream reaches. A failed stream reports its failure on a delete, even of a
# missing message. It answers info requests and acks as if it were healthy.
_NO_SEQUENCE = 2**62
_TIMEOUT_S = 2.0
_NOTHING_FITS = 1


class NatsStorage:
    """Storage of NATS. See ``bus.storage.Storage``."""

    def __init__(self, connection: Connection, config: NatsConfig) -> None:
        self._connection = connection
        self._config = config

    async def failed_streams(self) -> dict[str, str]:
        names = names_on_disk(self._config, self._connection.server_version)
        causes = await asyncio.gather(*map(self._cause, names))
        return {name: cause for name, cause in zip(names, causes, strict=True) if cause}

    async def _cause(self, stream: str) -> str:
        """Return why a stream accepts nothing; empty if it does."""
        request, body = f"STREAM.MSG.DELETE.{stream}", {"seq": _NO_SEQUENCE}
        try:
            await jetstream.call(self._connection, request, body, timeout_s=_TIMEOUT_S)
        except JetStreamError as error:
            if error.number == jetstream.NOT_DELETED:
                return jetstream.cause_in_a_file(error)
        return ""

    async def admit_jobs(self, *, admit: bool) -> None:
        max_bytes = ANY_SIZE if admit else _NOTHING_FITS
        await update_stream(
            self._connection,
            subjects.JOBS_STREAM,
            lambda existing: {**existing, "max_msg_size": max_bytes},
            timeout_s=_TIMEOUT_S,
        )
