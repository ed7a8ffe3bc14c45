"""A scheduler on the in-memory bus in virtual time, with a client and workers to script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Self

import msgspec

from millrace.bus import codec
from millrace.bus.fleet.adapters import AdapterDirectory
from millrace.bus.fleet.directories import Directories, ReplyOwners
from millrace.bus.job_queue import TenantQueue
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.bus.subjects import untoken
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.bus.transport import Message
from millrace.registry.pricing import UNPRICED
from millrace.registry.routing.router import Router
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.jobs.model_cache import Preparer
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.config import NatsConfig, SchedulerConfig
from millrace.schemas.control import QueueStatus
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ContextLengthError, ModelNotFoundError, ParameterError
from millrace.schemas.frames import TERMINAL_FRAMES, Frame
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.models.adapters import Adapter
from millrace.schemas.records import RequestRecord
from millrace.schemas.sampling import SamplingParams
from millrace.schemas.tenants import TierLimits
from millrace.schemas.tools import ToolFormat
from tests.bus.fleet.memory_rollouts import MemoryRollouts, MemoryRolloutStore
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.support.manual_clock import ManualClock

CONTEXT_TOKENS = 1_000
TENANT_QUEUE = TenantQueue("m", Tier.FREE, "local")
CONFIG = SchedulerConfig(
    models=("m",), dispatch_timeout_s=0.25, resume_timeout_s=0.05, window_jobs_per_tenant=2
)
PRICES = msgspec.structs.replace(UNPRICED, version="v1", device_per_hour=Decimal(3600))
_STEP_S = 0.05


class FakeModel:
    """A byte is a token."""

    prices = PRICES
    tool_format: ToolFormat | None = None
    engine_kind = EngineKind.SIMULATED

    def with_chat_template(self, source: str) -> Self:
        return self

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        token_ids = job.prompt_token_ids or tuple((job.prompt or "").encode())
        if not token_ids:
            raise ParameterError("prompt", "prompt must not be empty")
        sampling = job.sampling
        wanted = sampling.max_tokens or 1
        if len(token_ids) + wanted > CONTEXT_TOKENS:
            raise ContextLengthError(len(token_ids), wanted, CONTEXT_TOKENS)
        seed = seed_source.getrandbits(32) if sampling.seed is None else sampling.seed
        return msgspec.structs.replace(
            job,
            prompt=None,
            prompt_token_ids=token_ids,
            sampling=msgspec.structs.replace(sampling, max_tokens=wanted, seed=seed),
        )


def load_fake(model: str) -> FakeModel:
    if model not in ("m", "m@v2", "small", "large"):
        raise ModelNotFoundError(f"no {model}")
    return FakeModel()


class FakeRunningRequests:
    """Fake of Redis's index of running requests."""

    def __init__(self) -> None:
        self.known: dict[str, RunningRequest] = {}
        self.claims: dict[str, JobClaim] = {}
        self.cancels: set[tuple[str, str]] = set()
        self.held: dict[str, dict[str, str]] = {}
        self.chosen: dict[str, tuple[str, str]] = {}
        self.adapters: dict[str, str] = {}

    async def lookup(self, request_id: str) -> RunningRequest | None:
        return self.known.get(request_id)

    async def note_cancels(self, tenant: str, request_ids: Sequence[str]) -> None:
        self.cancels.update((tenant, request_id) for request_id in request_ids)

    async def was_cancelled(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self.cancels

    async def has_ended(self, tenant: str, request_id: str) -> bool | None:
        claim, known = self.claims.get(request_id), self.known.get(request_id)
        if claim is None or claim.tenant != tenant:
            return None
        return known is not None and known.finished

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        if epoch == 0 and request_id in self.claims:
            return
        self.known[request_id] = RunningRequest(worker_id=worker_id, epoch=epoch, finished=True)

    async def claim(
        self, request_id: str, mine: JobClaim, *, is_new: bool, void_sequence: int = 0
    ) -> JobClaim | None:
        first = self.claims.get(request_id)
        if first is None and is_new and request_id in self.known:
            return JobClaim(sequence=0)
        if first is not None and first.sequence not in (mine.sequence, void_sequence):
            return first
        self.claims[request_id] = mine
        return None

    async def held_by(self, worker_id: str) -> dict[str, str]:
        return self.held.get(worker_id, {})

    async def settle_model(self, request_id: str, model: str, reason: str) -> tuple[str, str]:
        return self.chosen.setdefault(request_id, (model, reason))

    async def settle_adapter(self, request_id: str, version: str) -> str:
        return self.adapters.setdefault(request_id, version)


class KnownAdapters(AdapterDirectory):
    """Fake of Redis's adapters.

    ``offered`` has them by name and version, and the newest by name alone. While ``away`` is set,
    no adapter is found.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(None, clock)
        self.offered: dict[tuple[str, str], Adapter] = {}
        self.away = False

    def offer(self, adapter: Adapter) -> Adapter:
        self.offered[adapter.name, adapter.version] = self.offered[adapter.name, ""] = adapter
        return adapter

    async def version(self, name: str, version: str) -> Adapter | None:
        if self.away:
            raise RedisUnreachableError
        return self.offered.get((name, version))


class KnownTenants(ReplyOwners):
    """Fake of Redis's tenants: each of ``tenants`` has a record."""

    def __init__(self) -> None:
        super().__init__(None)
        self.tenants: set[str] = set()

    async def is_foreign(self, tenant: str, reply: str) -> bool:
        return await super().is_foreign(tenant, reply) or (
            tenant == "local" and reply in self.tenants
        )


def job(request_id: str, **changes: object) -> Job:
    """Make a job whose frames a ``World`` keeps."""
    tenant = changes.get("tenant", "local")
    fields: dict[str, object] = {
        "request_id": request_id,
        "model": "m",
        "prompt_token_ids": (1, 2, 3),
        "sampling": SamplingParams(max_tokens=16, seed=7),
        "reply": "client" if tenant == "local" else f"{tenant}/client",
    } | changes
    return Job(**fields)  # type: ignore[arg-type]


class World:
    """Schedulers, workers and a client in one event loop; ``until`` advances its time.

    With ``tiers`` each scheduler enforces these limits alone, as while Redis is unreachable.
    """

    def __init__(
        self,
        config: SchedulerConfig = CONFIG,
        load: Callable[[str], Preparer] = load_fake,
        models: tuple[str, ...] = ("m",),
        router: Router | None = None,
        orphan_grace_s: float = 0.0,
        tiers: TierLimits | None = None,
    ) -> None:
        self._orphan_grace_s = orphan_grace_s
        self.clock = ManualClock()
        self.adapters = KnownAdapters(self.clock)
        self.rollouts = MemoryRolloutStore()
        self.reply_owners = KnownTenants()
        self.broker = MemoryBroker(self.clock, NatsConfig())
        self.client = MemoryBus(self.broker)
        self.running_requests = FakeRunningRequests()
        self.frames: list[tuple[str, Frame]] = []
        self.statuses: list[QueueStatus] = []
        self.workers: list[ScriptedWorker] = []
        self.config = config
        self._load = load
        self._models = models
        self._router = router
        self._tiers = tiers
        self.schedulers: list[Scheduler] = []
        self._running: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def open(self) -> None:
        # At every listener that ``job`` names.
        self.broker.subscribe("tok.>", self._on_message)
        await self.client.control.subscribe_queue_status(self.statuses.append)
        await self.add_scheduler()

    def _on_message(self, message: Message) -> None:
        _, reply, request_id = map(untoken, message.subject.split("."))
        if reply.split("/")[-1] == "client":
            self.frames.append(
                (request_id, codec.FRAME.decode(message.payload, message.content_type))
            )

    async def add_scheduler(self) -> Scheduler:
        tiers = self._tiers
        limits = None if tiers is None else LimitKeeper(None, tiers, self.clock, remembers=True)
        scheduler = Scheduler(
            MemoryBus(self.broker),
            self.config,
            self.clock,
            ModelCatalogue(self._models, self._load, self._router),
            self.running_requests,
            limits=limits,
            directories=Directories(
                self.adapters, MemoryRollouts(self.rollouts, self.clock), self.reply_owners
            ),
        )
        scheduler.orphans.grace_s = self._orphan_grace_s
        for model in self._models:
            await scheduler.state.model_cache.get(model)
        stopping = asyncio.Event()
        self.schedulers.append(scheduler)
        self._running.append((stopping, asyncio.create_task(scheduler.run(stopping))))
        await self.until(scheduler.ready.is_set)
        return scheduler

    async def stop_scheduler(self, index: int = 0) -> None:
        stopping, task = self._running.pop(index)
        self.schedulers.pop(index)
        stopping.set()
        await task

    async def kill_scheduler(self, index: int = 0) -> None:
        """Kill a scheduler: it sends no message."""
        scheduler = self.schedulers.pop(index)
        _, task = self._running.pop(index)
        await scheduler.state.tasks.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def ended(self, index: int = 0) -> None:
        """Wait for a scheduler that ends by itself. Raises its error."""
        self.schedulers.pop(index)
        _, task = self._running.pop(index)
        await self.until(task.done)
        await task

    async def close(self) -> None:
        for worker in self.workers:
            if worker.alive:
                await worker.kill()
        while self.schedulers:
            await self.kill_scheduler()

    async def add_worker(
        self,
        name: str = "w",
        num_slots: int = 4,
        num_blocks: int = 1_000,
        max_tokens: int = 0,
        model: str = "m",
    ) -> ScriptedWorker:
        worker = ScriptedWorker(
            MemoryBus(self.broker),
            self.clock,
            name,
            model,
            num_slots=num_slots,
            num_blocks=num_blocks,
            max_tokens_per_request=max_tokens,
        )
        self.workers.append(worker)
        return await worker.start()

    async def until(self, predicate: Callable[[], bool], within_s: float = 30.0) -> None:
        """Advance virtual time until ``predicate`` holds. Raises AssertionError after ``within_s``
        s."""
        deadline_s = self.clock.monotonic() + within_s
        while not predicate():
            assert self.clock.monotonic() < deadline_s, "it did not come about"
            await self.pass_s(_STEP_S)

    async def pass_s(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    def records(self) -> list[RequestRecord]:
        outbox = self.broker.outbox
        return [
            msgspec.msgpack.decode(record.payload, type=RequestRecord)
            for record in outbox.messages()
            if record.subject == "rec.request"
        ]

    def record(self, request_id: str) -> RequestRecord | None:
        found = [record for record in self.records() if record.request_id == request_id]
        assert len(found) <= 1, "a request has one record"
        return found[0] if found else None

    def frames_of(self, request_id: str) -> list[Frame]:
        return [frame for owner, frame in self.frames if owner == request_id]

    def terminal(self, request_id: str) -> Frame | None:
        found = [f for f in self.frames_of(request_id) if isinstance(f, TERMINAL_FRAMES)]
        assert len(found) <= 1, "a request has one terminal frame"
        return found[0] if found else None

    @property
    def num_stored(self) -> int:
        """Jobs that the queue still has."""
        return len(self.broker.jobs)
