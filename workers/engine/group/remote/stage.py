"""A stage of a group that is led from another host: its ranks, which are processes here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.runtime.process import available_bytes
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.engine.group.control_wire import Join
from millrace.workers.engine.group.making import make_link, shard_of
from millrace.workers.engine.group.members import MemberProcess, end_members
from millrace.workers.engine.group.remote import wire
from millrace.workers.engine.group.remote.checkpoint import CheckpointIdentity
from millrace.workers.engine.group.remote.connection import Connection
from millrace.workers.engine.group.remote.relay import LinkEnds, RankEnd, Relay
from millrace.workers.engine.group.remote.wire import Assignment
from millrace.workers.engine.kv.cache import block_bytes, cache_dtype
from millrace.workers.engine.threads.choice import configure_threads, environment_of_rank
from millrace.workers.kernels.build import cpu_library
from millrace.workers.kernels.ranks import RankShape, rank_memory
from millrace.workers.kernels.stage_link import link_memory
from millrace.workers.models.shard import shard_config

_MIB = 1 << 20


class Stage:
    """What an assignment says, on this host. Raises MillraceError if it cannot be done here.

    ``start`` and ``wait`` for its end; ``close`` leaves nothing of it.
    """

    def __init__(self, connection: Connection, assignment: Assignment, path: Path | None) -> None:
        """``path``: where the checkpoint is here; None: where it is at the worker."""
        join = assignment.join
        self._path = Path(join.path) if path is None else path
        self._join = join
        self._number, own = divmod(join.rank, join.config.tensor_parallel)
        if own:
            raise ConfigError(f"rank {join.rank} is not the first of a stage")
        self._connection = connection
        self._members: list[MemberProcess] = []
        self._relay: Relay | None = None
        self._check_checkpoint(assignment)
        self._check_memory()
        cpu_library()  # its memory is nothing without

    @property
    def name(self) -> str:
        """The stage, as a user counts them, and its ranks."""
        first, size = self._join.rank, self._join.config.tensor_parallel
        ranks = f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"
        return f"stage {self._number} ({ranks})"

    def start(self, environments: list[Mapping[str, str]]) -> None:
        """Start the ranks, each in its environment, and carry what goes to them."""
        join, number = self._join, self._number
        connection = self._connection
        connection.set_silence(join.config.rank_timeout_s)
        connection.limits = wire.computing(join.link_shapes[number - 1].part_bytes)
        local, fds = self._with_memory(join)
        try:
            links = LinkEnds(
                make_link(local, number, index=0),
                num_writers=join.link_shapes[number].num_writers,
                targets=[make_link(local, number - 1, index=0)],
            )
            for rank, environment in enumerate(environments, join.rank):
                self._members.append(MemberProcess(rank, tuple(fds), environment))
        finally:
            for fd in fds:
                os.close(fd)
        for member in self._members:
            member.send(msgspec.structs.replace(local, rank=member.rank))
        ends = [RankEnd(member.socket, member.how_it_ended) for member in self._members]
        self._relay = Relay(connection, links, ends)
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

    def _with_memory(self, join: Join) -> tuple[Join, list[int]]:
        """The files of the stage's memory, and what is to be loaded with these."""
        engine, number = join.config, self._number
        size = engine.tensor_parallel
        links = {at: link_memory(join.link_shapes[at]) for at in (number - 1, number)}
        fds = list(links.values())
        ranks: dict[int, int] = {}
        if size > 1:
            shape = RankShape(size, join.message_bytes, join.buffer_bytes)
            ranks[number] = rank_memory(shape)
            fds.append(ranks[number])
        stages = range(engine.pipeline_parallel)
        local = msgspec.structs.replace(
            join,
            path=str(self._path),
            link_fds=[links.get(at, -1) for at in stages],
            memory_fds=[ranks.get(at, -1) for at in stages],
        )
        return local, fds

    def _check_checkpoint(self, assignment: Assignment) -> None:
        own = CheckpointIdentity.of(self._path)
        if own.fingerprint != assignment.fingerprint:
            what = "its weights are others"
        elif own.config_digest != assignment.config_digest:
            what = "its config.json is another"
        else:
            return
        raise ConfigError(
            f"{self._path} is not the checkpoint of the worker, {assignment.join.path}: {what}. "
            "Copy that one here, and name it with --model."
        )

    def _check_memory(self) -> None:
        """Raise ConfigError if its part of the KV cache is more than there is."""
        join, engine = self._join, self._join.config
        dtype = cache_dtype(engine.kv_cache_dtype, getattr(torch, join.dtype))
        config = shard_config(read_model_config(self._path), shard_of(join.rank, engine))
        of_block = engine.tensor_parallel * block_bytes(config, engine.block_size_tokens, dtype)
        needed, free = (join.num_blocks + 1) * of_block, available_bytes()
        if needed > free:
            raise ConfigError(
                f"the KV cache of {self.name} takes {needed / _MIB:.0f} MiB for the "
                f"{join.num_blocks} blocks of the worker, and {free / _MIB:.0f} MiB of memory are "
                "free on this host. Lower worker.engine.kv_cache_bytes."
            )


def environments_of(
    engine: EngineConfig, slot: int, num_slots: int, environ: Mapping[str, str] = os.environ
) -> list[Mapping[str, str]]:
    """Those of the processes of a stage's ranks, one of ``num_slots`` stages that share this host's
    cores."""
    shared = dict(environ)
    here = msgspec.structs.replace(engine, pipeline_parallel=num_slots, remote_stages=0)
    configure_threads(here, shared=False, environ=shared)
    size = engine.tensor_parallel
    return [{**shared, **environment_of_rank(slot * size + index)} for index in range(size)]
