"""Client that pulls blocks over a connection to a peer."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import time
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from millrace.engine.transfer import wire
from millrace.engine.transfer.memory import (
    BlockRun,
    Blocks,
    BlockShape,
    checksum_of,
    copy_runs,
    cut,
    runs_of,
)
from millrace.engine.transfer.reslicing import Reslicer
from millrace.engine.transfer.streams import Stream, failed
from millrace.engine.transfer.wire import PeerError

# Bytes copied between two checks of the deadline.
_COPY_BYTES = 32 << 20


class PullTarget(NamedTuple):
    """Target of a pull: the first block goes to the first of ``slots``, in own memory."""

    blocks: Blocks
    slots: list[int]


class PulledBlocks(NamedTuple):
    """Result of a pull: the number of blocks, the seconds until they could be read, and to read."""

    num_blocks: int
    wait_s: float
    copy_s: float


class PeerConnection(ABC):
    """Connection to a peer that has accepted the hello; owns its socket until ``close``."""

    answer: ClassVar = wire.TransferFrameKind.LENT

    def __init__(self, stream: Stream, hello: bytes, reslicer: Reslicer | None) -> None:
        """Send the hello. ``reslicer`` is for a peer with another block split. Raises PeerError."""
        self._stream = stream
        self._reslicer = reslicer
        if stream.sock.family != socket.AF_UNIX:
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.send(hello)

    def fileno(self) -> int:
        """File descriptor of the socket; while idle it is readable only once the peer has gone."""
        return self._stream.sock.fileno()

    def pull(self, keys: list[bytes], target: PullTarget, timeout_s: float) -> PulledBlocks:
        """Copy the first of these blocks that the peer has.

        Raises PeerError; the target's contents are undefined then, and the connection is unusable.
        """
        stream = self._stream
        stream.allow(timeout_s)
        begin_s = time.monotonic()
        stream.send(wire.lend(keys))
        _, count, body = stream.receive_frame(self.answer)
        lent_s = time.monotonic()
        if count > len(keys):
            raise PeerError("it lends more blocks than were requested")
        self._read(count, body, target)
        _, is_valid, _ = stream.receive_frame(wire.TransferFrameKind.OVER)
        if not is_valid:
            raise PeerError("it reused the blocks before they were read")
        return PulledBlocks(count, lent_s - begin_s, time.monotonic() - lent_s)

    @abstractmethod
    def _read(self, count: int, body: bytes, target: PullTarget) -> None:
        """Copy ``count`` blocks as the ``body`` of the answer describes. Raises PeerError."""

    def close(self) -> None:
        """Close the connection, which ends the peer's loans."""
        self._stream.sock.close()


class LentConnection(PeerConnection):
    """Connection to a peer whose memory is read here; ``_num_blocks`` has its regions' sizes."""

    _num_blocks: list[int]

    def _checked(self, shapes: list[BlockShape], own: BlockShape) -> BlockShape:
        """Check the shapes of the peer's regions and return their shape, except for ``num_blocks``.

        It must be the shape of own blocks, or the reslicer's. Raises PeerError for another one.
        """
        shape = own if self._reslicer is None else self._reslicer.shape(own.num_blocks)
        if any(one._replace(num_blocks=shape.num_blocks) != shape for one in shapes):
            raise PeerError("its blocks are of another shape")
        self._num_blocks = [one.num_blocks for one in shapes]
        return shape

    def _read(self, _count: int, body: bytes, target: PullTarget) -> None:
        by_region: list[tuple[list[int], list[int]]] = [([], []) for _ in self._num_blocks]
        for place, slot in zip(wire.parse_places(body), target.slots, strict=False):
            region, number = wire.region_and_number(place)
            if region >= len(by_region) or number >= self._num_blocks[region]:
                raise PeerError("it lends a block that does not exist")
            sources, slots = by_region[region]
            sources.append(number)
            slots.append(slot)
        for region, (sources, slots) in enumerate(by_region):
            if sources:
                self._read_region(region, runs_of(sources, slots), target.blocks)
        self._stream.send(wire.frame(wire.TransferFrameKind.DONE, 0))

    @abstractmethod
    def _read_region(self, region: int, runs: list[BlockRun], target: Blocks) -> None:
        """Copy runs of a region's blocks to ``target``. Raises PeerError."""

    def _copy(self, source: Blocks, target: Blocks, runs: list[BlockRun]) -> None:
        if self._reslicer is None:
            copy_runs(source, target, runs)
            return
        for from_, to, count in runs:
            slots = range(to, to + count)
            self._reslicer.copy(source, range(from_, from_ + count), target, slots)


