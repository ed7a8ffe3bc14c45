"""Control messages between rank 0 and each other rank: one MessagePack message a packet."""

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
    """Request to load a rank's share of the checkpoint at ``path``.

    Rank 0 has chosen the dtype, whether to use compiled kernels, and whether they do the products.
    Ranks are numbered through all stages.

    ``memory_fds`` are the files of each stage's shared memory, empty for ranks that meet in
    ``gloo_folder``. ``link_fds`` are the files of the links, of ``link_shapes``, from each stage to
    the next and from the last to rank 0. ``cache_fd`` is the file of the KV cache of all ranks, or
    -1 for
    a rank on another host, whose part is in memory of its own.
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
    """Empty folder that all ranks can reach, for ranks on one host."""

    path: str


class NetworkPlace(msgspec.Struct, frozen=True, array_like=True, tag="network"):
    """TCP store of rank 0's process at ``host`` and ``port``.

    Other ranks reach a rank's own host at ``own_host``.
    """

    host: str
    port: int
    own_host: str


Place = FolderPlace | NetworkPlace


class JoinDevices(msgspec.Struct, frozen=True, array_like=True, tag="join_devices"):
    """Request to load a rank's share of the checkpoint at ``path`` onto its own ``device``.

    Ranks meet at ``place``. ``link_fd`` is the file of the link, of ``link_shape``, on which the
    rank receives rank 0's messages as the reader of this number. It is -1 if they come by Gloo.
    """

    path: str
    config: ResolvedEngineConfig
    rank: int
    device: str
    place: Place
    link_fd: int
    link_shape: LinkShape
    link_reader: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Request to read a rank's slices of an adapter, which ranks then know by ``number``.

    Ranks with a device read it into ``slot``, after they have computed the first ``num_posted``
    messages.
    """

    number: int
    adapter: AdapterRef
    max_rank: int
    slot: int = 0
    num_posted: int = 0


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="drop_adapter"):
    """Notice that no step posted from now on uses this adapter."""

    number: int


class RankStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """Answer of a rank that has started and is about to meet the others."""


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """Answer of a rank that is loaded and waits for steps."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Answer of a rank that ends because it cannot be loaded, with the reason."""

    message: str


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag="adapter_loaded"):
    """Answer of a rank that has read an adapter, or failed with ``error``."""

    number: int
    error: str = ""


class BlocksChecked(msgspec.Struct, frozen=True, array_like=True, tag="blocks_checked"):
    """Answer of a rank to the check of this number.

    ``finite`` says for each block whether its part of the KV cache has only finite numbers.
    """

    number: int
    finite: list[bool]


ToMember = Join | JoinDevices | LoadAdapter | DropAdapter
FromMember = RankStarted | Joined | Refused | AdapterLoaded | BlocksChecked

_encoder = msgspec.msgpack.Encoder()
to_member_decoder: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)
from_member_decoder: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)


def pack(message: ToMember | FromMember) -> bytes:
    """Encode a packet. Raises ValueError if the message exceeds the size of a packet."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(f"a message of {len(packet)} bytes does not fit a packet")
    return packet


_log = logging.getLogger(__name__)


class ControlSocket:
    """Member's end of its control socket; it ends the process once rank 0 is gone."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def receive(self) -> ToMember:
        """Return the next message, or end the process if the socket is closed."""
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            os._exit(0)
        return to_member_decoder.decode(packet)

    def hear(self, read: Callable[[LoadAdapter], None], drop: Callable[[int], None]) -> NoReturn:
        """Handle rank 0's requests to ``read`` and ``drop`` adapters, on a thread of its own."""
        leave_core()
        while True:
            message = self.receive()
            if isinstance(message, LoadAdapter):
                self._answer(message, read)
            elif isinstance(message, DropAdapter):
                drop(message.number)

    def _answer(self, load: LoadAdapter, read: Callable[[LoadAdapter], None]) -> None:
        """Read an adapter and report success or the error."""
        error = ""
        try:
            read(load)
        except MillraceError as refused:
            error = refused.message
        except Exception as failed:  # noqa: BLE001 (any error is reported to rank 0)
            _log.exception("a rank could not load an adapter")
            error = f"{type(failed).__name__}: {failed}"
        self.send(AdapterLoaded(load.number, error))

    def send(self, message: FromMember) -> None:
        try:
            self._socket.send(pack(message))
        except OSError:
            os._exit(0)
