"""Pulls blocks over a connection to a peer."""

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

# Copied between two looks at the clock.
_COPY_BYTES = 32 << 20


class PullTarget(NamedTuple):
    """Where blocks go: the first of them to the first of ``slots``, in memory of one's own."""

    blocks: Blocks
    slots: list[int]


class PulledBlocks(NamedTuple):
    """How many blocks came, after how long the first of them could be read, and how long reading
    them took then."""

    num_blocks: int
    wait_s: float
    copy_s: float


class PeerConnection(ABC):
    """A peer that has taken the hello. Owns its socket until ``close``."""

    answer: ClassVar = wire.TransferFrameKind.LENT

    def __init__(self, stream: Stream, hello: bytes, reslicer: Reslicer | None) -> None:
        """``reslicer``: for a peer whose blocks are split otherwise. Raises PeerError."""
        self._stream = stream
        self._reslicer = reslicer
        if stream.sock.family != socket.AF_UNIX:
            stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.send(hello)

    def fileno(self) -> int:
        """Of its socket, which can be read while nothing is pulled only once the peer has gone."""
        return self._stream.sock.fileno()

    def pull(self, keys: list[bytes], target: PullTarget, timeout_s: float) -> PulledBlocks:
        """Copy the first blocks that the peer has of these. Raises PeerError; the target may hold
        anything then, and the connection is of no more use."""
        stream = self._stream
        stream.allow(timeout_s)
        begin_s = time.monotonic()
        stream.send(wire.lend(keys))
        _, count, body = stream.receive_frame(self.answer)
        lent_s = time.monotonic()
        if count > len(keys):
            raise PeerError("it has more than was asked for")
        self._read(count, body, target)
        _, is_valid, _ = stream.receive_frame(wire.TransferFrameKind.OVER)
        if not is_valid:
            raise PeerError("it had to give the blocks to others before they were read")
        return PulledBlocks(count, lent_s - begin_s, time.monotonic() - lent_s)

    @abstractmethod
    def _read(self, count: int, body: bytes, target: PullTarget) -> None:
        """Copy so many blocks, as the ``body`` of the answer says. Raises PeerError."""

    def close(self) -> None:
        """Have the peer lend nothing more."""
        self._stream.sock.close()


class LentConnection(PeerConnection):
    """To a peer whose memory is read here. ``_num_blocks`` has the size of each of its regions."""

    _num_blocks: list[int]

    def _checked(self, shapes: list[BlockShape], own: BlockShape) -> BlockShape:
        """The shape of the peer's regions but for their ``num_blocks``: that of blocks here, or the
        one that the reslicer says. Raises PeerError for another one."""
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
                raise PeerError("it lends a block that it has not")
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
    """To a peer on the same machine, whose memory is mapped here."""

    def __init__(
        self,
        sock: socket.socket,
        hello: bytes,
        shape: BlockShape,
        timeout_s: float,
        reslicer: Reslicer | None = None,
    ) -> None:
        """Raises PeerError unless the peer answers, with memory for blocks of such a ``shape``, or
        of the one that the reslicer says."""
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
                raise PeerError("it does not take the hello")
            header += self._stream.receive(wire.HEADER_BYTES - len(header))
            _, count, size = wire.parse_header(header, wire.TransferFrameKind.WELCOME)
            shapes = wire.parse_shapes(self._stream.receive(size))
            if len(fds) != count:
                raise PeerError("it hands over other memory than it says")
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
    """To a peer on another machine, which sends its blocks."""

    answer = wire.TransferFrameKind.SENT

    def __init__(
        self,
        sock: socket.socket,
        hello: bytes,
        timeout_s: float,
        reslicer: Reslicer | None = None,
    ) -> None:
        """Raises PeerError unless the peer answers."""
        super().__init__(Stream(sock, timeout_s), hello, reslicer)
        header = self._stream.receive(wire.HEADER_BYTES)
        if wire.parse_header(header, wire.TransferFrameKind.WELCOME)[1]:
            raise PeerError("it hands over memory")

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
            raise PeerError("a block came with other bytes than were sent")


def map_blocks(fd: int, shape: BlockShape) -> Blocks:
    """A peer's blocks, to read. Raises PeerError unless the file is as large as that needs, and
    stays so: to read behind the end of one that was cut would end this process."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PeerError("its memory may shrink")
    if os.fstat(fd).st_size < shape.size_bytes:
        raise PeerError("its memory is smaller than it says")
    pages = mmap.mmap(fd, shape.size_bytes, prot=mmap.PROT_READ)
    return np.frombuffer(pages, dtype=np.uint8).reshape(shape)
