"""Commands to a running system: its state, and models to add or remove."""

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
    engine_message,
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

# Processes read the catalogue again once a second.
_HEARD_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.1
# Gateways learn within a second that a version has no share of the traffic any more. Between two
# rounds of an answer one of their tools may run.
_IDLE_FOR_S, _IDLE_WITH_TOOLS_S = 2.0, 30.0


@dataclass
class SystemState:
    """State of a system: its phase (``starting``, ``running`` or ``stopping``), its endpoints, and
    the address of each part (host:port, by name)."""

    phase: str = "starting"
    endpoints: Endpoints | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    bus: Bus | None = None


class LiveSystem:
    """Handler of commands. The supervisor owns the processes, the pool the workers."""

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
        """Start workers of a model. Raises StartError after stopping all of them."""
        await self._workers.start(model, count)

    async def stop_workers(self, model: str) -> int:
        """Drain and stop the workers of a model; return their number."""
        return await self._workers.stop(model)

    async def serve_one(self, model: str) -> None:
        """Send a first request to a model. Raises TimeoutError if it is not answered."""
        assert self.system_state.bus is not None
        known = msgspec.structs.replace(
            self._config, catalogue=str(self._data / "run" / KNOWN_FILE)
        )
        pooling = probe_pooling(known, model)
        is_one_of_several = model in Versions(load_catalogue(known.catalogue).names()).models()
        # The plain name also stands for other versions, which may already answer.
        asked = f"{model}{SEPARATOR}{INITIAL}" if is_one_of_several else model
        await serve_one(self.system_state.bus, asked, pooling)

    async def wait_until_idle(self, model: str) -> None:
        """Wait until schedulers and workers report for a while that the model has no waiting or
        running request.

        Requests accepted just before the model was withdrawn are counted by then. Waits at most for
        the timeout of a request.
        """
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
            self._say(f"{model} still has requests after the longest timeout; continuing")
        finally:
            await heard.close()

    async def wait_until_heard(self, part: str, model: str, *, is_there: bool) -> None:
        """Wait until all running processes of ``part`` know whether the model exists. Processes
        that start later read it at their start."""
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
            raise TimeoutError(f"{', '.join(waiting)} did not read the new catalogue")

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
# Timeout of the first answer of a model, whose worker may still warm up.
_FIRST_ANSWER_S = 60.0


def probe_pooling(config: Config, model: str) -> Pooling | None:
    """Return the pooling of a probe request for models that make no tokens. Raises
    MillraceError."""
    entry = load_catalogue(config.catalogue).get(model)
    outline = outline_of(entry, resolve(entry))
    if outline.has_head:
        return None
    return Pooling.MEAN if outline.classifier is None else Pooling.CLASSIFY


async def serve_one(bus: Bus, model: str, pooling: Pooling | None) -> None:
    """Request one token, embedding or set of labels on the full path: queue, scheduler, worker,
    frames.

    Raises TimeoutError.
    """
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
    """Models of a starting system: ``known`` is the catalogue for lookups, ``entries`` are the
    served models, ``engine`` runs every model without an engine of its own."""

    known: Catalogue
    entries: Mapping[str, ModelEntry]
    saved: SavedModels
    engine: CatalogueEngine | None = None
    workers: int = 1


class ModelChanges:
    """Changes of the served models, one at a time; a failed change leaves everything as it was.

    Gateways offer a model after a worker has answered for it, and workers stop when no gateway
    offers it any more. Schedulers know it before the first and after the last gateway, so no
    accepted request is refused. Requests that still wait when the workers are gone are ended by the
    schedulers.
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
        """Return the initial number of workers of a model."""
        return self._workers[model]

    def runs_by_itself(self, model: str) -> bool:
        """Return whether the model has its own engine setting."""
        added = self._saved.added.get(model)
        return added is not None and added.own_engine

    def write(self) -> None:
        """Write both catalogues, which starting parts read."""
        self._write_served()
        self._write_known()

    async def add(self, request: AddModelRequest, say: Say) -> ControlDone:
        """Add a model. Raises MillraceError if it cannot be added; nothing has changed then."""
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
            if message := engine_message(entry):
                say(message)
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
        """Remove a model; with ``when_idle`` its workers stay until no request waits for them.

        Raises ControlError if there is no such model, or if it is the only one.
        """
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
                say(f"gateways accept no more requests for {name}; waiting for its open requests")
                await self._host.wait_until_idle(name)
            say(f"gateways accept no more requests for {name}; its workers drain")
            count = await self._host.stop_workers(name)
            del self._workers[name]
            self._passing = None
            self._write_known()
            await self._have_heard("scheduler", name, say, is_there=False)
        return ControlDone(f"{name} is removed; {_count(count, 'worker')} drained")

    def report(
        self, num_workers: Callable[[str], int], *, may_rest: bool
    ) -> tuple[ModelReport, ...]:
        """Report all models, also a model that is being added or removed.

        With ``may_rest``, a model without workers is at rest, because it has no requests.
        """
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
        """Return the model under its name, and whether it has its own engine setting."""
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
        """Wait until the processes have read the change; a process that hangs is skipped after a
        timeout."""
        try:
            await self._host.wait_until_heard(part, name, is_there=is_there)
        except TimeoutError as error:
            say(f"{error}; continuing without")

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
