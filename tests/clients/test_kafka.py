"""``millrace up --kafka apache``: clients of all kinds read records, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from millrace.bus import codec, subjects
from millrace.schemas.records import RequestRecord
from millrace.telemetry.kafka.apache.java import find_java
from tests.clients.packages import installed, need, python_packages
from tests.support.kafka import kafka_program, missing_tool
from tests.support.repository import example_of
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kafka,
    pytest.mark.slow(
        reason="a whole system with a JVM, and clients in Java; what starts it is tested in "
        "tests/telemetry/kafka and tests/cli/local/test_kafka_choice.py"
    ),
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing_tool() is not None, reason=f"{missing_tool()} is not installed"),
]

CLIENTS = Path(__file__).resolve().parent / "kafka"
NUM_EARLY, NUM_LATE = 6, 4
_KCAT = ("kcat", "librdkafka1", "libyajl2")


class Read(NamedTuple):
    """System with the ids of its early requests and of the requests after ``since_ms``."""

    system: System
    early: set[str]
    late: set[str]
    since_ms: int

    @property
    def arguments(self) -> tuple[str, str, str]:
        """The arguments of each client's program."""
        return self.system.endpoints["kafka"], subjects.REQUESTS_TOPIC, str(self.since_ms)


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The findings of a client: the keys from the beginning to the end, the messages ``before`` the
    time, groups, the members of the sink's group, and the topic's partitions."""

    keys: list[str]
    before: int
    end: int
    groups: list[str]
    members: int
    partitions: int


def ask(system: System, count: int) -> set[str]:
    """Have so many requests answered; their ids."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with httpx.Client(base_url=system.http, timeout=60.0, trust_env=False) as http:
        answers = [http.post("/v1/chat/completions", json=body) for _ in range(count)]
    assert [answer.status_code for answer in answers] == [200] * count
    return {str(answer.headers["x-request-id"]) for answer in answers}


def stored(system: System) -> set[str]:
    """The ids in the table of requests."""
    rows = system.sql("SELECT request_id FROM requests_once WHERE tenant != 'system'")
    return {str(row["request_id"]) for row in rows}


