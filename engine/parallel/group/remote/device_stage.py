"""A stage of ranks with a device each, which are told what to compute by rank 0."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from millrace.engine.kernels.stage_link import link_memory
from millrace.engine.parallel.group.control_wire import JoinDevices, NetworkPlace
from millrace.engine.parallel.group.making import device_link
from millrace.engine.parallel.group.remote.connection import Connection
from millrace.engine.parallel.group.remote.relay import LinkEnds
from millrace.schemas.errors import ConfigError

_CUDA = "cuda"


class DeviceStage:
    """See ``StageKind``. Ranks of the stage in the slot of number ``slot`` have the devices behind
    those of the slots before it."""

    module = "millrace.engine.parallel.device_group.member"

    def __init__(self, join: JoinDevices, path: Path, slot: int, connection: Connection) -> None:
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
        """See ``StageKind``."""
        fd = link_memory(self._join.link_shape)
        self._join = msgspec.structs.replace(self._join, link_fd=fd)
        return [fd]

    def link_ends(self) -> LinkEnds:
        """What rank 0 says comes here; what the ranks make goes from device to device."""
        return LinkEnds(None, num_writers=0, targets=[device_link(self._join, index=0)])

    def join_of(self, index: int) -> JoinDevices:
        """See ``StageKind``."""
        join = self._join
        device = f"{_CUDA}:{self._first_device + index}" if join.device == _CUDA else join.device
        return msgspec.structs.replace(
            join, rank=join.rank + index, device=device, link_reader=index
        )


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
