"""A stage of a group that is led from another host: its ranks, which are processes here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.ranks import RankShape, rank_memory
from millrace.engine.kernels.stage_link import link_memory
from millrace.engine.kv.cache import block_bytes, cache_dtype
from millrace.engine.parallel.control import Join, JoinDevices, NetworkPlace
from millrace.engine.parallel.layout import make_link, shard_of
from millrace.engine.parallel.members import MemberProcess, end_members
from millrace.engine.parallel.remote.connection import RankConnection, StageAssignment
from millrace.engine.parallel.remote.relay import LinkEnds, RankEnd, Relay
from millrace.engine.threads.choice import configure_threads, environment_of_rank
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.registry.checkpoints.shard import shard_config
from millrace.runtime.process import available_bytes
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError

_DIGEST_BYTES = 8


class CheckpointIdentity(NamedTuple):
    """Of its weights, and of what its config.json says of their shapes."""

    fingerprint: str
    config_digest: str

    @classmethod
    def of(cls, path: Path) -> CheckpointIdentity:
        """Of the one at a path. Raises CheckpointError."""
        config = repr(read_model_config(path)).encode()
        digest = blake2b(config, digest_size=_DIGEST_BYTES).hexdigest()
        return cls(weights_fingerprint(path), digest)


_MIB = 1 << 20


class CpuStage:
    """What a stage of ranks on CPUs has on this host: memory, links, and what its ranks load."""

    def __init__(self, join: Join, path: Path) -> None:
        """``path``: of the checkpoint on this host."""
        self._join = join
        self._path = path
        self._number = join.rank // join.config.tensor_parallel

    def check(self, name: str) -> None:
        """Raise ConfigError if its part of the KV cache is more than there is."""
        join, engine = self._join, self._join.config
        dtype = cache_dtype(engine.kv_cache_dtype, getattr(torch, join.dtype))
        config = shard_config(read_model_config(self._path), shard_of(join.rank, engine))
        of_block = engine.tensor_parallel * block_bytes(config, engine.block_size_tokens, dtype)
        needed, free = (join.num_blocks + 1) * of_block, available_bytes()
        if needed > free:
            raise ConfigError(
                f"the KV cache of {name} takes {needed / _MIB:.0f} MiB for the {join.num_blocks} "
                f"blocks of the worker, and {free / _MIB:.0f} MiB of memory are free on this host. "
                "Lower worker.engine.kv_cache_bytes."
            )

    def make_memory(self) -> list[int]:
        """Make the files of the stage's memory, before the rest; the caller closes them."""
        join, number = self._join, self._number
        size = join.config.tensor_parallel
        links = {at: link_memory(join.link_shapes[at]) for at in (number - 1, number)}
        ranks: dict[int, int] = {}
        if size > 1:
            shape = RankShape(size, join.message_bytes, join.buffer_bytes)
            ranks[number] = rank_memory(shape)
        stages = range(join.config.pipeline_parallel)
        self._join = msgspec.structs.replace(
            join,
            path=str(self._path),
            link_fds=[links.get(at, -1) for at in stages],
            memory_fds=[ranks.get(at, -1) for at in stages],
        )
        return [*links.values(), *ranks.values()]

    def link_ends(self) -> LinkEnds:
        """Open the ends of links that the relay of this host has."""
        join, number = self._join, self._number
        return LinkEnds(
            make_link(join, number, index=0),
            num_writers=join.link_shapes[number].num_writers,
            targets=[make_link(join, number - 1, index=0)],
        )

    def join_of(self, index: int) -> Join:
        """Say what a rank is to load, counted from 0 in the stage."""
        return msgspec.structs.replace(self._join, rank=self._join.rank + index)


_CUDA = "cuda"


class DeviceStage:
    """What a stage of ranks with a device each has on this host. The ranks in the slot of number
    ``slot`` have the devices behind those of the slots before it."""

    def __init__(
        self, join: JoinDevices, path: Path, slot: int, connection: RankConnection
    ) -> None:
        """``path``: of the checkpoint on this host; ``connection``: to the worker's."""
        self._first_device = slot * join.config.tensor_parallel
        place = join.place
        if isinstance(place, NetworkPlace):
            # As this host sees the two, which may not be how the worker does.
            place = msgspec.structs.replace(
                place, host=connection.peer_host, own_host=connection.own_host
            )
        self._join = msgspec.structs.replace(join, path=str(path), place=place)

    def check(self, name: str) -> None:
        """Raise ConfigError if there are not as many devices."""
        if self._join.device != _CUDA:
            return
        end, num_devices = self._first_device + self._join.config.tensor_parallel, _num_devices()
        if end > num_devices:
            raise ConfigError(
                f"{name} takes the GPUs of this host from number {self._first_device} to "
                f"{end - 1}, and it has {num_devices}; where a host computes several stages, "
                "--max-stages times engine.tensor_parallel is what it needs."
            )

    def make_memory(self) -> list[int]:
        """Make the files of the stage's memory, before the rest; the caller closes them."""
        fd = link_memory(self._join.link_shape)
        self._join = msgspec.structs.replace(self._join, link_fd=fd)
        return [fd]

    def link_ends(self) -> LinkEnds:
        """What rank 0 says comes here; what the ranks make goes from device to device."""
        return LinkEnds(None, num_writers=0, targets=[make_link(self._join, index=0)])

    def join_of(self, index: int) -> JoinDevices:
        join = self._join
        device = f"{_CUDA}:{self._first_device + index}" if join.device == _CUDA else join.device
        return msgspec.structs.replace(
            join, rank=join.rank + index, device=device, link_reader=index
        )


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Slot(NamedTuple):
    """Where on this host a stage is computed: it has share ``number`` of ``num_slots`` of the
    cores and devices. ``path``: of the checkpoint; None: where it is at the worker."""

    path: Path | None
    number: int
    num_slots: int


class Stage:
    """What an assignment says, on this host. Raises MillraceError if it cannot be done here.

    ``start`` and ``wait`` for its end; ``close`` leaves nothing of it.
    """

    def __init__(self, connection: RankConnection, assignment: StageAssignment, slot: Slot) -> None:
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
        self._kind = (
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
                process = MemberProcess(rank, tuple(fds), environment)
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


def _check_checkpoint(path: Path, assignment: StageAssignment) -> None:
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
