"""Worker on the in-memory bus, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from millrace.bus.codec import RECORD
from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.running_requests import RunningRequest as GenerationEntry
from millrace.bus.tenancy.settling import Settlement, Settlements
from millrace.engine.types import DeviceTime, EngineOutput, EngineRequest, EngineStats
from millrace.registry.catalogue import ModelEntry
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.pricing import PriceBook
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.runtime.clock import Clock
from millrace.schemas.config import EngineConfig, WorkerConfig
from millrace.schemas.control import Dispatch, WorkerCommand, WorkerReply, WorkerStatus
from millrace.schemas.engines import EngineKind
from millrace.schemas.frames import TERMINAL_FRAMES, Delta, FinishReason, Frame
from millrace.schemas.jobs import Job
from millrace.schemas.records import RequestRecord, WorkerSample
from millrace.schemas.sampling import SamplingParams
from millrace.workers.engine_like import EngineFailedError, EngineLike
from millrace.workers.host.worker import Worker
from millrace.workers.process.keeper import EngineKeeper
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually

EOS = 1
CONTEXT_WINDOW_TOKENS = 128
PRICES = PriceBook(
    version="v1",
    input_per_million=Decimal(1),
    cached_input_per_million=Decimal("0.5"),
    output_per_million=Decimal(2),
    device_per_hour=Decimal("0.05"),
)
GATEWAY = "gw"


def served_model(path: Path) -> ServedModel:
    """Return a model named ``demo`` with a byte-level tokenizer and no weights."""
    write_tokenizer(path, byte_level())
    tokenizer = Tokenizer.load(path)
    tokenizer.eos_token_ids = (EOS,)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT_WINDOW_TOKENS,
    )
    entry = ModelEntry(name="demo", source=str(path), prices=PRICES)
    return ServedModel(entry, path, config, tokenizer)


def line_of(job: Job) -> TenantQueue:
    """Return the tenant queue of a job that a gateway has published."""
    return TenantQueue.of(job, reserved=True)


class ScriptedEngine(EngineLike):
    """Engine whose outputs come when the test calls ``emit``.

    ``added`` and ``cancelled`` are the commands that it received, ``started`` the requests with
    output. It answers a cancel with the time in ``took_us``, unless it is ``silent``.
    """

    def __init__(self, num_devices: int = 1, max_num_sequences: int = 4) -> None:
        self.added: dict[str, EngineRequest] = {}
        self.cancelled: list[str] = []
        self.started: set[str] = set()
        super().__init__()
        self.num_devices = num_devices
        self._stats = EngineStats(
            max_num_sequences=max_num_sequences,
            num_blocks=100,
            num_free_blocks=100,
            max_tokens_per_request=1600,
        )
        self.took_us: dict[str, float] = {}
        self.silent = False
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @stats.setter
    def stats(self, stats: EngineStats) -> None:
        self._stats = stats

    def add(self, request: EngineRequest) -> None:
        self.added[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.tell, request_id)

    def tell(self, request_id: str, *, over: bool = True) -> None:
        """Report the device time of a request."""
        time = DeviceTime(request_id, 0, self.took_us.get(request_id, 0.0), over)
        self.on_device_times([time])

    async def wait_closed(self) -> str:
        return await self._closed

    async def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def fail(self, why: str) -> None:
        self._closed.set_result(why)

    def step(self, *outputs: EngineOutput, **stats: Any) -> None:
        """Report a step with these outputs."""
        steps = self.stats.num_steps + 1
        self.stats = msgspec.structs.replace(self.stats, num_steps=steps, **stats)
        self.started.update(output.request_id for output in outputs)
        self.on_outputs(list(outputs), self.stats)

    def emit(
        self, engine_id: str, token_ids: Sequence[int] = (), finish: FinishReason | None = None
    ) -> None:
        """Report a step with new tokens of one request."""
        self.step(
            EngineOutput(
                request_id=engine_id,
                token_ids=tuple(token_ids),
                finish_reason=finish,
                started=engine_id not in self.started,
            )
        )


class RecordingIndex:
    """Index that records its calls: see ``workers.host.leases``. ``known`` are its entries; while
    it is ``away``, it finds none."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.known: dict[str, GenerationEntry] = {}
        self.away = False

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None:
        del lease
        self.calls.append(("start", request_id, epoch))
        self._write(request_id, worker_id, epoch, finished=False)

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        self.calls.append(("finish", request_id, epoch))
        self._write(request_id, worker_id, epoch, finished=True)

    async def drop(self, request_id: str, worker_id: str) -> None:
        """Do nothing: leases are not asked for here."""

    async def lookup(self, request_id: str) -> GenerationEntry | None:
        return None if self.away else self.known.get(request_id)

    def _write(self, request_id: str, worker_id: str, epoch: int, *, finished: bool) -> None:
        known = self.known.get(request_id)
        if known is None or not (known.finished or known.epoch > epoch):
            self.known[request_id] = GenerationEntry(
                worker_id=worker_id, epoch=epoch, finished=finished
            )


