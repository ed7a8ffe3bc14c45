"""Real schedulers, workers and gateways' stream tables on one in-memory bus, in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import random
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import msgspec

from millrace.bus.memory import MemoryBroker
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.output_text import TextStream
from millrace.runtime.clock import Clock
from millrace.runtime.virtual_time import VirtualClock, VirtualTimeLoop
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.config import (
    EngineConfig,
    NatsConfig,
    SchedulerConfig,
    SimulationConfig,
    TierPolicies,
    TierPolicy,
    WorkerConfig,
)
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Job, Source
from millrace.workers.host.worker import Worker
from millrace.workers.process.keeper import EngineKeeper
from millrace.workers.simulated.engine import SimulatedEngine
from millrace.workers.simulated.tokens import SimulatedTokens, readable_token_ids
from tests.protocol.clients import Asked, Question
from tests.protocol.doubles import watch_for_doubles
from tests.protocol.gateways import Gateway
from tests.protocol.links import FaultyBus, IndexLink, SharedIndex
from tests.protocol.network import Weather
from tests.protocol.processes import Process, task_factory

MODEL = "demo"
_RECONNECT_S = 0.05
_ORPHAN_GRACE_S = 30.0

# In bad weather a dispatch takes longer than a scheduler waits for its answer.
_SCHEDULER = SchedulerConfig(
    models=(MODEL,),
    dispatch_timeout_s=0.3,
    resume_timeout_s=0.3,
    # No request is refused because Redis is unreachable, for any time.
    tiers=TierPolicies(
        enterprise=TierPolicy(weight=8.0),
        pro=TierPolicy(weight=4.0),
        free=TierPolicy(weight=1.0),
    ),
)
_WORKER = WorkerConfig(
    model=MODEL,
    max_num_waiting=1,
    replay_memory_s=1e6,
    engine=EngineConfig(
        kind=EngineKind.SIMULATED,
        simulation=SimulationConfig(prefill_tokens_per_s=5_000.0, step_ms=30.0),
        max_num_sequences=3,
        num_blocks=64,
    ),
)


class WorkerLife:
    """A worker's bus side and the engine that it has now. ``stopping`` is SIGTERM."""

    def __init__(self, process: Process, worker: Worker, engine: SimulatedEngine) -> None:
        self.process = process
        self.worker = worker
        self.engine = engine
        self.stopping = asyncio.Event()

    def running(self) -> list[str]:
        """Requests that the worker's engine runs."""
        batch = self.engine._batch
        sequences = [*batch.running, *batch.waiting]
        return [sequence.request_id.rpartition(":")[0] for sequence in sequences]


class SchedulerLife:
    """A scheduler. ``stopping`` is SIGTERM."""

    def __init__(self, process: Process, scheduler: Scheduler) -> None:
        self.process = process
        self.scheduler = scheduler
        self.stopping = asyncio.Event()


