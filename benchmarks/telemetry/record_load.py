"""``python -m benchmarks.telemetry.record_load URL RATE``: publisher of records into the
outbox, like a running system, until SIGTERM.

Half are requests, half their deliveries, and one in a hundred is a worker's sample. At the end it
prints as JSON how many of each the outbox has accepted: numbers from 0 on, without a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop

from millrace.bus import nats
from millrace.bus.nats import NatsBus
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import KafkaConfig, NatsConfig
from millrace.schemas.records import DeliveryRecord, RequestRecord
from tests.support.kafka import KafkaBroker, missing_tool
from tests.support.servers import die_with_parent
from tests.telemetry.records import NOW_NS, delivery_record, request_record, worker_sample

CHOICES = ("apache", "embedded")


class Kafka(Protocol):
    """Kafka that can be killed and restarted."""

    forgets: bool

    @property
    def config(self) -> KafkaConfig: ...

    def start(self) -> None: ...

    def kill(self) -> None:
        """Kill it with ``kill -9``."""


class ApacheKafka(KafkaBroker):
    """Broker that restarts with its data, at the same address."""

    forgets = False

    @property
    def config(self) -> KafkaConfig:
        return KafkaConfig(bootstrap_servers=self.bootstrap_servers)


class EmbeddedKafkaProcess:
    """Embedded cluster, which restarts empty and at another address."""

    forgets = True

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._address = ""

    @property
    def config(self) -> KafkaConfig:
        return KafkaConfig(bootstrap_servers=self._address)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millrace.telemetry.kafka.embedded"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        self._address = self._process.stdout.readline().strip()
        if not self._address:
            raise RuntimeError("the embedded Kafka did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def available() -> list[str]:
    """Return the kinds that this machine can run."""
    return [name for name in CHOICES if name == "embedded" or missing_tool() is None]


@contextmanager
def running_kafka(name: str, directory: Path) -> Iterator[Kafka]:
    """Start a Kafka, and kill it at the end of the block."""
    kafka = EmbeddedKafkaProcess() if name == "embedded" else ApacheKafka(directory / "kafka")
    kafka.start()
    try:
        yield kafka
    finally:
        kafka.kill()


_TICK_S = 0.05
_AT_ONCE = 500
_SAMPLE_EVERY = 100
_MADE = 2_000


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Number of published records of each kind, and sums of their tokens and costs."""

    requests: int
    deliveries: int
    samples: int
    prompt_tokens: int
    cost: str


class RecordLoad:
    """Publisher in a separate process, which dies with this one."""

    def __init__(self, nats_url: str, rate: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.telemetry.record_load", nats_url, str(rate)],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def end(self) -> Published:
        """Stop the publisher; return all that it published. Raises RuntimeError if it failed."""
        self._process.terminate()
        out, _ = self._process.communicate(timeout=60.0)
        if self._process.returncode:
            raise RuntimeError("the records' publisher failed")
        return msgspec.json.decode(out, type=Published)


@contextlib.contextmanager
def record_load(nats_url: str, rate: float) -> Iterator[RecordLoad]:
    """Publish during the block, which must end the load."""
    load = RecordLoad(nats_url, rate)
    try:
        yield load
    finally:
        load._process.kill()
        load._process.wait()


class _Publisher:
    def __init__(self, bus: NatsBus, rate: float) -> None:
        self._bus = bus
        self._rate = rate
        # Made in advance, because making a record takes longer than sending it.
        self._requests = [request_record(number) for number in range(_MADE)]
        self._num_records = 0

    async def run(self, stopping: asyncio.Event) -> None:
        started_s = time.monotonic()
        while not stopping.is_set():
            due = int((time.monotonic() - started_s) * self._rate)
            # Records delayed by a stall of this process are sent gradually.
            numbers = range(self._num_records, min(due, self._num_records + _AT_ONCE))
            await asyncio.gather(*(self._publish(number) for number in numbers))
            self._num_records = max(self._num_records, numbers.stop)
            if len(numbers) < _AT_ONCE:
                await asyncio.sleep(_TICK_S)

    async def _publish(self, number: int) -> None:
        await self._bus.outbox.publish(
            self._request(number) if number % 2 == 0 else self._delivery(number)
        )
        if number % _SAMPLE_EVERY == 0:
            sample = worker_sample(number, sampled_ns=NOW_NS + number * 1_000_000)
            await self._bus.outbox.publish(sample)

    def _request(self, number: int) -> RequestRecord:
        made = self._requests[number // 2 % _MADE]
        return msgspec.structs.replace(made, request_id=f"load-{number // 2:09d}")

    def _delivery(self, number: int) -> DeliveryRecord:
        return msgspec.structs.replace(delivery_record(0), request_id=f"load-{number // 2:09d}")

    def published(self) -> Published:
        num_requests = (self._num_records + 1) // 2
        rounds, rest = divmod(num_requests, _MADE)
        sent = [*self._requests * rounds, *self._requests[:rest]]
        return Published(
            requests=num_requests,
            deliveries=self._num_records // 2,
            samples=-(-self._num_records // _SAMPLE_EVERY),
            prompt_tokens=sum(record.prompt_tokens for record in sent),
            cost=str(sum(record.cost for record in sent)),
        )


async def _run(nats_url: str, rate: float) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    bus = await nats.connect(NatsConfig(url=nats_url), "record load", part=Part.SCHEDULER)
    publisher = _Publisher(bus, rate)
    print("publishing", flush=True)
    await publisher.run(stopping)
    print(msgspec.json.encode(publisher.published()).decode(), flush=True)
    await bus.close()


if __name__ == "__main__":
    uvloop.run(_run(sys.argv[1], float(sys.argv[2])))
