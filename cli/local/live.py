"""What commands ask of a system that runs: how it stands, and models that come and go."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from millrace.bus.api import Bus
from millrace.cli.endpoints import Endpoints
from millrace.cli.local.control import (
    AddModelRequest,
    ControlDone,
    ControlError,
    RemoveModelRequest,
    Request,
    StatusRequest,
    SystemReport,
)
from millrace.cli.local.model_changes import ModelChanges, StartingModels
from millrace.cli.local.models import KNOWN_FILE
from millrace.cli.local.report import health_at, part_reports
from millrace.cli.local.scrape_targets import ScrapeTargets
from millrace.cli.local.supervisor import Supervisor
from millrace.cli.local.worker_pool import WorkerPool
from millrace.registry.catalogue import load_catalogue
from millrace.registry.rollouts.versions import INITIAL, SEPARATOR, Versions
from millrace.registry.served import outline_of
from millrace.registry.source import resolve
from millrace.schemas.config import Config
from millrace.schemas.control import QueueStatus
from millrace.schemas.errors import shown
from millrace.schemas.frames import TERMINAL_FRAMES, Frame
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tenants import own_reply

# A catalogue is read again once a second.
_HEARD_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.1
# Gateways learn within a second that a version has no share any more; between two turns of an
# answer a tool of theirs may run.
_IDLE_FOR_S, _IDLE_WITH_TOOLS_S = 2.0, 30.0


@dataclass
class SystemState:
    """How far a system has come: ``starting``, ``running`` or ``stopping``; where it is reached,
    and where each of its parts listens (host:port, by name)."""

    phase: str = "starting"
    endpoints: Endpoints | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    bus: Bus | None = None


class LiveSystem:
    """Answers commands. The processes are the supervisor's, the workers the pool's."""

    def __init__(
        self,
        data: Path,
        config: Config,
        models: StartingModels,
        supervisor: Supervisor,
        targets: ScrapeTargets,
        workers: WorkerPool,
        system_state: SystemState,
        say: Callable[[str], None],
    ) -> None:
        self._data = data
        self._config = config
        self._supervisor = supervisor
        self._targets = targets
        self.system_state = system_state
        self._say = say
        self._began_s = time.monotonic()
        self._workers = workers
        self.changes = ModelChanges(data, models, self)

    async def handle(
        self, request: Request, say: Callable[[str], None]
    ) -> SystemReport | ControlDone:
        """Answer a command. Raises MillraceError to refuse it."""
        if isinstance(request, StatusRequest):
            return await self._report()
        if self.system_state.phase != "running":
            raise ControlError(f"the system is {self.system_state.phase}; try again when it runs")
        self._say(f"asked to {_wish(request)}")

        def tell(text: str) -> None:
            self._say(text)
            say(text)

        if isinstance(request, AddModelRequest):
            done = await self.changes.add(request, tell)
        else:
            done = await self.changes.remove(request.name, tell, when_idle=request.when_idle)
        self._say(done.text)
        return done

    async def start_workers(self, model: str, count: int) -> None:
        """Raises StartError, with none of them left."""
        await self._workers.start(model, count)

    async def stop_workers(self, model: str) -> int:
        """Let them drain; how many there were."""
        return await self._workers.stop(model)

    async def serve_one(self, model: str) -> None:
        """Raises TimeoutError if a first request is not answered."""
        assert self.system_state.bus is not None
        known = msgspec.structs.replace(
            self._config, catalogue=str(self._data / "run" / KNOWN_FILE)
        )
        pooling = probe_pooling(known, model)
        is_one_of_several = model in Versions(load_catalogue(known.catalogue).names()).models()
        # Its name stands for others as well, of which one may answer already.
        asked = f"{model}{SEPARATOR}{INITIAL}" if is_one_of_several else model
        await serve_one(self.system_state.bus, asked, pooling)

    async def wait_until_idle(self, model: str) -> None:
        """Until schedulers and workers have said for a while that no request of a model waits or
        runs; those that were accepted a moment before it was offered no more are counted by then.
        No longer than a request may take."""
        assert self.system_state.bus is not None
        idle = asyncio.Event()
        idle_for_s = _IDLE_WITH_TOOLS_S if self._config.gateway.tools else _IDLE_FOR_S
        idle_since_s: float | None = None

        def note(status: QueueStatus) -> None:
            nonlocal idle_since_s
            if status.model != model:
                return
            now_s = time.monotonic()
            is_idle = not status.num_queued and not self._workers.num_held(model)
            idle_since_s = (idle_since_s or now_s) if is_idle else None
            if idle_since_s is not None and now_s - idle_since_s >= idle_for_s:
                idle.set()

        heard = await self.system_state.bus.control.subscribe_queue_status(note)
        try:
            async with asyncio.timeout(self._config.gateway.request_timeout_s):
                await idle.wait()
        except TimeoutError:
            self._say(f"{model} has requests though none may take so long; going on")
        finally:
            await heard.close()

    async def wait_until_heard(self, part: str, model: str, *, is_there: bool) -> None:
        """Until all processes of ``part`` that are up know whether there is the model; those that
        are not read it when they start."""
        deadline = time.monotonic() + _HEARD_WITHIN_S
        waiting = {
            name: address
            for name, address in self._targets.addresses().items()
            if name.startswith(f"{part}-")
        }
        while waiting and time.monotonic() < deadline:
            for name, address in list(waiting.items()):
                health = await health_at(address)
                if not health.answers or (model in health.models) is is_there:
                    del waiting[name]
            await asyncio.sleep(_LOOK_EVERY_S if waiting else 0.0)
        if waiting:
            raise TimeoutError(f"{', '.join(waiting)} did not hear of the change")

    async def _report(self) -> SystemReport:
        parts = self._supervisor.parts()
        reports = await part_reports(
            parts, self._targets.addresses(), self.system_state.addresses, self._workers.status
        )
        workers = [one.model for one in reports if one.model and one.health == "ok"]
        autoscale = self._config.scheduler.autoscale
        may_rest = autoscale.is_on and not (autoscale.min_workers or autoscale.warm)
        return SystemReport(
            state=self.system_state.phase,
            pid=os.getpid(),
            up_s=time.monotonic() - self._began_s,
            addresses={}
            if self.system_state.endpoints is None
            else self.system_state.endpoints.shown(),
            parts=reports,
            models=self.changes.report(workers.count, may_rest=may_rest),
        )


def _wish(request: AddModelRequest | RemoveModelRequest) -> str:
    if isinstance(request, AddModelRequest):
        return f"add the model {shown(request.name)} ({shown(request.model)})"
    return f"remove the model {shown(request.name)}"


PROBE_TENANT = "system"
# For the first answer of a model, whose worker may still warm up.
_FIRST_ANSWER_S = 60.0


def probe_pooling(config: Config, model: str) -> Pooling | None:
    """Models that make no tokens are asked for an embedding or labels. Raises MillraceError."""
    entry = load_catalogue(config.catalogue).get(model)
    outline = outline_of(entry, resolve(entry))
    if outline.has_head:
        return None
    return Pooling.MEAN if outline.classifier is None else Pooling.CLASSIFY


async def serve_one(bus: Bus, model: str, pooling: Pooling | None) -> None:
    """One token, or what else the model makes, by the whole path: queue, scheduler, worker, frames.
    Raises TimeoutError."""
    request_id = f"probe-{os.getpid()}-{random.getrandbits(32):08x}"
    reply = own_reply(PROBE_TENANT, request_id)
    ended = asyncio.get_running_loop().create_future()

    def on_frame(_request_id: str, frame: Frame) -> None:
        if isinstance(frame, TERMINAL_FRAMES) and not ended.done():
            ended.set_result(frame)

    subscription = await bus.frames.subscribe(reply, on_frame)
    await bus.jobs.publish(
        Job(
            request_id=request_id,
            model=model,
            prompt="Hello",
            sampling=SamplingOptions(max_tokens=1),
            pooling=pooling,
            reply=reply,
            tenant=PROBE_TENANT,
            tier=Tier.ENTERPRISE,
        )
    )
    async with asyncio.timeout(_FIRST_ANSWER_S):
        await ended
    await subscription.close()
