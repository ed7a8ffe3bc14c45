"""Simulated run of a trace under one policy: the real scheduler on the in-memory bus."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.registry.pricing import UNPRICED
from millrace.runtime.virtual_time import VirtualClock, run_virtual
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.engines import EngineKind
from millrace.schemas.jobs import Job
from millrace.schemas.tools import ToolFormat
from millrace.simulation.client import Clients
from millrace.simulation.outcomes import (
    InterTokenLatencies,
    Outcomes,
    RequestOutcome,
    SimulatedGenerationIndex,
)
from millrace.simulation.settings import Policy, SimulationSettings
from millrace.simulation.traces.trace import Texts, TraceRequest
from millrace.simulation.workers.fleet import SimulatedFleet, WorkerIncarnation

# Time for the fleet's heartbeats before the first request.
LEAD_S = 2.0
_MAX_PAYLOAD_BYTES = 1 << 30


@dataclass
class Result:
    """Result of a run.

    ``outcomes`` are in the trace's order. ``incarnations`` lists every incarnation of a worker,
    with times from the trace's 0. The run ended at ``end_s``. ``streams_moved`` moved while their
    worker lived, by how the next worker got their context: ``pulled`` or ``computed``. The
    scheduler changed workers' roles ``num_role_changes`` times.
    """

    outcomes: list[RequestOutcome]
    incarnations: list[WorkerIncarnation]
    num_deaths: int
    end_s: float
    streams_moved: dict[str, int]
    num_pulled_tokens: int
    num_role_changes: int
    inter_token: InterTokenLatencies


class _AsIs:
    """Preparer for jobs that are already prepared. See ``scheduler.jobs.model_cache.Preparer``."""

    prices = UNPRICED
    tool_format: ToolFormat | None = None
    engine_kind = EngineKind.SIMULATED

    def with_chat_template(self, source: str) -> Self:  # noqa: ARG002
        return self

    def prepare(self, job: Job, seed_source: random.Random) -> Job:  # noqa: ARG002
        return job


def simulate(trace: Sequence[TraceRequest], settings: SimulationSettings, policy: Policy) -> Result:
    """Run a trace to its end; the result is the same for the same arguments."""
    return run_virtual(lambda clock: _simulate(clock, trace, settings, policy))


async def _simulate(
    clock: VirtualClock, trace: Sequence[TraceRequest], settings: SimulationSettings, policy: Policy
) -> Result:
    models = sorted({request.model for request in trace})
    texts = Texts(settings.seed)
    outcomes = Outcomes(_outcomes(trace, texts), clock, LEAD_S)
    nats = msgspec.structs.replace(settings.config.nats, max_stored_jobs=len(trace) + 1)
    broker = MemoryBroker(clock, nats, _MAX_PAYLOAD_BYTES)
    config = policy.configure(settings.config.scheduler)
    scheduler = Scheduler(
        MemoryBus(broker),
        msgspec.structs.replace(config, models=tuple(models)),
        clock,
        ModelCatalogue(models, lambda _: _AsIs()),
        SimulatedGenerationIndex(outcomes),
        limits=LimitKeeper(None, settings.config.gateway.tiers, clock, remembers=True),
    )
    stopping = asyncio.Event()
    spawned: dict[asyncio.Task[None], None] = {}
    async with asyncio.TaskGroup() as group:

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = group.create_task(work)
            spawned[task] = None
            task.add_done_callback(spawned.pop)
            return task

        scheduling = group.create_task(scheduler.run(stopping))
        await scheduler.ready.wait()
        bus = MemoryBus(broker)
        fleet = SimulatedFleet(bus, clock, settings, models, outcomes, spawn, LEAD_S)
        clients = Clients(bus, clock, outcomes, texts, policy, spawn)
        await clients.listen()
        await fleet.start()
        spawn(clients.send_all())
        with contextlib.suppress(TimeoutError):  # the rest counts as unfinished
            async with asyncio.timeout_at(LEAD_S + trace[-1].at_s + settings.drain_s):
                await clients.all_ended.wait()
        end_s = clock.monotonic()
        await fleet.close()
        stopping.set()
        await scheduling
        for task in list(spawned):
            task.cancel()
    for incarnation in fleet.incarnations:
        incarnation.count_from(LEAD_S, end_s)
    moves: Counter[str] = Counter()
    for model_queue in scheduler.model_queues.values():
        moves += model_queue.counts.moves
    return Result(
        list(outcomes),
        fleet.incarnations,
        fleet.num_deaths,
        end_s - LEAD_S,
        dict(moves),
        fleet.network.num_pulled_tokens,
        scheduler.roles.num_changes.total(),
        outcomes.inter_token,
    )


def _outcomes(trace: Sequence[TraceRequest], texts: Texts) -> list[RequestOutcome]:
    outcomes = []
    for number, request in enumerate(trace, start=1):
        request_id = f"r{number}"
        first = texts.first_answer_token(request, request_id)
        outcomes.append(RequestOutcome(request, request_id, first))
    return outcomes
