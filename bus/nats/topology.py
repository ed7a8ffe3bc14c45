"""Streams and consumers: created if they are not there, brought up to date if they differ."""

from __future__ import annotations

import asyncio
import logging

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
# A tenant queue's consumer that nobody pulls from for so long is removed by the server: no
# scheduler is left to forget the tenant queue, and consumers cost memory.
QUEUE_IDLE_S = 3_600.0
# Since 2.15 a stream without a bound of its own may have 1,000 consumers; before, any number, and
# the bound of a stream could not be changed.
MAX_JOBS_CONSUMERS = 100_000
_BOUNDED_SINCE = (2, 15)
DEAD_MAX_AGE_S = 30 * 86_400.0
DEAD_MAX_MESSAGES = 100_000
BRIDGE_ACK_WAIT_S = 30.0


def streams(config: NatsConfig, server_version: tuple[int, int]) -> list[Json]:
    """The configuration of every stream on a server of that version."""

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


def jobs_stream(config: NatsConfig, server_version: tuple[int, int]) -> Json:
    """The configuration of the stream of jobs."""
    [body] = [one for one in streams(config, server_version) if one["name"] == subjects.JOBS_STREAM]
    return body


def names_on_disk(config: NatsConfig, server_version: tuple[int, int]) -> list[str]:
    """The streams that are kept in files."""
    return [one["name"] for one in streams(config, server_version) if one["storage"] == "file"]


async def ensure_streams(connection: Connection, config: NatsConfig) -> None:
    """Raises ConfigError if a stream is there that cannot be changed into ours."""
    wanted = streams(config, connection.server_version)
    await asyncio.gather(*(_ensure_stream(connection, body) for body in wanted))


async def _ensure_stream(connection: Connection, body: Json) -> None:
    """Who may not make or change streams takes them as they are: others see to them."""
    name = body["name"]
    try:
        try:
            await jetstream.call(connection, f"STREAM.CREATE.{name}", body)
        except JetStreamError as error:
            if error.number != jetstream.STREAM_NAME_IN_USE:
                raise
            await _update_stream(connection, body)
    except BusForbiddenError:
        logger.info("a stream is left to those who may change it", extra={"stream": name})
    except JetStreamError as error:
        if jetstream.is_of_a_file(error):
            raise StoreFullError(NATS, f"cannot set up its stream {name}") from error
        raise ConfigError(f"the stream {name} cannot be set up: {error.reason}") from error


async def _update_stream(connection: Connection, body: Json) -> None:
    name = body["name"]
    try:
        await jetstream.call(connection, f"STREAM.UPDATE.{name}", body)
    except JetStreamError as error:
        if not jetstream.is_of_a_file(error):
            raise
        # It goes on as it is: what was accepted is to end.
        logger.warning("a stream cannot be updated", extra={"stream": name, "cause": error.reason})
    else:
        logger.info("a stream's configuration was updated", extra={"stream": name})


async def ensure_jobs_consumer(
    connection: Connection, config: NatsConfig, tenant_queue: TenantQueue
) -> int:
    """One durable pull consumer a tenant queue; the UTC epoch by the server's clock, in ns.

    No BackOff: it would override AckWait. Deliveries are counted when they are pulled, as the
    server would leave a job over its limit in the queue.
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
            # On a full disk the one that is there goes on, as what was accepted is to end.
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
    """Once there was one consumer a model, for all its tenant queues. Jobs that were held by one
    come again as ``uncertain``."""
    stream = subjects.JOBS_STREAM
    for name in await jetstream.consumer_names(connection, stream):
        if subjects.is_outdated_consumer(name):
            logger.warning("an outdated consumer of the jobs is removed", extra={"consumer": name})
            await jetstream.delete_consumer(connection, stream, name)


async def ensure_bridge(connection: Connection, after_sequence: int | None = None) -> None:
    """The consumer of the outbox; where it is stays, unless ``after_sequence`` says where to
    start again."""
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