class System:
    """Simulated system in one event loop; ``pass_s`` advances its time.

    Each process has a name, under which its next incarnation starts: ``restarts_after_s`` after its
    death, or when ``start`` is called. ``wrongs`` lists the errors found so far.
    """

    def __init__(self, model: ServedModel, seed: int) -> None:
        self.model = model
        self.draw = random.Random(seed)
        self.weather = Weather()
        self.restarts_after_s: float | None = None
        self.wrongs: list[str] = []
        self.asked: dict[str, Asked] = {}
        self.workers: dict[str, WorkerLife] = {}
        self.schedulers: dict[str, SchedulerLife] = {}
        self.gateways: dict[str, Gateway] = {}
        self.index = SharedIndex()
        self.loop = VirtualTimeLoop()
        self.loop.set_task_factory(task_factory)
        self.clock: Clock = VirtualClock(self.loop)
        self.broker = MemoryBroker(self.clock, NatsConfig(ack_wait_s=6.0))
        self._lives: list[Process] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._tokens = SimulatedTokens(readable_token_ids(model.tokenizer))
        self._log = _ErrorLog(self.wrongs)
        logging.getLogger().addHandler(self._log)
        ids = (uuid.UUID(int=number << 96) for number in itertools.count(1))
        self._ids = mock.patch("millrace.workers.host.worker.uuid.uuid4", side_effect=ids)
        self._ids.start()
        self.errand(watch_for_doubles(self))

    # --- time ---

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    def pass_s(self, seconds: float) -> None:
        """Advance the time of all processes."""
        self.run(asyncio.sleep(seconds))

    def act(self, deed: Callable[[], object]) -> None:
        """Do something to the system, at once."""

        async def act() -> None:
            deed()

        self.run(act())

    def errand(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task outside the system."""
        task = self.loop.create_task(work, context=contextvars.Context())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    def close(self) -> None:
        """End everything."""
        self._ids.stop()
        logging.getLogger().removeHandler(self._log)
        self.run(self._reap())
        self.loop.close()

    async def _reap(self) -> None:
        for process in self._lives:
            process.on_death = _nothing
        for process in self._lives:
            await process.reap()
        errands = list(self._errands)
        for task in errands:
            task.cancel()
        await asyncio.gather(*errands, return_exceptions=True)

    # --- processes ---

    def processes(self) -> list[Process]:
        """List the live processes in a fixed order."""
        processes = [
            *(worker.process for worker in self.workers.values()),
            *(scheduler.process for scheduler in self.schedulers.values()),
            *(gateway.process for gateway in self.gateways.values()),
        ]
        return [process for process in processes if process.is_alive]

    def start(self, name: str) -> None:
        """Start the next incarnation of the process."""
        self.act(lambda: self._launch(name))

    def _launch(self, name: str) -> None:
        process = Process(name)
        self._lives.append(process)
        process.on_death = lambda: self._on_death(process)
        bus = FaultyBus(self.broker, process, self.clock, self.weather, self.draw)
        index = IndexLink(self.index, process, self.clock)
        launchers = {
            "worker": self._launch_worker,
            "scheduler": self._launch_scheduler,
            "gateway": self._launch_gateway,
        }
        launch = launchers[name.partition("-")[0]]
        process.do(lambda: launch(process, bus, index))

    def _launch_worker(self, process: Process, bus: FaultyBus, index: IndexLink) -> None:
        def make_engine() -> SimulatedEngine:
            return SimulatedEngine(self.model, config.engine, self.clock)

        async def replace_engine() -> SimulatedEngine:
            life.engine = make_engine()
            return life.engine

        config = msgspec.structs.replace(_WORKER, name=process.name)
        engine = make_engine()
        keeper = EngineKeeper(engine, replace_engine, self.clock)
        worker = Worker(bus, config, self.model, keeper, self.clock, index)
        worker.orphans.grace_s = _ORPHAN_GRACE_S
        life = self.workers[process.name] = WorkerLife(process, worker, engine)
        process.start(worker.run(life.stopping))

    def _launch_scheduler(self, process: Process, bus: FaultyBus, index: IndexLink) -> None:
        config = msgspec.structs.replace(_SCHEDULER, scheduler_id=process.name)
        catalogue = ModelCatalogue([MODEL], lambda _name: self.model)
        scheduler = Scheduler(bus, config, self.clock, catalogue, index)
        scheduler.orphans.grace_s = _ORPHAN_GRACE_S
        life = self.schedulers[process.name] = SchedulerLife(process, scheduler)
        process.start(scheduler.run(life.stopping))

    def _launch_gateway(self, process: Process, bus: FaultyBus, index: IndexLink) -> None:
        gateway = Gateway(process.name, process, bus, self.clock, index)
        self.gateways[process.name] = gateway
        process.start(gateway.run())

    def _on_death(self, process: Process) -> None:
        self._lose_clients(process.name)
        if self.restarts_after_s is not None:
            self.errand(self._restart(process.name, self.restarts_after_s))

    async def _restart(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self.lives(name):
            self._launch(name)

    def lives(self, name: str) -> bool:
        return any(process.name == name for process in self.processes())

    # --- requests ---

    def question(self, **fields: Any) -> Question:
        """Make a job with its expected answer."""
        source = Source.HTTP if fields.get("reply") else Source.NATS
        job = Job(model=MODEL, source=source, **fields)
        sampling = job.sampling
        assert sampling.seed is not None
        assert sampling.max_tokens is not None
        token_ids = tuple(
            self._tokens.draw(sampling.seed, index) for index in range(sampling.max_tokens)
        )
        stream = TextStream(self.model.tokenizer, sampling, job.prompt_token_ids or ())
        text = "".join(stream.push(token_id)[0] for token_id in token_ids) + stream.flush()
        return Question(job, token_ids, text)

    def ask(self, question: Question, gateway: str) -> None:
        """A client asks a gateway, or a service publishes by itself (no ``reply``)."""
        if not self.gateways[gateway].process.is_alive:
            return
        asked = Asked(question, gateway, gateway, self.wrongs)
        self.asked[asked.request_id] = asked
        self.errand(self._ask(asked))

    async def _ask(self, asked: Asked) -> None:
        gateway = self.gateways[asked.origin]
        is_for_client = bool(asked.question.job.reply)
        work = gateway.ask(asked) if is_for_client else gateway.publish(asked)
        asked.is_accepted = await self._done(gateway.process, work)
        asked.is_refused = not asked.is_accepted
        if asked.is_accepted and not gateway.process.is_alive:
            self._come_back_later(asked)

    async def _done(self, process: Process, work: Coroutine[Any, Any, None]) -> bool:
        """Return whether a process has completed the work and was told of its success."""
        task = process.spawn(work)
        await asyncio.wait({task})
        if task.cancelled():
            return False
        error = task.exception()
        if error is not None and not isinstance(error, MillraceError):
            self.wrongs.append(f"{process.name} failed: {error!r}")
        return error is None

    def cancel(self, asked: Asked) -> None:
        """Cancel the request as another client of its owner."""
        asked.may_be_cancelled = True

        gateway = self.draw.choice(list(self.gateways.values()))
        self.act(lambda: gateway.process.do(lambda: gateway.cancel(asked.request_id)))

    def leave(self, asked: Asked) -> None:
        """The client goes away for good."""
        if not asked.is_answered and asked.is_accepted:
            asked.may_be_cancelled = asked.has_left = True
            gateway = self.gateways[asked.holder]
            self.act(lambda: gateway.process.do(lambda: gateway.leave(asked)))

    def move(self, asked: Asked, gateway: str) -> None:
        """Disconnect the client and let it return at a gateway."""
        if asked.is_open:
            holder = self.gateways[asked.holder]
            self.act(lambda: holder.process.do(lambda: holder.disconnect(asked)))
            asked.forget_tail(self.draw.randint(0, 3))
            self._come_back_later(asked, gateway)

    def _lose_clients(self, name: str) -> None:
        for asked in self.asked.values():
            if asked.holder == name and asked.is_open:
                asked.forget_tail(self.draw.randint(0, 3))
                self._come_back_later(asked)

    def _come_back_later(self, asked: Asked, gateway: str = "") -> None:
        asked.num_moves += 1
        self.errand(self._come_back(asked, gateway, asked.num_moves))

    async def _come_back(self, asked: Asked, wanted: str, number: int) -> None:
        """Try gateways until one takes it."""
        is_back = False
        while not is_back:
            await asyncio.sleep(_RECONNECT_S)
            if not asked.is_open or asked.num_moves != number:
                return
            there = [
                name
                for name, gateway in self.gateways.items()
                if gateway.process.is_alive and not gateway.process.is_frozen
            ]
            if there:
                name = wanted if wanted in there else self.draw.choice(there)
                gateway = self.gateways[name]
                is_back = await self._done(gateway.process, gateway.resume(asked))

    def open_questions(self) -> Iterator[Asked]:
        return (asked for asked in self.asked.values() if asked.is_open)


def _nothing() -> None:
    """Do nothing: clients of a closed gateway do not return."""


class _ErrorLog(logging.Handler):
    """Log handler that counts errors as wrong, except errors about killed engines."""

    def __init__(self, wrongs: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrongs = wrongs

    def emit(self, record: logging.LogRecord) -> None:
        is_ours = record.name.startswith("millrace.")
        if is_ours and record.getMessage() != "a request killed two engines":
            self._wrongs.append(f"logged: {self.format(record)}")
