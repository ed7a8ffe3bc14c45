"""Parts of the process on their own: supervision, the store's outages, the embedded Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from millrace.bus import subjects
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.runtime.faults.failures import keep_running
from millrace.schemas.config import ClickHouseConfig, Config, KafkaConfig
from millrace.telemetry.__main__ import open_service
from millrace.telemetry.kafka.kafka import ensure_topics, make_producer, stop_client
from millrace.telemetry.store.store import Store, StoreTakenError
from tests.support.manual_clock import ManualClock
from tests.support.servers import free_port
from tests.support.waiting import eventually
from tests.telemetry.moody import MoodyStore
from tests.telemetry.pipeline import count, dead_letters, running
from tests.telemetry.records import request_record
from tests.telemetry.stores import POLL_S

ROOT = Path(__file__).resolve().parents[2]


async def test_a_failed_part_starts_again_and_waits_longer_each_time() -> None:
    clock = ManualClock()
    starts: list[float] = []

    async def part() -> None:
        starts.append(clock.monotonic())
        if len(starts) < 5:
            raise OSError("away")

    task = asyncio.create_task(keep_running("part", part, clock))
    for _ in range(20):
        await clock.advance(0.5)
    await task
    waits = [round(b - a, 3) for a, b in itertools.pairwise(starts)]
    assert waits == [0.2, 0.4, 0.8, 1.6]


async def test_a_folder_that_a_command_reads_is_waited_for(tmp_path: Path) -> None:
    """The engine is not asked meanwhile, which would complain on its own."""
    (tmp_path / "status").write_text("PID: 1\n")
    clock = ManualClock()
    config = Config(clickhouse=ClickHouseConfig(path=str(tmp_path)))
    with (tmp_path / "status").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        opening = asyncio.create_task(open_service(config, clock))
        while clock.monotonic() < 40.0:
            await eventually(lambda: clock.num_sleepers == 1)
            await clock.advance(0.5)
        assert not opening.done()
        while clock.monotonic() < 50.0 and not opening.done():
            await eventually(lambda: clock.num_sleepers == 1 or opening.done())
            await clock.advance(0.5)
        with pytest.raises(StoreTakenError, match="another process has the store at"):
            await opening
    assert [one.name for one in tmp_path.iterdir()] == ["status"]


async def test_the_sink_waits_for_a_store_that_is_away(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    moody = MoodyStore.over(store)
    moody.away = True
    bus = MemoryBus(MemoryBroker())
    for number in range(50):
        await bus.outbox.publish(request_record(number))
    async with running(bus, moody, embedded_kafka):
        await eventually(lambda: moody.num_times_away >= 3, what="the sink tries again")
        assert await count(store) == 0
        moody.away = False

        async def landed() -> bool:
            return await count(store) == 50

        await eventually(landed, timeout_s=20, poll_s=POLL_S)


async def test_a_backlog_stays_in_the_outbox_while_the_embedded_kafka_would_drop_it(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    moody = MoodyStore.over(store)
    moody.away = True
    bus = MemoryBus(MemoryBroker())
    # A partition of the embedded cluster keeps 5 MB; these are eight for each, compressed.
    for number in range(3_000):
        record = msgspec.structs.replace(request_record(number), user=secrets.token_hex(10_000))
        await bus.outbox.publish(record)
    async with running(bus, moody, embedded_kafka) as service:
        # By then the bridge has sent all that it lets Kafka hold.
        await eventually(lambda: moody.num_times_away >= 4, what="the sink tries again")
        moody.away = False

        async def landed() -> bool:
            return await service.ledger.mark() == 3_000

        await eventually(landed, timeout_s=30, poll_s=POLL_S)
        assert service.sink.num_stored == 3_000, "none was dropped and replayed"
    assert await count(store) == 3_000


async def test_one_row_that_clickhouse_refuses_does_not_hold_up_the_others(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    moody = MoodyStore.over(store)
    moody.refused_id = request_record(13).request_id
    bus = MemoryBus(MemoryBroker())
    for number in range(40):
        await bus.outbox.publish(request_record(number))
    async with running(bus, moody, embedded_kafka) as service:

        async def settled() -> bool:
            return await service.ledger.mark() == 40

        await eventually(settled, timeout_s=20, poll_s=POLL_S)
    assert await count(store) == 39
    [message] = await dead_letters(embedded_kafka, 1)
    assert message.key == moody.refused_id.encode()
    assert dict(message.headers)["reason"] == b"refused for a test"


async def test_a_new_outbox_starts_a_new_ledger(store: Store, embedded_kafka: KafkaConfig) -> None:
    """NATS lost its disk: its sequences count from 1 again and must not pass for landed."""
    for seed, num_records in ((1, 30), (2, 10)):
        bus = MemoryBus(MemoryBroker())
        for number in range(num_records):
            await bus.outbox.publish(request_record(number, seed=seed))
        async with running(bus, store, embedded_kafka) as service:

            async def landed(wanted: int = num_records) -> bool:
                return await service.ledger.mark() == wanted

            await eventually(landed, timeout_s=20, poll_s=POLL_S)
    assert await count(store) == 40


def test_the_embedded_kafka_says_where_it_is_and_ends_when_told(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap"
    process = _start_kafka(file)
    assert process.stdout is not None
    printed = process.stdout.readline().strip()
    assert printed.startswith("127.0.0.1:")
    assert file.read_text().strip() == printed
    process.send_signal(signal.SIGTERM)
    assert process.wait(5.0) == 0


async def test_the_embedded_kafka_ends_under_its_clients(tmp_path: Path) -> None:
    process = _start_kafka(tmp_path / "bootstrap")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    kafka = KafkaConfig(bootstrap_servers=address)
    await ensure_topics(kafka)
    producer = make_producer(kafka)
    await producer.start()
    try:
        await producer.send_and_wait(subjects.REQUESTS_TOPIC, b"x")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5.0) == 0
    finally:
        process.kill()
        await stop_client(producer)


async def test_the_embedded_kafka_dies_with_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "bootstrap"
    script = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-m', 'millrace.telemetry.kafka.embedded',"
        f"'--write-bootstrap', {str(file)!r}]);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    await eventually(file.exists)
    parent.kill()
    parent.wait()
    await eventually(lambda: not _alive(child))


def test_a_bad_configuration_is_one_sentence_and_an_exit_code(tmp_path: Path) -> None:
    for settings, words, code in (
        ({"MILLRACE_CLICKHOUSE__PATH": str(tmp_path / "store")}, "password only", 2),
        (
            {
                "MILLRACE_CLICKHOUSE__PATH": str(tmp_path / "store"),
                "MILLRACE_CLICKHOUSE__SERVE_PORT": "0",
                "MILLRACE_CLICKHOUSE__PASSWORD": "secret",
                "MILLRACE_NATS__URL": f"nats://127.0.0.1:{free_port()}",
                "MILLRACE_NATS__CONNECT_TIMEOUT_S": "0.5",
            },
            "NATS",
            1,
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "millrace.telemetry"],
            env={**os.environ, **settings},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == code
        assert done.stderr.splitlines()[-1].startswith("telemetry: ")
        assert words.lower() in done.stderr.splitlines()[-1].lower()
        assert "Traceback" not in done.stderr


def _start_kafka(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millrace.telemetry.kafka.embedded", "--port-file", str(file)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def _alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return b"Z (zombie)" not in Path(f"/proc/{pid}/status").read_bytes()
    return False