class LocalConnection(LentConnection):
    """Connection to a peer on the same machine, whose memory is mapped here."""

    def __init__(
        self,
        sock: socket.socket,
        hello: bytes,
        shape: BlockShape,
        timeout_s: float,
        reslicer: Reslicer | None = None,
    ) -> None:
        """Connect and map the peer's memory for blocks of ``shape``, or of the reslicer's shape.

        Raises PeerError if the peer does not answer or its blocks have another shape.
        """
        super().__init__(Stream(sock, timeout_s), hello, reslicer)
        self._regions = self._receive_regions(shape)

    def _receive_regions(self, shape: BlockShape) -> list[Blocks]:
        sock = self._stream.sock
        sock.settimeout(self._stream.left_s)
        try:
            header, fds, _, _ = socket.recv_fds(
                sock, wire.HEADER_BYTES, wire.MAX_REGIONS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise failed(error) from error
        try:
            if not header:
                raise PeerError("it does not accept the hello")
            header += self._stream.receive(wire.HEADER_BYTES - len(header))
            _, count, size = wire.parse_header(header, wire.TransferFrameKind.WELCOME)
            shapes = wire.parse_shapes(self._stream.receive(size))
            if len(fds) != count:
                raise PeerError("it hands over other memory than it announced")
            self._at_a_time = max(1, _COPY_BYTES // self._checked(shapes, shape).block_bytes)
            return [map_blocks(fd, one) for fd, one in zip(fds, shapes, strict=True)]
        finally:
            for fd in fds:
                os.close(fd)

    def _read_region(self, region: int, runs: list[BlockRun], target: Blocks) -> None:
        for run in runs:
            for part in cut(run, self._at_a_time):
                _ = self._stream.left_s
                self._copy(self._regions[region], target, [part])

    def close(self) -> None:
        super().close()
        self._regions = []


class RemoteConnection(PeerConnection):
    """Connection to a peer on another machine, which sends its blocks."""

    answer = wire.TransferFrameKind.SENT

    def __init__(
        self,
        sock: socket.socket,
        hello: bytes,
        timeout_s: float,
        reslicer: Reslicer | None = None,
    ) -> None:
        """Connect. Raises PeerError if the peer does not answer."""
        super().__init__(Stream(sock, timeout_s), hello, reslicer)
        header = self._stream.receive(wire.HEADER_BYTES)
        if wire.parse_header(header, wire.TransferFrameKind.WELCOME)[1]:
            raise PeerError("it hands over memory on a remote connection")

    def _read(self, count: int, _body: bytes, target: PullTarget) -> None:
        reslicer = self._reslicer
        if reslicer is None:
            for slot in target.slots[:count]:
                self._receive_block([memoryview(layer) for layer in target.blocks[:, slot]])
            return
        received = np.empty(reslicer.shape(1), np.uint8)
        for slot in target.slots[:count]:
            self._receive_block([memoryview(layer) for layer in received[:, 0]])
            reslicer.copy(received, [0], target.blocks, [slot])

    def _receive_block(self, pieces: list[memoryview]) -> None:
        checksum = bytearray(wire.CHECKSUM.size)
        self._stream.receive_into([memoryview(checksum), *pieces])
        if wire.CHECKSUM.unpack(checksum)[0] != checksum_of(pieces):
            raise PeerError("a block's checksum does not match")


def map_blocks(fd: int, shape: BlockShape) -> Blocks:
    """Map a peer's blocks for reading.

    Raises PeerError unless the file is large enough and sealed against shrinking: a read behind the
    end of a shrunken file would kill this process.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PeerError("its memory may shrink")
    if os.fstat(fd).st_size < shape.size_bytes:
        raise PeerError("its memory is smaller than it announced")
    pages = mmap.mmap(fd, shape.size_bytes, prot=mmap.PROT_READ)
    return np.frombuffer(pages, dtype=np.uint8).reshape(shape)
