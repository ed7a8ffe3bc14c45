"""Kafka and telemetry of a local system, started without delaying requests, and records of lost
worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from millrace.bus.api import Bus
from millrace.bus.worker_losses import cause_of_code, publish_loss
from millrace.cli.endpoints import Endpoints
from millrace.cli.local.live import SystemState
from millrace.cli.local.records.kafka_servers import KafkaServer
from millrace.cli.local.supervisor import Lost, Process, StartError, Supervisor
from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.schemas.config import Config
from millrace.schemas.control import WorkerStatus
from millrace.schemas.records import LossObserver, WorkerLossRecord

KAFKA, TELEMETRY = "kafka", "telemetry-1"
# Long, since other programs of a busy machine come first. It limits the start of a part that hangs;
# the end of a part's process is noticed at once.
START_TIMEOUT_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_SERVING = "Requests are served meanwhile, and their records wait in NATS"


class RecordKeeping:
    """Starter of ``kafka``, then ``telemetry``. It retries until both are up and reports failures.

    ``read_config`` and ``write_config`` access the file from which telemetry reads Kafka's address,
    ``write_endpoints`` writes the file for the command line. ``close`` ends the attempts; the
    supervisor owns the processes.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        system_state: SystemState,
        read_config: Callable[[], Config],
        write_config: Callable[[Config], None],
        write_endpoints: Callable[[Endpoints], None],
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._supervisor = supervisor
        self._system_state = system_state
        self._read_config = read_config
        self._write_config = write_config
        self._write_endpoints = write_endpoints
        self._clock = clock
        self._say = say
        self._tasks = Tasks()
        self._missing: str | None = KAFKA
        self._reason = ""
        self._is_late = False
        self._first_outcome = asyncio.Event()

    def start(self, kafka: KafkaServer, telemetry: Process) -> None:
        """Start in the background; return at once."""
        self._tasks.spawn(self._run(kafka, telemetry), "start telemetry")

    async def wait(self, timeout_s: float) -> None:
        """Wait until both are up, one has failed, or ``timeout_s`` have passed; in the last case
        they count as late."""
        await wait_or_sleep(self._first_outcome, self._clock, timeout_s)
        self._is_late = self._missing is not None

    async def close(self) -> None:
        """Stop starting parts."""
        await self._tasks.close()

    @property
    def why_not_ready(self) -> str:
        """Return why records are not kept yet, in a sentence; empty once they are kept."""
        if self._missing is None:
            return ""
        why = self._reason or f"{self._missing} is still starting"
        return f"Telemetry is not ready yet: {why}. {_SERVING}."

    async def _run(self, kafka: KafkaServer, telemetry: Process) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._start_all(kafka, telemetry)
                break
            except (StartError, OSError) as error:
                self._reason = str(error)
                self._first_outcome.set()
                self._say(f"{self.why_not_ready} It is started again in {pause_s:.0f} s.")
            await self._clock.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            assert self._missing is not None, "one of them failed"
            await self._supervisor.remove(self._missing)
        self._first_outcome.set()
        if self._reason or self._is_late:
            self._say("Telemetry is ready.")
        self._reason = ""

    async def _start_all(self, kafka: KafkaServer, telemetry: Process) -> None:
        if self._missing == KAFKA:
            await self._supervisor.start(self._process(kafka))
            self._tell_address(kafka)
            self._missing = TELEMETRY
        await self._supervisor.start(telemetry)
        self._missing = None

    def _process(self, kafka: KafkaServer) -> Process:
        async def follow() -> None:
            if kafka.address() != self._system_state.addresses[KAFKA]:
                self._tell_address(kafka)
                await self._supervisor.restart(TELEMETRY)

        return Process(
            name=KAFKA,
            command=kafka.command(),
            env=kafka.environment,
            ready=kafka.is_ready,
            before_start=kafka.prepare,
            on_restart=follow,
            start_timeout_s=START_TIMEOUT_S,
            niceness=kafka.niceness,
        )

    def _tell_address(self, kafka: KafkaServer) -> None:
        state, config = self._system_state, self._read_config()
        address = state.addresses[KAFKA] = kafka.address()
        self._write_config(msgspec.structs.replace(config, kafka=kafka.told(config.kafka)))
        if state.endpoints is not None:
            state.endpoints = msgspec.structs.replace(state.endpoints, kafka=address)
            self._write_endpoints(state.endpoints)


_CLOSE_TIMEOUT_S = 1.0


class WorkerLosses:
    """Recorder of ended worker processes. ``status_of`` returns the last status of a worker by
    name. Other processes, and workers without a status so far, have no record."""

    def __init__(self, status_of: Callable[[str], WorkerStatus | None]) -> None:
        self._status_of = status_of
        self._clock = SystemClock()
        self._tasks = Tasks()

    def note(self, bus: Bus, lost: Lost) -> None:
        """Record an ended process in the background; return at once."""
        status = self._status_of(lost.name)
        if status is None:
            return
        cause, detail = cause_of_code(lost.code, lost.oom_kills)
        loss = WorkerLossRecord(
            worker_id=status.worker_id,
            name=status.name,
            model=status.model,
            lost_ns=self._clock.now_ns(),
            cause=cause,
            observer=LossObserver.PROCESS_KEEPER,
            detail=detail,
            num_requests=status.num_running + status.num_waiting,
        )
        self._tasks.spawn(publish_loss(bus, self._clock, loss), "record a lost worker")

    async def close(self) -> None:
        """Wait a moment for records in flight."""
        await self._tasks.close(_CLOSE_TIMEOUT_S)
