"""Tiers of KV cache blocks around host memory: disk, object store and other workers' engines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.arrivals import BlockArrivals
from millrace.engine.kv.block_file import BlockFile, block_file
from millrace.engine.kv.block_identity import transfer_identity
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.disk_cache import DiskCache
from millrace.engine.kv.host_memory import SharedHostMemory
from millrace.engine.kv.lending import Lending
from millrace.engine.kv.objects.block_objects import BlockObjects, block_objects
from millrace.engine.kv.objects.object_cache import ObjectCache, ObjectFigures
from millrace.engine.kv.peer_exchange import PeerExchange, split_of
from millrace.engine.step.sequence import Sequence
from millrace.schemas.config.worker import TransferTransport
from millrace.schemas.transfer import TransferEndpoint

_log = logging.getLogger(__name__)


class PeerFigures(NamedTuple):
    """Figures of the exchange with other workers' engines.

    Attributes:
        num_failed_pulls: Pulls that returned nothing.
        num_served_blocks: Blocks sent to other workers.
        num_coming_tokens: Tokens on their way, from other workers, a disk or an object store.
    """

    num_pulled_blocks: int = 0
    num_pulled_bytes: int = 0
    num_failed_pulls: int = 0
    num_served_blocks: int = 0
    num_coming_tokens: int = 0


class Tiers:
    """Tiers around host memory, each of which may be absent.

    For the step's thread. ``wake`` is called on any thread when there is something to ``settle``.
    """

    def __init__(
        self,
        tables: BlockTables,
        cache: KVCache,
        memory: SharedHostMemory,
        compute_s: Callable[[int], float],
        wake: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._cache = cache
        self._memory = memory
        self._wake = wake
        self._monotonic = monotonic
        self.arrivals = BlockArrivals(tables, compute_s, wake, monotonic)
        self.disk: DiskCache | None = None
        self.objects: ObjectCache | None = None
        self.exchange: PeerExchange | None = None

    @property
    def endpoint(self) -> TransferEndpoint | None:
        """Endpoint from which other workers pull blocks; None if blocks are not served."""
        exchange = self.exchange
        return exchange.endpoint if exchange is not None and exchange.is_served else None

    def open(self, path: Path, config: ResolvedEngineConfig, *, is_row_exact: bool) -> None:
        """Open the tiers of ``config`` for an engine of the checkpoint folder ``path``.

        ``is_row_exact`` is as for ``block_identity``. Raises ConfigError.
        """
        cache = self._cache
        if config.disk_cache_path is not None:
            self.keep_on_disk(block_file(path, config, cache, is_row_exact=is_row_exact))
        if config.object_cache_url is not None:
            objects = block_objects(path, config, cache, is_row_exact=is_row_exact)
            self.keep_in_store(objects, config)
        if config.transfer:
            identity = transfer_identity(path, config, cache, is_row_exact=is_row_exact)
            transport = config.transfer_transport
            self.exchange_with_peers(identity, config.transfer_address, transport=transport)

    def keep_on_disk(self, file: BlockFile) -> None:
        """Keep blocks of idle conversations in a file, and find the blocks that are in it."""
        self.disk = DiskCache(file, self._memory, self._tables, self._wake)
        self.arrivals.add_tier(self.disk)

    def keep_in_store(self, objects: BlockObjects, config: ResolvedEngineConfig) -> None:
        """Keep blocks of long prefixes in an object store, and find those of other workers
        there."""
        self.objects = ObjectCache(
            objects, self._memory, self._tables, config, self._wake, self._monotonic
        )
        self.arrivals.add_tier(self.objects.tier)

    def exchange_with_peers(
        self,
        identity: str,
        address: str | None = None,
        folder: Path | None = None,
        transport: TransferTransport = "plain",
    ) -> None:
        """Lend blocks to engines with the same ``identity``, and pull theirs.

        Raises ConfigError.
        """
        if self._memory.pages is None:
            _log.warning("host memory cannot be shared; no blocks are exchanged with other workers")
            return
        self.exchange = PeerExchange(
            Lending(self._tables, self._cache, self._memory, self._wake, monotonic=self._monotonic),
            self._memory,
            self._tables.pool.block_size_tokens,
            split_of(identity, self._cache),
            address=address,
            folder=folder,
            transport=transport,
            monotonic=self._monotonic,
        )
        self.arrivals.add_tier(self.exchange.tier)

    def settle(self) -> list[Sequence]:
        """Process finished work between steps; return the sequences that no longer wait."""
        if self.disk is not None:
            self.disk.settle()
        if self.objects is not None:
            self.objects.writer.settle()
        if self.exchange is not None:
            self.exchange.lending.settle()
        return self.arrivals.settle()

    def forget_idle(self) -> None:
        """Empty the prefix cache here, in host memory and on the disk, except for blocks in use.

        Blocks in an object store stay, since other workers use them, too.
        """
        if self.disk is not None:
            self.disk.forget_all()
        self._tables.cached.forget_idle()

    @property
    def is_busy(self) -> bool:
        """True if there will soon be something to settle."""
        return (
            self.arrivals.is_busy
            or (self.disk is not None and self.disk.is_busy)
            or (self.objects is not None and self.objects.writer.is_busy)
            or (self.exchange is not None and self.exchange.lending.is_busy)
        )

    def peer_figures(self) -> PeerFigures:
        """Return the figures of the exchange with other workers."""
        num_coming_tokens = self.arrivals.num_coming_tokens
        if self.exchange is None:
            return PeerFigures(num_coming_tokens=num_coming_tokens)
        tier, lending = self.exchange.tier, self.exchange.lending
        return PeerFigures(
            tier.num_pulled_blocks,
            tier.num_pulled_bytes,
            tier.num_failed_pulls,
            lending.num_served_blocks,
            num_coming_tokens,
        )

    def object_figures(self) -> ObjectFigures:
        """Return the figures of the exchange with an object store."""
        return ObjectFigures() if self.objects is None else self.objects.figures()