class RecordingSettlements(Settlements):
    """Settlements with a Redis that takes everything."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock)
        self.made: list[Settlement] = []

    async def settle(self, settlement: Settlement) -> bool:
        self.made.append(settlement)
        return True


class Bench:
    """Worker with all its surroundings that a test looks at. ``engine`` is the running engine;
    ``no_restart``, if set, is the reason why no other engine can be started."""

    def __init__(
        self,
        model: ServedModel,
        config: WorkerConfig,
        num_devices: int = 1,
        orphan_grace_s: float = 0.0,
    ) -> None:
        self.clock = ManualClock()
        self.broker = MemoryBroker(self.clock)
        self.bus = MemoryBus(self.broker)
        self.peer = MemoryBus(self.broker)
        self.engine = ScriptedEngine(num_devices, config.engine.max_num_sequences)
        self.index = RecordingIndex()
        self.settlements = RecordingSettlements(self.clock)
        self.model = model
        self.no_restart = ""
        keeper = EngineKeeper(self.engine, self._restart, self.clock)
        self.worker = Worker(
            self.bus,
            config,
            model,
            keeper,
            self.clock,
            self.index,
            settlements=self.settlements,
        )
        self.worker.orphans.grace_s = orphan_grace_s
        self.stopping = asyncio.Event()
        self.run: asyncio.Task[None] | None = None
        self.frames: dict[str, list[Frame]] = {}
        self.envelopes: list[str] = []
        self.statuses: list[WorkerStatus] = []

    async def _restart(self) -> ScriptedEngine:
        if self.no_restart:
            raise EngineFailedError(self.no_restart)
        self.engine = ScriptedEngine(self.engine.num_devices, self.engine.max_num_sequences)
        return self.engine

    def job(self, request_id: str = "r1", **changes: Any) -> Job:
        sampling = {"max_tokens": 32, "temperature": 0.0, "seed": 7} | changes.pop("sampling", {})
        given: dict[str, Any] = {
            "model": "demo",
            "prompt_token_ids": (10, 11, 12),
            "reply": GATEWAY,
            "batch_frames": True,
            "received_ns": self.clock.now_ns(),
            "sampling": SamplingParams(**sampling),
        }
        return Job(request_id=request_id, **(given | changes))

    async def dispatch(
        self, job: Job | None = None, epoch: int = 1, lease: str = "", **changes: Any
    ) -> WorkerReply:
        """Dispatch a job; without a ``lease`` it is published and pulled for one."""
        job = job or self.job()
        return await self.command(
            Dispatch(job=job, epoch=epoch, lease=lease or await self.lease(job), **changes)
        )

    async def lease(self, job: Job) -> str:
        await self.peer.jobs.publish(job, reserved=True)
        while True:
            # Jobs whose lease has lapsed come first.
            (leased,) = await self.peer.jobs.pull(line_of(job), 1, 0.0)
            if leased.job.request_id == job.request_id:
                return leased.lease

    async def command(self, command: WorkerCommand) -> WorkerReply:
        reply = await self.peer.control.command(self.worker.worker_id, command, 1.0)
        assert reply is not None, "the worker did not answer"
        return reply

    async def num_queued(self) -> int:
        """Return the number of jobs in the queue, held or not."""
        return sum((await self.peer.jobs.tenant_queues()).values())

    def on_frame(self, request_id: str, frame: Frame) -> None:
        self.frames.setdefault(request_id, []).append(frame)

    def of(self, request_id: str = "r1") -> list[Frame]:
        return self.frames.get(request_id, [])

    def kinds(self, request_id: str = "r1") -> list[str]:
        return [type(frame).__name__ for frame in self.of(request_id)]

    def deltas(self, request_id: str = "r1") -> list[Delta]:
        return [frame for frame in self.of(request_id) if isinstance(frame, Delta)]

    def text(self, request_id: str = "r1") -> str:
        return "".join(delta.text for delta in self.deltas(request_id))

    async def settle(self, seconds: float = 0.0) -> None:
        """Let ``seconds`` pass, with everything that is due."""
        await self.clock.advance(seconds)

    async def ended(self, request_id: str = "r1") -> Frame:
        """Wait until the request is over and its lease is acknowledged; return the terminal
        frame."""
        await eventually(
            lambda: (
                bool(self.of(request_id)) and isinstance(self.of(request_id)[-1], TERMINAL_FRAMES)
            )
        )
        await eventually(lambda: self.worker.requests.num_ending == 0)
        return self.of(request_id)[-1]

    async def records(self) -> list[RequestRecord]:
        pulled = await self.peer.outbox.pull(1000, 0.0)
        items = [RECORD.decode(message.payload) for message in pulled]
        return [item for item in items if isinstance(item, RequestRecord)]

    async def samples(self) -> list[WorkerSample]:
        pulled = await self.peer.outbox.pull(1000, 0.0)
        items = [RECORD.decode(message.payload) for message in pulled]
        return [item for item in items if isinstance(item, WorkerSample)]

    async def stop(self) -> None:
        """Ask the worker to end, and let time pass until it has ended."""
        assert self.run is not None
        self.stopping.set()
        while not self.run.done():
            await self.clock.advance(0.1)
        await self.run


@asynccontextmanager
async def bench(model: ServedModel, **settings: Any) -> AsyncIterator[Bench]:
    """Run a worker that serves; it is stopped at the end unless the test did so."""
    num_devices = settings.pop("num_devices", 1)
    orphan_grace_s = settings.pop("orphan_grace_s", 0.0)
    kind = settings.pop("kind", EngineKind.REAL)
    engine = EngineConfig(kind=kind, max_num_sequences=settings.pop("max_num_sequences", 4))
    config = WorkerConfig(engine=engine, **settings)
    one = Bench(model, config, num_devices, orphan_grace_s)
    await one.peer.frames.subscribe(GATEWAY, one.on_frame)
    await one.peer.workers.watch(one.statuses.append)
    # A broker that hears the number of messages, to see what was batched.
    one.broker.subscribe(f"tok.{GATEWAY}.>", lambda message: one.envelopes.append(message.subject))
    one.run = asyncio.create_task(one.worker.run(one.stopping))
    await asyncio.wait_for(one.worker.ready.wait(), 5.0)
    try:
        yield one
    finally:
        if not one.run.done():
            await one.stop()
