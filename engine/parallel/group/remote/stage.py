"""A stage of a group that is led from another host: its ranks, which are processes here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kernels.build import cpu_library
from millrace.engine.parallel.group.control_wire import JoinDevices, ToMember
from millrace.engine.parallel.group.members import MemberProcess, end_members
from millrace.engine.parallel.group.remote.checkpoint import CheckpointIdentity
from millrace.engine.parallel.group.remote.connection import Connection
from millrace.engine.parallel.group.remote.cpu_stage import CpuStage
from millrace.engine.parallel.group.remote.device_stage import DeviceStage
from millrace.engine.parallel.group.remote.relay import LinkEnds, RankEnd, Relay
from millrace.engine.parallel.group.remote.wire import Assignment
from millrace.engine.threads.choice import configure_threads, environment_of_rank
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError


class Slot(NamedTuple):
    """Where on this host a stage is computed: it has share ``number`` of ``num_slots`` of the
    cores and devices. ``path``: of the checkpoint; None: where it is at the worker."""

    path: Path | None
    number: int
    num_slots: int


class StageKind(Protocol):
    """What the stage's ranks are, CPUs or devices, makes a difference for. ``module``: that of
    their processes, None for the one of CPUs."""

    @property
    def module(self) -> str | None: ...

    def check(self, name: str) -> None:
        """Raise ConfigError if the stage of this name cannot be here."""

    def make_memory(self) -> list[int]:
        """The files of its memory, which the caller closes: before the rest."""

    def link_ends(self) -> LinkEnds:
        """What the relay of this host has."""

    def join_of(self, index: int) -> ToMember:
        """What a rank is to load, counted from 0 in the stage."""


class Stage:
    """What an assignment says, on this host. Raises MillraceError if it cannot be done here.

    ``start`` and ``wait`` for its end; ``close`` leaves nothing of it.
    """

    def __init__(self, connection: Connection, assignment: Assignment, slot: Slot) -> None:
        join = assignment.join
        path = Path(join.path) if slot.path is None else slot.path
        self._engine = join.config
        self._first_rank = join.rank
        self._slot = slot
        if join.rank % join.config.tensor_parallel:
            raise ConfigError(f"rank {join.rank} is not the first of a stage")
        self._connection = connection
        self._members: list[MemberProcess] = []
        self._relay: Relay | None = None
        _check_checkpoint(path, assignment)
        self._kind: StageKind = (
            DeviceStage(join, path, slot.number, connection)
            if isinstance(join, JoinDevices)
            else CpuStage(join, path)
        )
        self._kind.check(self.name)
        cpu_library()  # its memory is nothing without

    @property
    def name(self) -> str:
        """The stage, as a user counts them, and its ranks."""
        first, size = self._first_rank, self._engine.tensor_parallel
        ranks = f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"
        return f"stage {first // size} ({ranks})"

    def start(self) -> None:
        """Start the ranks, and carry what goes to them."""
        kind = self._kind
        self._connection.set_silence(self._engine.rank_timeout_s)
        fds = kind.make_memory()
        try:
            links = kind.link_ends()
            for rank, environment in enumerate(
                environments_of(self._engine, self._slot), self._first_rank
            ):
                process = MemberProcess(rank, tuple(fds), environment, module=kind.module)
                self._members.append(process)
        finally:
            for fd in fds:
                os.close(fd)
        for index, member in enumerate(self._members):
            member.send(kind.join_of(index))
        ends = [RankEnd(member.socket, member.how_it_ended) for member in self._members]
        self._relay = Relay(self._connection, links, ends)
        self._relay.start()

    def wait(self) -> str:
        """Until it has ended; why."""
        assert self._relay is not None, "it was started"
        self._relay.ended.wait()
        return self._relay.why

    def end(self, why: str) -> None:
        """For any thread."""
        if self._relay is not None:
            self._relay.end(why)

    def close(self) -> None:
        """End its ranks."""
        if self._relay is None:
            self._connection.close()
        else:
            self._relay.close()
        end_members(self._members)


def _check_checkpoint(path: Path, assignment: Assignment) -> None:
    """Raise ConfigError if it is not the worker's."""
    own = CheckpointIdentity.of(path)
    if own.fingerprint != assignment.fingerprint:
        what = "its weights are others"
    elif own.config_digest != assignment.config_digest:
        what = "its config.json is another"
    else:
        return
    raise ConfigError(
        f"{path} is not the checkpoint of the worker, {assignment.join.path}: {what}. "
        "Copy that one here, and name it with --model."
    )


def environments_of(
    engine: ResolvedEngineConfig, slot: Slot, environ: Mapping[str, str] = os.environ
) -> list[Mapping[str, str]]:
    """Those of the processes of a stage's ranks."""
    shared = dict(environ)
    here = EngineConfig(
        num_threads=engine.num_threads or 0,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=slot.num_slots,
    )
    configure_threads(here, shared=False, environ=shared)
    size = engine.tensor_parallel
    return [{**shared, **environment_of_rank(slot.number * size + index)} for index in range(size)]
