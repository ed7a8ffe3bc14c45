"""Stage of a group led from another host: its ranks are processes here."""

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
    """Identity of a checkpoint: fingerprint of its weights, digest of its config's shapes."""

    fingerprint: str
    config_digest: str

    @classmethod
    def of(cls, path: Path) -> CheckpointIdentity:
        """Return the identity of the checkpoint at ``path``. Raises CheckpointError."""
        config = repr(read_model_config(path)).encode()
        digest = blake2b(config, digest_size=_DIGEST_BYTES).hexdigest()
        return cls(weights_fingerprint(path), digest)


_MIB = 1 << 20


class CpuStage:
    """Stage of ranks on CPUs: its memory, its links and its ranks' requests to load."""

    def __init__(self, join: Join, path: Path) -> None:
        """Take an assignment; ``path`` is the checkpoint's on this host."""
        self._join = join
        self._path = path
        self._number = join.rank // join.config.tensor_parallel

    def check(self, name: str) -> None:
        """Raise ConfigError if its part of the KV cache exceeds the free memory."""
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
        """Make the files of the stage's memory first; the caller closes them."""
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
        """Open the ends of links that belong to this host's relay."""
        join, number = self._join, self._number
        return LinkEnds(
            make_link(join, number, index=0),
            num_writers=join.link_shapes[number].num_writers,
            targets=[make_link(join, number - 1, index=0)],
        )

    def join_of(self, index: int) -> Join:
        """Return the request to load for a rank, counted from 0 in the stage."""
        return msgspec.structs.replace(self._join, rank=self._join.rank + index)


_CUDA = "cuda"


class DeviceStage:
    """Stage of ranks with a device each.

    The ranks of slot number ``slot`` use the devices after those of earlier slots.
    """

    def __init__(
        self, join: JoinDevices, path: Path, slot: int, connection: RankConnection
    ) -> None:
        """Take an assignment; ``path`` is the checkpoint's, ``connection`` leads to the worker."""
        self._first_device = slot * join.config.tensor_parallel
        place = join.place
        if isinstance(place, NetworkPlace):
            # Addresses as this host sees them, which may differ from the worker's view.
            place = msgspec.structs.replace(
                place, host=connection.peer_host, own_host=connection.own_host
            )
        self._join = msgspec.structs.replace(join, path=str(path), place=place)

    def check(self, name: str) -> None:
        """Raise ConfigError if this host has too few devices."""
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
        """Make the files of the stage's memory first; the caller closes them."""
        fd = link_memory(self._join.link_shape)
        self._join = msgspec.structs.replace(self._join, link_fd=fd)
        return [fd]

    def link_ends(self) -> LinkEnds:
        """Open the link of rank 0's messages; other data goes from device to device."""
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
    """Slot of a stage on this host: share ``number`` of ``num_slots`` of the cores and devices.

    ``path`` is the checkpoint's on this host, or None for the worker's path.
    """

    path: Path | None
    number: int
    num_slots: int


class Stage:
    """Assigned stage on this host. Raises MillraceError if it cannot be computed here.

    Call ``start``, then ``wait`` for its end, then ``close``, which ends and frees everything.
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
        cpu_library()  # the stage's memory needs the compiled library

    @property
    def name(self) -> str:
        """Number of the stage as shown to users, and its ranks."""
        first, size = self._first_rank, self._engine.tensor_parallel
        ranks = f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"
        return f"stage {first // size} ({ranks})"

    def start(self) -> None:
        """Start the ranks and the relay of their messages."""
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
        """Wait until the stage has ended; return the reason."""
        assert self._relay is not None, "start was not called"
        self._relay.ended.wait()
        return self._relay.why

    def end(self, why: str) -> None:
        """End the stage; may be called from any thread."""
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
    """Raise ConfigError if the checkpoint differs from the worker's."""
    own = CheckpointIdentity.of(path)
    if own.fingerprint != assignment.fingerprint:
        what = "its weights differ"
    elif own.config_digest != assignment.config_digest:
        what = "its config.json differs"
    else:
        return
    raise ConfigError(
        f"{path} is not the checkpoint of the worker, {assignment.join.path}: {what}. "
        "Copy the worker's checkpoint here, and name it with --model."
    )


def environments_of(
    engine: ResolvedEngineConfig, slot: Slot, environ: Mapping[str, str] = os.environ
) -> list[Mapping[str, str]]:
    """Return the environments of the processes of a stage's ranks."""
    shared = dict(environ)
    here = EngineConfig(
        num_threads=engine.num_threads or 0,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=slot.num_slots,
    )
    configure_threads(here, shared=False, environ=shared)
    size = engine.tensor_parallel
    return [{**shared, **environment_of_rank(slot.number * size + index)} for index in range(size)]
