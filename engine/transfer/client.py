"""Pulls blocks over a connection to a peer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from millrace.engine.transfer import wire
from millrace.engine.transfer.checksum import checksum_of
from millrace.engine.transfer.errors import PeerError
from millrace.engine.transfer.memory import Blocks, BlockShape, map_blocks
from millrace.engine.transfer.reslicing import Reslicer
from millrace.engine.transfer.runs import BlockRun, copy_runs, cut, runs_of
from millrace.engine.transfer.streams import Stream, failed

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


class PeerConnection(Protocol):
    """A peer that has taken the hello."""

    def fileno(self) -> int:
        """Of its socket, which can be read while nothing is pulled only once the peer has gone."""

    def pull(self, keys: list[bytes], target: PullTarget, timeout_s: float) -> PulledBlocks:
        """Copy the first blocks that the peer has of these. Raises PeerError; the target may hold
        anything then, and the connection is of no more use."""

    def close(self) -> None:
        """Have the peer lend nothing more."""


class LocalConnection:
    """To a peer on the same machine, whose memory is mapped here."""

    def __init__(
        self,
        sock: socket.socket,
        hello: bytes,
        shape: BlockShape,
        timeout_s: float,
        reslicer: Reslicer | None = None,
    ) -> None:
        """``reslicer``: for a peer whose blocks are split otherwise. Raises PeerError unless the
        peer answers, with memory for blocks of such a ``shape``, or of the one that it says."""
        self._reslicer = reslicer
        if reslicer is not None:
            shape = reslicer.shape(shape.num_blocks)
        self._stream = Stream(sock, timeout_s)
        self._stream.send(hello)
        self._regions = self._receive_regions(shape)
        self._at_a_time = max(1, _COPY_BYTES // shape.block_bytes)

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
            if any(one._replace(num_blocks=shape.num_blocks) != shape for one in shapes):
                raise PeerError("its blocks are of another shape")
            return [map_blocks(fd, one) for fd, one in zip(fds, shapes, strict=True)]
        finally:
            for fd in fds:
                os.close(fd)

    def fileno(self) -> int:
        """See ``PeerConnection``."""
        return self._stream.sock.fileno()

    def pull(self, keys: list[bytes], target: PullTarget, timeout_s: float) -> PulledBlocks:
        """See ``PeerConnection``."""

        def read(_count: int, body: bytes) -> None:
            self._copy(wire.parse_places(body), target)
            self._stream.send(wire.frame(wire.TransferFrameKind.DONE, 0))

        self._stream.allow(timeout_s)
        return ask_and_read(self._stream, keys, wire.TransferFrameKind.LENT, read)

    def _copy(self, places: Sequence[int], target: PullTarget) -> None:
        where = [wire.region_and_number(place) for place in places]
        for number, blocks in enumerate(self._regions):
            pairs = [
                (at, slot)
                for (region, at), slot in zip(where, target.slots, strict=False)
                if region == number
            ]
            sources = [source for source, _ in pairs]
            if sources and max(sources) >= len(blocks[0]):
                raise PeerError("it lends a block that it has not")
            for run in runs_of(sources, [slot for _, slot in pairs]):
                for part in cut(run, self._at_a_time):
                    _ = self._stream.left_s
                    self._copy_run(blocks, target.blocks, part)
        if any(region >= len(self._regions) for region, _ in where):
            raise PeerError("it lends a block that it has not")

    def _copy_run(self, source: Blocks, target: Blocks, run: BlockRun) -> None:
        if self._reslicer is None:
            copy_runs(source, target, [run])
            return
        from_, to, count = run
        self._reslicer.copy(source, range(from_, from_ + count), target, range(to, to + count))

    def close(self) -> None:
        """Have the peer lend nothing more."""
        self._stream.sock.close()
        self._regions = []


class RemoteConnection:
    """To a peer on another machine, which sends its blocks."""

    def __init__(
        self,
        sock: socket.socket,
        hello: bytes,
        timeout_s: float,
        reslicer: Reslicer | None = None,
    ) -> None:
        """``reslicer``: for a peer whose blocks are split otherwise. Raises PeerError unless the
        peer answers."""
        self._reslicer = reslicer
        self._stream = Stream(sock, timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.send(hello)
        header = self._stream.receive(wire.HEADER_BYTES)
        if wire.parse_header(header, wire.TransferFrameKind.WELCOME)[1]:
            raise PeerError("it hands over memory")

    def fileno(self) -> int:
        """See ``PeerConnection``."""
        return self._stream.sock.fileno()

    def pull(self, keys: list[bytes], target: PullTarget, timeout_s: float) -> PulledBlocks:
        """See ``PeerConnection``."""

        def read(count: int, _body: bytes) -> None:
            reslicer = self._reslicer
            if reslicer is None:
                for slot in target.slots[:count]:
                    self._receive_block([memoryview(layer) for layer in target.blocks[:, slot]])
                return
            received = np.empty(reslicer.shape(1), np.uint8)
            for slot in target.slots[:count]:
                self._receive_block([memoryview(layer) for layer in received[:, 0]])
                reslicer.copy(received, [0], target.blocks, [slot])

        self._stream.allow(timeout_s)
        return ask_and_read(self._stream, keys, wire.TransferFrameKind.SENT, read)

    def _receive_block(self, pieces: list[memoryview]) -> None:
        checksum = bytearray(wire.CHECKSUM.size)
        self._stream.receive_into([memoryview(checksum), *pieces])
        if wire.CHECKSUM.unpack(checksum)[0] != checksum_of(pieces):
            raise PeerError("a block came with other bytes than were sent")

    def close(self) -> None:
        """Have the peer send nothing more."""
        self._stream.sock.close()


def ask_and_read(
    stream: Stream,
    keys: list[bytes],
    answer: wire.TransferFrameKind,
    read: Callable[[int, bytes], None],
) -> PulledBlocks:
    """Ask for blocks, ``read`` as many as the answer says there are, by its body, and hear whether
    they stayed what they were."""
    begin_s = time.monotonic()
    stream.send(wire.lend(keys))
    _, count, body = stream.receive_frame(answer)
    lent_s = time.monotonic()
    if count > len(keys):
        raise PeerError("it has more than was asked for")
    read(count, body)
    _, is_valid, _ = stream.receive_frame(wire.TransferFrameKind.OVER)
    if not is_valid:
        raise PeerError("it had to give the blocks to others before they were read")
    return PulledBlocks(count, lent_s - begin_s, time.monotonic() - lent_s)
