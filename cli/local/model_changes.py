"""Models that are added to a running system, and removed from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.cli.local.control import AddModelRequest, ControlDone, ControlError, ModelReport
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
from millrace.cli.local.supervisor import StartError
from millrace.registry.catalogue import Catalogue, CatalogueEngine, ModelEntry, checked_name
from millrace.registry.rollouts.versions import check_label, split
from millrace.registry.served import ServedModel
from millrace.registry.source import resolve
from millrace.schemas.engines import EngineKind, check_quantization

if TYPE_CHECKING:
    from millrace.cli.local.live import LiveSystem

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
