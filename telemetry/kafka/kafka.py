"""Kafka clients of the telemetry path: topics, an idempotent producer, a consumer with manual
commits."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping

from aiokafka import (
    AIOKafkaConsumer,
    AIOKafkaProducer,
    ConsumerRebalanceListener,
    TopicPartition,
)
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaConnectionError, TopicAlreadyExistsError, for_code

from millrace.bus import subjects
from millrace.schemas.config import KafkaConfig
from millrace.telemetry.kafka import security
from millrace.telemetry.kafka.security import connection_options, why_refused

SEQUENCE_HEADER = "outbox-sequence"
SUBJECT_HEADER = "subject"
# Brokers accept 1 MiB by default, including key, headers and reason.
LARGEST_MESSAGE_BYTES = 1_000_000

Offsets = Mapping[TopicPartition, int]

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 1.5

security.install()


def make_producer(config: KafkaConfig) -> AIOKafkaProducer:
    """Return a producer: idempotent, acknowledged by all in-sync replicas, in order within a
    partition.

    Uncompressed: compressing a record here takes longer than storing it. A topic's own
    ``compression.type`` has the broker do it.
    """
    return AIOKafkaProducer(
        bootstrap_servers=config.bootstrap_servers,
        **connection_options(config),
        enable_idempotence=True,
        acks="all",
        max_batch_size=256 * 1024,
        request_timeout_ms=10_000,
    )


async def start_consumer(
    config: KafkaConfig, *, manages_groups: bool, listener: ConsumerRebalanceListener
) -> AIOKafkaConsumer:
    """Start and return the sink's consumer; offsets are committed by hand, and ``listener`` is told
    of rebalances.

    A broker divides the partitions among the group's members. The embedded cluster is slow at that
    (a dead member costs 10 s) and has a single consumer, which takes all partitions.
    """
    consumer = AIOKafkaConsumer(
        bootstrap_servers=config.bootstrap_servers,
        **connection_options(config),
        group_id=config.group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=10_000,
        heartbeat_interval_ms=2_000,
        # Longer than a member takes to store its current batch (see ``telemetry.sink.progress``).
        rebalance_timeout_ms=15_000,
        # A store that is unreachable for hours must not cost the membership.
        max_poll_interval_ms=24 * 3_600_000,
        metadata_max_age_ms=30_000,
        fetch_max_wait_ms=100,
        max_partition_fetch_bytes=4 * 1024 * 1024,
    )
    if manages_groups:
        consumer.subscribe(subjects.RECORD_TOPICS, listener=listener)
    await consumer.start()
    if not manages_groups:
        consumer.assign(await _record_partitions(consumer))
    return consumer


async def stop_client(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """Close a client with a timeout: with an unreachable cluster it would wait forever, and its
    records are still in the outbox or in Kafka."""
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await client.stop()
    except TimeoutError:
        logger.warning("left a Kafka client unflushed", extra={"client": type(client).__name__})


async def ensure_topics(config: KafkaConfig) -> bool:
    """Create missing topics; return whether this broker manages topics and groups.

    The embedded cluster has no controller: its topics are created on first use. Raises KafkaError,
    or UntrustedServerError or CredentialsRefusedError if that is why no server answers.
    """
    admin = AIOKafkaAdminClient(
        bootstrap_servers=config.bootstrap_servers, **connection_options(config)
    )
    try:
        await admin.start()
    except KafkaConnectionError as error:
        await admin.close()
        refusal = await why_refused(config)
        raise refusal or error from error
    try:
        cluster = await admin.describe_cluster()
        nodes = {broker["node_id"] for broker in cluster["brokers"]}
        if cluster["controller_id"] not in nodes:
            return False
        present = set(await admin.list_topics())
        wanted = dict.fromkeys(subjects.RECORD_TOPICS, config.partitions)
        wanted |= {subjects.DEAD_TOPIC: 1, subjects.BRIDGE_TOPIC: 1}
        missing = [
            NewTopic(topic, partitions, config.replication_factor)
            for topic, partitions in wanted.items()
            if topic not in present
        ]
        if missing:
            response = await admin.create_topics(missing)
            for topic, code, *_ in response.topic_errors:
                if code and for_code(code) is not TopicAlreadyExistsError:
                    raise for_code(code)(f"topic {topic} could not be created")
            logger.info("created Kafka topics", extra={"topics": [t.name for t in missing]})
        return True
    finally:
        await admin.close()


async def _record_partitions(consumer: AIOKafkaConsumer) -> list[TopicPartition]:
    partitions = []
    for topic in subjects.RECORD_TOPICS:
        # Asking for an unknown topic's end makes the client learn of it.
        await consumer.end_offsets([TopicPartition(topic, 0)])
        numbers = consumer.partitions_for_topic(topic) or {0}
        partitions += [TopicPartition(topic, number) for number in numbers]
    return partitions


_MARKER = TopicPartition(subjects.BRIDGE_TOPIC, 0)


async def look_at_cluster(config: KafkaConfig) -> tuple[bool, dict[TopicPartition, int]]:
    """Return whether the bridge has written to this Kafka before, and the current ends of its
    record topics.

    A cluster that lost its topics (the embedded one does at each start) has no marker: records
    acknowledged in the outbox are gone there.
    """
    consumer = AIOKafkaConsumer(
        bootstrap_servers=config.bootstrap_servers, **connection_options(config)
    )
    await consumer.start()
    try:
        ends = await consumer.end_offsets([_MARKER])
        partitions = await _record_partitions(consumer)
        record_ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
    finally:
        await stop_client(consumer)
    return ends[_MARKER] > 0, record_ends


async def sign_cluster(producer: AIOKafkaProducer) -> None:
    """Write the marker after the outbox was rewound: after a crash before it, the cluster still
    counts as new."""
    await producer.send_and_wait(
        _MARKER.topic, uuid.uuid4().hex.encode(), partition=_MARKER.partition
    )
