"""A lender without an engine, and a server of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from millrace.engine.transfer.addresses import listen_on_address, listen_on_path, this_host
from millrace.engine.transfer.memory import (
    BlockLayout,
    Blocks,
    BlockShape,
    Region,
    SharedPages,
)
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.peers import BlockSplit
from millrace.engine.transfer.server import BlockServer, Loan, PeerIdentity
from millrace.engine.transfer.wire import place
from millrace.schemas.transfer import BlockPart, TransferEndpoint

SHAPE = BlockShape(num_layers=3, num_blocks=40, layer_bytes=4096)
TOKEN, LAYOUT = "t0ken", "layout"
# One rank has all of three layers: two heads of 128 bytes of each of eight tokens' keys and values.
SPLIT = BlockSplit(LAYOUT, BlockLayout(8, 2, 128, scale_bytes=0), (BlockPart(0, 3, 0, 2),))


def key(number: int) -> bytes:
    """Return the key of the block with this number in the second region."""
    return number.to_bytes(16, "big")


class Shelf:
    """Lender of block ``number`` of its second region for ``key(number)``, below ``num_blocks``."""

    def __init__(self, shape: BlockShape = SHAPE) -> None:
        self.num_blocks = shape.num_blocks
        self.regions: Sequence[Region] = [_filled(shape, seed) for seed in (1, 2)]
        self.lent: list[Loan] = []
        self.ended = threading.Semaphore(0)
        self.grants = True

    def ask(self, keys: list[bytes]) -> Loan:
        loan = Loan(keys, lambda _: self.ended.release())
        numbers = [int.from_bytes(one, "big") for one in keys]
        here = next((at for at, one in enumerate(numbers) if one >= self.num_blocks), len(keys))
        self.lent.append(loan)
        if self.grants:
            loan.grant([place(1, number) for number in numbers[:here]])
        return loan

    def block(self, number: int) -> Blocks:
        return self.regions[1].blocks[:, number]


def _filled(shape: BlockShape, seed: int) -> Region:
    pages = SharedPages(shape.size_bytes)
    blocks = np.frombuffer(pages.pages, dtype=np.uint8).reshape(shape)
    blocks[:] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    _kept.append(pages)  # its file is closed with it
    return Region(blocks, pages.fd)


_kept: list[SharedPages] = []


class Served:
    """Shelf that is served by both ways, and by NIXL if asked for."""

    def __init__(
        self,
        folder: Path,
        loan_s: float = 5.0,
        *,
        by_nixl: bool = False,
        shape: BlockShape = SHAPE,
    ) -> None:
        self.shelf = Shelf(shape)
        self.agent = NixlAgent([one.blocks for one in self.shelf.regions]) if by_nixl else None
        local, self.path = listen_on_path(folder)
        remote, address = listen_on_address("127.0.0.1:0")
        identity = PeerIdentity(TOKEN, LAYOUT, loan_s)
        self._server = BlockServer(
            self.shelf.regions, self.shelf.ask, identity, [local, remote], self.agent
        )
        self._server.start()
        self.local = TransferEndpoint(
            layout=LAYOUT, token=TOKEN, host=this_host(), socket=str(self.path)
        )
        self.remote = TransferEndpoint(layout=LAYOUT, token=TOKEN, host="x", address=address)

    @property
    def nixl(self) -> TransferEndpoint:
        """Return the endpoint with an agent."""
        assert self.agent is not None
        return msgspec.structs.replace(self.remote, nixl=self.agent.name)

    def endpoint(self, way: str) -> TransferEndpoint:
        return {"local": self.local, "remote": self.remote}[way] if way != "nixl" else self.nixl

    def connect(self, way: str) -> socket.socket:
        """Open a socket without a hello."""
        if way == "local":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(10.0)
            sock.connect(str(self.path))
            return sock
        host, port = self.remote.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), 10.0)

    def close(self) -> None:
        self._server.close()
        self.path.unlink(missing_ok=True)
        if self.agent is not None:
            self.agent.close()


def serve_apart(pipe: Connection, folder: Path, num_blocks: int) -> None:
    """Serve a shelf by NIXL in a process of its own, until the pipe ends."""
    served = Served(folder, by_nixl=True, shape=SHAPE._replace(num_blocks=num_blocks))
    pipe.send(served.nixl)
    with suppress(EOFError):
        pipe.recv()
    served.close()
