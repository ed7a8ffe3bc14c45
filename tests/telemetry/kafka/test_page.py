"""docs/kafka.md: its fields match the records, and its consumer runs."""

from __future__ import annotations

import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.bus import codec, subjects
from millrace.bus.api import OutboxMessage
from millrace.schemas.config import KafkaConfig
from millrace.schemas.records import Record, RequestRecord
from millrace.telemetry.bridge.producer_batch import ProducerBatch
from millrace.telemetry.kafka import dead_letters
from millrace.telemetry.kafka.apache import broker, jars
from millrace.telemetry.kafka.kafka import (
    LARGEST_MESSAGE_BYTES,
    SEQUENCE_HEADER,
    SUBJECT_HEADER,
    make_producer,
)
from millrace.telemetry.store import fields_page
from millrace.telemetry.store.store import Store
from tests.support.repository import ROOT, example_of
from tests.telemetry.records import request_record

PAGE = (ROOT / "docs" / "kafka.md").read_text(encoding="utf-8")
# Prose is wrapped.
WORDS = " ".join(PAGE.split())
KINDS: tuple[type, ...] = typing.get_args(Record)


async def test_the_fields_are_those_of_today(store: Store) -> None:
    """Made by ``python -m millrace.telemetry.store.fields_page``."""
    assert fields_page.with_fields(PAGE, await fields_page.fields_page(store)) == PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_has_a_row_a_column_or_a_meaning(kind: type) -> None:
    for field, columns in fields_page.columns_by_field(kind).items():
        target = columns or fields_page._WITHOUT_COLUMN.get(f"{kind.__name__}.{field}")
        assert target, f"{kind.__name__}.{field} becomes no column: say what it means there"
        assert f"\n| `{field}` | " in PAGE


def test_columns_are_found_beside_the_fields_they_are_made_of() -> None:
    columns = fields_page.columns_by_field(RequestRecord)
    assert columns["session_id"] == ["session"]
    assert columns["first_token_ns"] == ["first_token_at"]
    assert columns["pulled_tokens"] == ["pulled_tokens", "pulls"]
    assert columns["version"] == ["record_version"]


def test_each_topic_is_told() -> None:
    for topic in (*subjects.RECORD_TOPICS, subjects.DEAD_TOPIC, subjects.BRIDGE_TOPIC):
        assert f"\n| `{topic}` | " in PAGE, topic


def test_headers_and_bounds_are_told() -> None:
    letter = dead_letters.DeadLetterRecord(
        payload=b"", reason="why", sequence=1, origin=("topic", 0, 7)
    )
    names = [name for name, _ in dead_letters._headers(letter)]
    assert len(names) == 5
    for name in (*names, SEQUENCE_HEADER, SUBJECT_HEADER):
        assert f"`{name}`" in PAGE, name
    assert f"above {LARGEST_MESSAGE_BYTES:,} bytes" in WORDS
    assert f"{dead_letters._REASON_CHARACTERS:,} characters at most" in WORDS
    assert f"{broker.RETENTION_HOURS // 24} days, at most" in PAGE
    assert f"at most {broker.RETENTION_BYTES // 2**30} GiB of a partition" in PAGE
    assert "-Xmx256m" in broker._JVM
    assert "heap of 256 MB" in WORDS
    assert f"Apache Kafka {jars.VERSION.rpartition('.')[0]} |" in PAGE
    assert f"{jars.SIZE_MB} MB, from Maven Central" in PAGE


@contextmanager
def reader(folder: Path, bootstrap: str) -> Iterator[subprocess.Popen[str]]:
    """The page's consumer, as a program."""
    program = folder / "read_records.py"
    program.write_text(example_of("kafka.md", "A consumer in Python", "python"), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(program), bootstrap], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_the_consumer_in_python_reads_the_stand_in(
    embedded_kafka: KafkaConfig, tmp_path: Path
) -> None:
    """A copy is printed once, and a newer version of a record again."""
    first, second = request_record(1), request_record(2)
    newer = msgspec.structs.replace(first, completion_tokens=first.completion_tokens + 1)
    sent = [(1, first), (1, first), (2, second), (3, newer), (1, first), (4, request_record(3))]
    producer = make_producer(embedded_kafka)
    await producer.start()
    batch = ProducerBatch(producer)
    for sequence, record in sent:
        subject = subjects.record(record)
        payload = codec.encode(record)
        message = OutboxMessage(sequence=sequence, subject=subject, payload=payload, lease="")
        await batch.add(subjects.topic(subject), message)
    await batch.send()
    await producer.stop()
    with reader(tmp_path, embedded_kafka.bootstrap_servers) as process:
        assert process.stdout is not None
        read: list[dict[str, Any]] = [
            msgspec.json.decode(process.stdout.readline()) for _ in range(4)
        ]
    # In order only where the key is the same.
    assert [one for one in read if one["request_id"] == first.request_id] == [
        msgspec.json.decode(codec.encode_json(record)) for record in (first, newer)
    ]
    assert sorted(one["request_id"] for one in read) == sorted(
        record.request_id for record in (first, newer, second, request_record(3))
    )
