"""What rank 0 and each other rank say beside the steps, one MessagePack message a packet."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import NoReturn

import msgspec

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kernels.stage_link import LinkShape
from millrace.engine.threads.choice import leave_core
from millrace.schemas.errors import MillraceError
from millrace.schemas.models.adapters import AdapterRef

MAX_PACKET_BYTES = 1 << 17


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Load a rank's share of the checkpoint at ``path``, computed in what rank 0 has chosen: by
    compiled kernels or without, and with their products or others.

    Ranks are numbered through all stages. ``memory_fds`` are the files of each stage's memory, none
    for ranks that meet in ``gloo_folder``; ``link_fds`` those of the links, of ``link_shapes``,
    from each stage to the next, and from the last to rank 0; ``cache_fd`` that of the KV cache of
    all ranks, none (-1) for a rank of another host, which has its part in memory of its own.
    """

    path: str
    config: ResolvedEngineConfig
    rank: int
    dtype: str
    has_kernels: bool
    has_own_products: bool
    num_blocks: int
    cache_fd: int
    cache_bytes: int
    memory_fds: list[int]
    message_bytes: int
    buffer_bytes: int
    gloo_folder: str
    link_fds: list[int]
    link_shapes: list[LinkShape]


class FolderPlace(msgspec.Struct, frozen=True, array_like=True, tag="folder"):
    """An empty folder that all ranks see, which are on one host."""

    path: str


class NetworkPlace(msgspec.Struct, frozen=True, array_like=True, tag="network"):
    """A TCP store of rank 0's process, at ``host`` and ``port``. A rank's own host is reached by
    the others at ``own_host``."""

    host: str
    port: int
    own_host: str


Place = FolderPlace | NetworkPlace


class JoinDevices(msgspec.Struct, frozen=True, array_like=True, tag="join_devices"):
    """Load a rank's share of the checkpoint at ``path`` onto a ``device`` of its own. Ranks meet at
    a ``place``; ``link_fd`` is the file of the link, of ``link_shape``, by which a rank that is its
    reader of this number hears what rank 0 says is to be computed; -1 where that is said by
    Gloo."""

    path: str
    config: ResolvedEngineConfig
    rank: int
    device: str
    place: Place
    link_fd: int
    link_shape: LinkShape
    link_reader: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Read a rank's slices of an adapter, which the ranks then know by ``number``; those of devices
    into a ``slot``, once they have computed the first ``num_posted`` messages."""

    number: int
    adapter: AdapterRef
    max_rank: int
    slot: int = 0
    num_posted: int = 0


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="drop_adapter"):
    """No step that is posted from now on has this adapter."""

    number: int


class RankStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The rank is there, and about to meet the others."""


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """The rank is loaded and waits for steps."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The rank ends, and why."""

    message: str


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag="adapter_loaded"):
    """An adapter is there, unless there is an ``error``."""

    number: int
    error: str = ""


class BlocksChecked(msgspec.Struct, frozen=True, array_like=True, tag="blocks_checked"):
    """Which blocks hold only finite numbers in a rank's part of the KV cache, as was asked under
    this number."""

    number: int
    finite: list[bool]


ToMember = Join | JoinDevices | LoadAdapter | DropAdapter
FromMember = RankStarted | Joined | Refused | AdapterLoaded | BlocksChecked

_encoder = msgspec.msgpack.Encoder()
to_member_decoder: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)
from_member_decoder: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)


def pack(message: ToMember | FromMember) -> bytes:
    """A packet. Raises ValueError for what does not fit one."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(f"a message of {len(packet)} bytes does not fit a packet")
    return packet


_log = logging.getLogger(__name__)


class ControlSocket:
    """The member's end of its socket. Once rank 0 is gone, it ends the process: nothing that it
    computes is of use to anyone then."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def receive(self) -> ToMember:
        """The next message; the process ends if there will be none."""
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            os._exit(0)
        return to_member_decoder.decode(packet)

    def hear(self, read: Callable[[LoadAdapter], None], drop: Callable[[int], None]) -> NoReturn:
        """Obey what rank 0 says beside the steps: ``read`` and ``drop`` adapters. For a thread of
        its own."""
        leave_core()
        while True:
            message = self.receive()
            if isinstance(message, LoadAdapter):
                self._answer(message, read)
            elif isinstance(message, DropAdapter):
                drop(message.number)

    def _answer(self, load: LoadAdapter, read: Callable[[LoadAdapter], None]) -> None:
        """Read an adapter, and say that it is there, or why it is not."""
        error = ""
        try:
            read(load)
        except MillraceError as refused:
            error = refused.message
        except Exception as failed:  # noqa: BLE001 (whatever it is, rank 0 is told)
            _log.exception("a rank could not load an adapter")
            error = f"{type(failed).__name__}: {failed}"
        self.send(AdapterLoaded(load.number, error))

    def send(self, message: FromMember) -> None:
        try:
            self._socket.send(pack(message))
        except OSError:
            os._exit(0)
