"""Exchange of blocks with other workers' engines."""

from __future__ import annotations

import logging
import secrets
import socket
import weakref
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.host_memory import SharedHostMemory
from millrace.engine.kv.lending import LOAN_S, Lending
from millrace.engine.kv.peer_tier import PeerTier
from millrace.engine.transfer.addresses import (
    default_folder,
    listen_on_address,
    listen_on_path,
    this_host,
)
from millrace.engine.transfer.memory import BlockShape
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.peers import BlockSplit, Peers
from millrace.engine.transfer.server import BlockServer, PeerIdentity
from millrace.schemas.config.worker import TransferTransport
from millrace.schemas.errors import ConfigError
from millrace.schemas.transfer import TransferEndpoint

_log = logging.getLogger(__name__)

_LAYOUT_BYTES = 16
_TOKEN_BYTES = 32


def split_of(identity: str, cache: KVCache) -> BlockSplit:
    """Return the split of this engine's blocks.

    Its kind is a hash of ``identity``, which tells peers whether blocks may be exchanged and
    reveals nothing else.
    """
    hashed = blake2b(identity.encode(), digest_size=_LAYOUT_BYTES).hexdigest()
    return BlockSplit(hashed, cache.layout, cache.parts)


class PeerExchange:
    """Exchange of blocks with peers: serves them at ``endpoint``, and pulls those for which
    requests name a source, as a ``tier`` of arrivals.

    Owns its sockets and threads, which end with ``close`` or with the process.
    """

    def __init__(
        self,
        lending: Lending,
        memory: SharedHostMemory,
        block_size_tokens: int,
        split: BlockSplit,
        *,
        address: str | None = None,
        folder: Path | None = None,
        transport: TransferTransport = "plain",
        monotonic: Callable[[], float],
    ) -> None:
        """Start to serve blocks.

        Args:
            lending: Lender of this engine's blocks.
            memory: Host memory that pulled blocks are written to.
            block_size_tokens: Tokens of a block.
            split: Split and kind of the blocks.
            address: Address for other machines; None: blocks are served to this machine only.
            folder: Folder of the socket for this machine; None: the default folder.
            transport: ``plain``: mapped memory and TCP. ``auto``: NIXL for other machines, if both
                sides have it. ``nixl``: NIXL on this machine, too.
            monotonic: Clock, in seconds.

        Raises ConfigError.
        """
        self._agent = _agent_for(transport, lending)
        listeners: list[socket.socket] = []
        path = ""
        try:
            listener, made = listen_on_path(folder or default_folder())
        except OSError as error:
            _log.warning("no blocks are served to this machine's workers: %s", error)
        else:
            listeners.append(listener)
            path = str(made)
            weakref.finalize(self, made.unlink, missing_ok=True)
        if address is not None:
            listener, address = listen_on_address(address)
            listeners.append(listener)
        token = secrets.token_hex(_TOKEN_BYTES)
        self.endpoint = TransferEndpoint(
            layout=split.kind,
            token=token,
            host=this_host(),
            socket=path,
            address=address or "",
            nixl="" if self._agent is None else self._agent.name,
            parts=split.parts,
        )
        self.is_served = bool(listeners)
        _log.info(
            "blocks are exchanged with %s%s",
            f"this machine's workers and by {address}" if address else "this machine's workers",
            "" if self._agent is None else f"; NIXL reads them ({transport})",
        )
        self.lending = lending
        shape = BlockShape(*memory.slots().shape)
        nixl_here = transport == "nixl"
        self._peers = Peers(split, shape, self.endpoint.host, self._agent, nixl_here=nixl_here)
        self.tier = PeerTier(self._peers, memory, block_size_tokens, token, monotonic=monotonic)
        identity = PeerIdentity(token, split.kind, LOAN_S)
        self._server = BlockServer(lending.regions, lending.ask, identity, listeners, self._agent)
        self._server.start()

    def close(self) -> None:
        """Stop to serve and pull. Lent blocks are taken back by the next ``settle``."""
        self._server.close()
        self._peers.close()
        if self._agent is not None:
            self._agent.close()
        if self.endpoint.socket:
            Path(self.endpoint.socket).unlink(missing_ok=True)


def _agent_for(transport: TransferTransport, lending: Lending) -> NixlAgent | None:
    """Make the agent that reads and serves memory by NIXL; None for plain transport.

    Raises ConfigError.
    """
    if transport == "plain":
        return None
    try:
        agent = NixlAgent([region.blocks for region in lending.regions])
    except ConfigError as error:
        if transport == "nixl":
            raise
        _log.warning("blocks are exchanged without NIXL: %s", error.message)
        return None
    return agent