def wait_stored(system: System, ids: set[str], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ids <= stored(system):
        assert time.monotonic() < deadline, f"{len(ids - stored(system))} records are missing"
        time.sleep(0.2)


def started(folder: Path, kind: str) -> System:
    # The system follows no proxies here, and would fetch by them.
    kafka_program()
    arguments = ("--kafka", kind, "--engine", "simulated", "--port", "0")
    return System(folder, arguments=arguments).start()


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    system = started(tmp_path_factory.mktemp("kafka") / "ein dätä \\ ordner", "apache")
    early = ask(system, NUM_EARLY)
    wait_stored(system, early)
    since_ms = time.time_ns() // 1_000_000 + 1
    late = ask(system, NUM_LATE)
    wait_stored(system, late)
    yield Read(system, early, late, since_ms)
    assert system.stop() == 0
    assert (system.data / "kafka" / "data" / ".kafka_cleanshutdown").exists()


def run(command: Sequence[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def java_jars(version: str) -> Path:
    """The folder of kafka-clients of that version, and of a decoder of MessagePack."""
    need("mvn", "javac")
    copy = ("mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
    return installed(f"kafka-{version}", (CLIENTS / "pom.xml",), (*copy, f"-Dkafka={version}"))


def check(read: Read, answer: Answer) -> None:
    """All is there from the beginning; kills in other tests may have repeated some of it."""
    ours = [key for key in answer.keys if key in read.early | read.late]
    assert set(ours) == read.early | read.late
    assert len(answer.keys) == answer.end
    before = [key for key in answer.keys if key in read.early]
    assert NUM_EARLY <= len(before) <= answer.before < answer.end
    assert "millrace-sink" in answer.groups
    assert (answer.members, answer.partitions) == (1, 3)


@pytest.mark.parametrize("version", ["3.9.2", "4.3.1"])
def test_javas_own_client_reads(read: Read, version: str) -> None:
    jars = java_jars(version) / "jars"
    program = str(CLIENTS / "Reads.java")
    output = run((str(find_java()), "-cp", f"{jars}/*", program, *read.arguments))
    check(read, msgspec.json.decode(output, type=Answer))


def test_kafka_python_reads(read: Read) -> None:
    python = python_packages("kafka-python", "kafka-python==3.0.12") / "python"
    output = run((str(python), str(CLIENTS / "kafka_python_reads.py"), *read.arguments))
    check(read, msgspec.json.decode(output, type=Answer))


def test_confluent_kafka_reads(read: Read) -> None:
    output = run((sys.executable, str(CLIENTS / "confluent_reads.py"), *read.arguments))
    check(read, msgspec.json.decode(output, type=Answer))


def test_kcat_reads(read: Read) -> None:
    need("apt-get", "dpkg")
    unpack = ("sh", "-c", 'for package in *.deb; do dpkg -x "$package" .; done')
    folder = installed("kcat", (), ("apt-get", "download", "--quiet", *_KCAT), unpack)
    libraries = ":".join(str(path) for path in (folder / "usr" / "lib").glob("*-linux-gnu"))
    kcat = (str(folder / "usr" / "bin" / "kcat"), "-q", "-b", read.system.endpoints["kafka"])

    def kcat_says(*arguments: str) -> str:
        return run((*kcat, *arguments), LD_LIBRARY_PATH=libraries)

    output = kcat_says("-C", "-t", subjects.REQUESTS_TOPIC, "-o", "beginning", "-e", "-f", "%k\n")
    assert read.early | read.late <= set(output.split())
    since = f"s@{read.since_ms}"
    output = kcat_says("-C", "-t", subjects.REQUESTS_TOPIC, "-o", since, "-e", "-f", "%k\n")
    assert read.late <= set(output.split())
    assert not read.early & set(output.split())
    metadata: dict[str, Any] = json.loads(kcat_says("-L", "-J"))
    assert set(subjects.RECORD_TOPICS) <= {topic["topic"] for topic in metadata["topics"]}


def test_a_record_says_what_the_row_says(read: Read) -> None:
    """The values are MessagePack, which a client decodes without us."""
    code = (
        "import sys; from confluent_kafka import Consumer\n"
        "settings = {'bootstrap.servers': sys.argv[1], 'group.id': 'g',\n"
        "            'auto.offset.reset': 'earliest'}\n"
        "consumer = Consumer(settings); consumer.subscribe([sys.argv[2]])\n"
        f"for _ in range({NUM_EARLY}): print(consumer.poll(30).value().hex())\n"
        "consumer.close()"
    )
    output = run((sys.executable, "-c", code, *read.arguments[:2]))
    records = [codec.RECORD.decode(bytes.fromhex(line)) for line in output.split()]
    requests = [record for record in records if isinstance(record, RequestRecord)]
    assert len(requests) == NUM_EARLY
    rows = read.system.sql("SELECT request_id, completion_tokens, status FROM requests_once")
    tokens = {row["request_id"]: (int(row["completion_tokens"]), row["status"]) for row in rows}
    for request in requests:
        assert tokens[request.request_id] == (request.completion_tokens, request.status.value)


def lines_of(command: Sequence[str], count: int) -> list[str]:
    """Return the first lines of a program that does not end by itself."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        process.kill()
    return lines


def test_the_consumers_of_the_page_read(read: Read, tmp_path: Path) -> None:
    """The consumers of docs/kafka.md print each request once, with its fields."""
    python = tmp_path / "read_records.py"
    python.write_text(example_of("kafka.md", "A consumer in Python", "python"))
    java = tmp_path / "ReadRecords.java"
    java.write_text(example_of("kafka.md", "A consumer in Java", "java"))
    class_path = f"{java_jars('4.3.1') / 'jars'}/*"
    for command in (
        (sys.executable, str(python)),
        (str(find_java()), "-cp", class_path, str(java)),
    ):
        # One more is the request by which the start was tested.
        lines = lines_of((*command, read.arguments[0]), NUM_EARLY + NUM_LATE + 1)
        requests = [json.loads(line) for line in lines]
        ids = [request["request_id"] for request in requests if request["tenant"] != "system"]
        assert sorted(ids) == sorted(read.early | read.late)
        assert {request["status"] for request in requests} == {"done"}


async def test_a_kill_loses_nothing(read: Read) -> None:
    system = read.system
    ids = ask(system, 3)
    killed = system.kill("kafka")
    ids |= ask(system, 20)
    await eventually(lambda: system.pid("kafka") != killed, timeout_s=60)
    ids |= ask(system, 3)
    wait_stored(system, ids | read.early | read.late)
    [counted] = system.sql(
        "SELECT count() AS rows, uniqExact(request_id) AS ids FROM requests_once"
    )
    assert counted["rows"] == counted["ids"]


def test_a_folder_may_change_the_kind(tmp_path: Path) -> None:
    """A system reads the records of the earlier kind that may have no row yet."""
    ids: set[str] = set()
    for kind in ("embedded", "apache", "embedded"):
        system = started(tmp_path / "data", kind)
        ids |= ask(system, 5)
        if kind == "apache":
            wait_stored(system, ids)
        ids |= ask(system, 5)
        assert system.stop() == 0, system.output()
    system = started(tmp_path / "data", "apache")
    wait_stored(system, ids)
    assert len(stored(system)) == len(ids) == 30
    assert system.stop() == 0
