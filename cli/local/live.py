"""What commands ask of a system that runs: how it stands, and models that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from millrace.bus.api import Bus
from millrace.cli.endpoints import Endpoints
from millrace.cli.local.control import (
    AddModelRequest,
    ControlDone,
    ControlError,
    ModelReport,
    RemoveModelRequest,
    Request,
    StatusRequest,
    SystemReport,
)
from millrace.cli.local.machine_memory import check_memory
from millrace.cli.local.models import (
    KNOWN_FILE,
    SERVED_FILE,
    AddedModel,
    SavedModels,
    run_by,
    with_removed,
    write_saved,
)
from millrace.cli.local.report import health_at, part_reports
from millrace.cli.local.scrape_targets import ScrapeTargets
from millrace.cli.local.supervisor import StartError, Supervisor
from millrace.cli.local.worker_pool import WorkerPool
from millrace.registry.catalogue import (
    Catalogue,
    CatalogueEngine,
    ModelEntry,
    checked_name,
    load_catalogue,
)
from millrace.registry.rollouts.versions import INITIAL, SEPARATOR, Versions, check_label, split
from millrace.registry.served import ServedModel, outline_of
from millrace.registry.source import resolve
from millrace.schemas.config import Config
from millrace.schemas.control import QueueStatus
from millrace.schemas.engines import EngineKind, check_quantization
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


Say = Callable[[str], None]


@dataclass(frozen=True)
class StartingModels:
    """What a system begins with: ``known`` is what models are looked up in, ``entries`` are those
    that it serves, ``engine`` runs whatever does not say otherwise."""

    known: Catalogue
    entries: Mapping[str, ModelEntry]
    saved: SavedModels
    engine: CatalogueEngine | None = None
    workers: int = 1


class ModelChanges:
    """One change at a time; one that fails leaves everything as it was.

    A model is offered by the gateways after a worker has answered for it, and workers stop when no
    gateway offers it any more. Schedulers know it from before the first moment until after the
    last, so no request of it is refused that a gateway has accepted; what still waits when the
    workers are gone is ended by them.
    """

    def __init__(self, data: Path, models: StartingModels, host: LiveSystem) -> None:
        self._data = data
        self._known = models.known
        self._served = dict(models.entries)
        self._engine = models.engine
        self._saved = models.saved
        self._workers = {
            name: models.saved.added[name].workers if name in models.saved.added else models.workers
            for name in models.entries
        }
        self._host = host
        self._changing: tuple[str, ModelEntry] | None = None
        self._passing: ModelEntry | None = None  # known to schedulers and workers, not offered

    def num_workers(self, model: str) -> int:
        """How many a model starts with."""
        return self._workers[model]

    def runs_by_itself(self, model: str) -> bool:
        """Whether what runs it is said of this model alone."""
        added = self._saved.added.get(model)
        return added is not None and added.own_engine

    def write(self) -> None:
        """Write both catalogues, for parts that start."""
        self._write_served()
        self._write_known()

    async def add(self, request: AddModelRequest, say: Say) -> ControlDone:
        """Raises MillraceError if it cannot be; nothing has changed then."""
        if request.workers < 1:
            raise ControlError("--workers must be at least 1")
        name = checked_name(request.name)
        check_label(name)
        if name in self._served or {name, split(name)[0]} & self._known.routes.keys():
            raise ControlError(
                f"the name {name} is taken; choose another, or first run: millrace models remove "
                f"{name}"
            )
        raw, own_engine = self._entry(request)
        entry = raw if own_engine else run_by(raw, self._engine)
        with self._change("adding", entry):
            say(f"reading {entry.source}")
            await asyncio.to_thread(ServedModel.load, Catalogue({name: entry}), name)
            if entry.engine_kind is EngineKind.REAL:
                path = await asyncio.to_thread(resolve, entry)
                check_memory(path, request.workers)
            self._passing = entry
            added = AddedModel(entry=raw, workers=request.workers, own_engine=own_engine)
            before = self._saved
            self._saved = _with_added(before, name, added)
            try:
                await self._bring_up(name, request.workers, say)
            except asyncio.CancelledError:
                raise  # the system stops, and writes its catalogues anew when it starts
            except Exception as error:
                self._saved = before
                await self._give_up(name)
                if isinstance(error, StartError | OSError | TimeoutError):
                    why = str(error) or "a first request was not answered in time"
                    raise ControlError(f"{name} was not added: {why}") from error
                raise
            self._served[name] = entry
            self._workers[name] = request.workers
            self._write_served()
            await self._have_heard("gateway", name, say, is_there=True)
            write_saved(self._data, self._saved)
        return ControlDone(f"{name} is served, by {_count(request.workers, 'worker')}")

    async def remove(self, name: str, say: Say, *, when_idle: bool = False) -> ControlDone:
        """With ``when_idle`` its workers stay until nothing waits for them. Raises ControlError if
        there is no such model, or no other."""
        entry = self._served.get(name)
        if entry is None:
            raise ControlError(f"there is no model {name!r}. Models: {', '.join(self._served)}")
        if len(self._served) == 1:
            raise ControlError(
                f"{name} is the only model; add another one first, or stop the system with "
                "millrace down"
            )
        with self._change("removing", entry):
            self._passing = entry
            del self._served[name]
            self._write_served()
            self._saved = with_removed(self._saved, name)
            write_saved(self._data, self._saved)
            await self._have_heard("gateway", name, say, is_there=False)
            if when_idle:
                say(f"no gateway takes requests for {name} any more; waiting for those it has")
                await self._host.wait_until_idle(name)
            say(f"no gateway takes requests for {name} any more; its workers drain")
            count = await self._host.stop_workers(name)
            del self._workers[name]
            self._passing = None
            self._write_known()
            await self._have_heard("scheduler", name, say, is_there=False)
        return ControlDone(f"{name} is removed; {_count(count, 'worker')} drained")

    def report(
        self, num_workers: Callable[[str], int], *, may_rest: bool
    ) -> tuple[ModelReport, ...]:
        """All models, and the one that comes or goes. ``may_rest``: a model without requests has
        no worker."""
        entries = dict(self._served)
        unserved = "at rest" if may_rest else "no worker"
        changing = {}
        if self._changing is not None:
            what, entry = self._changing
            entries.setdefault(entry.name, entry)
            changing[entry.name] = "starting" if what == "adding" else "stopping"
        return tuple(
            ModelReport(
                name=name,
                source=entry.source,
                engine=str(entry.engine_kind),
                state=changing.get(name) or ("serving" if num_workers(name) else unserved),
                workers=num_workers(name),
                added=name in self._saved.added,
            )
            for name, entry in entries.items()
        )

    def _entry(self, request: AddModelRequest) -> tuple[ModelEntry, bool]:
        """The model under its name; whether it is run by itself, whatever runs the others."""
        entry = msgspec.structs.replace(self._known.entry_for(request.model), name=request.name)
        if request.quantization is not None:
            check_quantization(request.quantization, request.engine or entry.engine_kind)
            entry = msgspec.structs.replace(entry, quantization=request.quantization)
        if request.engine is None:
            return entry, False
        engine = CatalogueEngine(
            kind=request.engine,
            url=request.engine_url,
            command=request.engine_command,
            arguments=request.engine_arguments,
        )
        return msgspec.structs.replace(entry, engine=engine), True

    async def _bring_up(self, name: str, count: int, say: Say) -> None:
        self._write_known()
        await self._host.wait_until_heard("scheduler", name, is_there=True)
        say(f"starting {_count(count, 'worker')}")
        await self._host.start_workers(name, count)
        say("sending a first request")
        await self._host.serve_one(name)

    async def _have_heard(self, part: str, name: str, say: Say, *, is_there: bool) -> None:
        """As far as they hear at all: one that hangs holds nobody up."""
        try:
            await self._host.wait_until_heard(part, name, is_there=is_there)
        except TimeoutError as error:
            say(f"{error}; going on without")

    async def _give_up(self, name: str) -> None:
        self._passing = None
        await self._host.stop_workers(name)
        self._write_known()

    @contextlib.contextmanager
    def _change(self, what: str, entry: ModelEntry) -> Iterator[None]:
        if self._changing is not None:
            now, other = self._changing
            raise ControlError(f"the system is {now} {other.name}; try again when that is done")
        self._changing = (what, entry)
        try:
            yield
        finally:
            self._changing = self._passing = None

    def _write_served(self) -> None:
        self._known.only(self._served).write(self._data / "run" / SERVED_FILE)

    def _write_known(self) -> None:
        entries = dict(self._served)
        if self._passing is not None:
            entries[self._passing.name] = self._passing
        self._known.only(entries).write(self._data / "run" / KNOWN_FILE)


def _with_added(saved: SavedModels, name: str, added: AddedModel) -> SavedModels:
    return SavedModels(
        added={**saved.added, name: added},
        removed=tuple(one for one in saved.removed if one != name),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
