"""Client that pulls blocks out of a peer's memory by NIXL."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from millrace.engine.transfer import wire
from millrace.engine.transfer.client import LentConnection
from millrace.engine.transfer.memory import (
    BlockRun,
    Blocks,
    BlockShape,
    shares_of,
)
from millrace.engine.transfer.nixl_agent import (
    SCRATCH_BYTES,
    NixlAgent,
    Pieces,
    Read,
    Remote,
    Scratch,
)
from millrace.engine.transfer.reslicing import Reslicer
from millrace.engine.transfer.streams import Stream
from millrace.engine.transfer.wire import PeerError

# One scratch is read into while the other is copied from.
_NUM_SCRATCHES = 2
_ADDRESS_BITS = 63


class _Share(NamedTuple):
    """Blocks on their way into a scratch, as runs from there to their targets."""

    read: Read
    blocks: Blocks
    runs: list[BlockRun]


class NixlConnection(LentConnection):
    """Connection to a peer whose memory is read by NIXL; the socket carries the messages."""

    def __init__(
        self,
        stream: Stream,
        hello: bytes,
        shape: BlockShape,
        agent: NixlAgent,
        name: str,
        reslicer: Reslicer | None = None,
    ) -> None:
        """Connect with this engine's ``agent`` to the peer's agent of this ``name``.

        Raises PeerError unless the peer answers with memory for blocks of ``shape``, or of the
        reslicer's shape.
        """
        super().__init__(stream, hello, reslicer)
        self._agent = agent
        _, _, body = stream.receive_frame(wire.TransferFrameKind.AGENT)
        said = wire.parse_agent(body)
        self._checked(said.shapes, shape)
        regions = zip(said.addresses, said.shapes, strict=True)
        if any((address + one.size_bytes) >> _ADDRESS_BITS for address, one in regions):
            raise PeerError("it announced memory at an invalid address")
        self._shapes, self._addresses = said.shapes, said.addresses
        self._remote: Remote | None = agent.load(name, said.metadata, stream.deadline_s)

    def _read_region(self, region: int, runs: list[BlockRun], target: Blocks) -> None:
        """Copy runs of a region's blocks, as many at a time as fit into a scratch."""
        block_bytes = self._shapes[region].block_bytes
        num_blocks = sum(run.length for run in runs)
        at_a_time = max(1, SCRATCH_BYTES // block_bytes)
        coming: deque[_Share] = deque()
        try:
            for part in shares_of(runs, num_blocks, -(-num_blocks // at_a_time)):
                if len(coming) == _NUM_SCRATCHES:
                    self._finish(coming, target)
                coming.append(self._begin(region, part))
            while coming:
                self._finish(coming, target)
        except BaseException:
            for share in coming:
                self._agent.give_up(share.read)
            raise

    def _begin(self, region: int, runs: list[BlockRun]) -> _Share:
        """Begin to read blocks of a region into scratch, one after another."""
        shape = self._shapes[region]
        num_blocks = sum(run.length for run in runs)
        scratch = self._agent.take_scratch(num_blocks * shape.block_bytes)
        here = shape._replace(num_blocks=num_blocks)
        from_scratch, at = [], 0
        for _, to, length in runs:
            from_scratch.append(BlockRun(at, to, length))
            at += length
        lengths = [run.length for run in runs]
        theirs = _pieces(self._addresses[region], shape, [run.source for run in runs], lengths)
        own = _pieces(scratch.ctypes.data, here, [run.source for run in from_scratch], lengths)
        assert self._remote is not None, "it is closed"
        read = self._agent.begin(self._remote, scratch, theirs, own)
        return _Share(read, _blocks(scratch, here), from_scratch)

    def _finish(self, coming: deque[_Share], target: Blocks) -> None:
        """Wait for the first share and copy it to its targets."""
        read, blocks, runs = coming.popleft()
        self._agent.finish(read, self._stream.deadline_s)
        try:
            self._copy(blocks, target, runs)
        finally:
            self._agent.give_back(read.scratch)

    def close(self) -> None:
        super().close()
        remote, self._remote = self._remote, None
        if remote is not None:
            self._agent.unload(remote)


def _pieces(address: int, shape: BlockShape, firsts: list[int], lengths: list[int]) -> Pieces:
    """Return the pieces of runs of blocks: one for each run in each layer."""
    layers = np.arange(shape.num_layers, dtype=np.uint64)[:, None] * np.uint64(shape.num_blocks)
    numbers = layers + np.array(firsts, dtype=np.uint64)
    pieces = np.zeros((numbers.size, 3), np.uint64)
    pieces[:, 0] = numbers.ravel() * np.uint64(shape.layer_bytes) + np.uint64(address)
    sizes = np.array(lengths, dtype=np.uint64) * np.uint64(shape.layer_bytes)
    pieces[:, 1] = np.tile(sizes, shape.num_layers)
    return pieces


def _blocks(scratch: Scratch, shape: BlockShape) -> Blocks:
    return scratch[: shape.size_bytes].reshape(shape)
