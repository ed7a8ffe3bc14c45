"""KV caches of simulated workers, and the links over which blocks are pulled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from millrace.schemas.transfer import KvSource
from millrace.simulation.settings import KvLink
from millrace.workers.simulated.blocks import SimulatedBlocks, SimulatedSequence

# As in the real engine: longest pull, extra blocks asked of a peer, and weight of the newest pull
# in the measured bandwidth.
_TIMEOUT_S = 2.0
_MAX_MORE_BLOCKS = 16
_NEWEST_WEIGHT = 0.2


@dataclass(eq=False)
class _Peer:
    """Worker's cache, with the times until which its link is busy in each direction."""

    blocks: SimulatedBlocks
    sends_until_s: float = 0.0
    receives_until_s: float = 0.0
    recent_tokens: float = 0.0
    recent_s: float = 0.0


@dataclass(eq=False)
class _Pull:
    """Pull of ``num_tokens``.

    ``keys`` are those of the whole prefix up to the last pulled block.
    """

    to_peer: _Peer
    from_peer: _Peer
    keys: list[bytes]
    num_tokens: int
    took_s: float
    on_done: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class KvNetwork:
    """Network that copies blocks between workers' caches, in virtual time.

    A link carries one pull at a time in each direction, at ``link.bytes_per_s``. After its bytes
    each pull waits for ``link.overhead_s``. Pulled blocks are cached like computed ones, unused so
    far. ``num_pulled_tokens`` counts them.
    """

    def __init__(self, link: KvLink, block_size_tokens: int, prefill_tokens_per_s: float) -> None:
        self.num_pulled_tokens = 0
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._size = block_size_tokens
        self._prefill_token_s = 1 / prefill_tokens_per_s
        self._peers: dict[str, _Peer] = {}
        self._pulls: dict[_Pull, None] = {}

    def join(self, worker_id: str, blocks: SimulatedBlocks) -> None:
        """Add a worker's cache to the network."""
        self._peers[worker_id] = _Peer(blocks)

    def leave(self, worker_id: str) -> None:
        """Remove a worker. Pulls from it end without blocks; pulls to it are dropped."""
        gone = self._peers.pop(worker_id, None)
        for pull in [one for one in self._pulls if gone in (one.to_peer, one.from_peer)]:
            assert pull.timer is not None, "a pull under way has a timer"
            pull.timer.cancel()
            del self._pulls[pull]
            if pull.from_peer is gone:
                self._loop.call_soon(pull.on_done)

    def tokens_per_s(self, worker_id: str) -> float:
        """Return the recent rate of a worker's pulls, overhead included; 0 before the first."""
        peer = self._peers.get(worker_id)
        return peer.recent_tokens / peer.recent_s if peer is not None and peer.recent_s else 0.0

    def coming_tokens(self, worker_id: str) -> int:
        """Return the tokens on their way to a worker."""
        own = self._peers.get(worker_id)
        return sum(pull.num_tokens for pull in self._pulls if pull.to_peer is own)

    def pull(
        self,
        worker_id: str,
        source: KvSource,
        sequence: SimulatedSequence,
        on_done: Callable[[], None],
    ) -> bool:
        """Begin to pull the blocks of a sequence that a worker lacks and its source has.

        A pull that would take longer than computing, or than 2 s, is not begun. Returns True if a
        pull began. ``on_done`` is called at its end.
        """
        own, peer = self._peers.get(worker_id), self._peers.get(source.worker_id)
        if own is None or peer is None or peer is own:
            return False
        num_wanted, keys = self._missing(own, peer, source, sequence)
        if not num_wanted:
            return False
        num_tokens, now_s = num_wanted * self._size, self._loop.time()
        begin_s = max(now_s, own.receives_until_s, peer.sends_until_s)
        sent_s = begin_s + num_tokens * self._link.bytes_per_token / self._link.bytes_per_s
        end_s = sent_s + self._link.overhead_s
        if end_s - now_s >= min(num_tokens * self._prefill_token_s, _TIMEOUT_S):
            return False
        own.receives_until_s = peer.sends_until_s = sent_s
        pull = _Pull(own, peer, keys, num_tokens, end_s - begin_s, on_done)
        pull.timer = self._loop.call_at(end_s, self._finish, pull)
        self._pulls[pull] = None
        return True

    def _missing(
        self, own: _Peer, peer: _Peer, source: KvSource, sequence: SimulatedSequence
    ) -> tuple[int, list[bytes]]:
        """Return the number of blocks to pull, and the keys of all blocks up to the last one."""
        own.blocks.match(sequence)  # computes its keys
        most = (len(sequence.token_ids) - 1) // self._size
        if source.num_tokens:
            most = min(most, -(-source.num_tokens // self._size) + _MAX_MORE_BLOCKS)
        num_wanted = num_keys = 0
        for number, key in enumerate(sequence.keys[:most], start=1):
            if own.blocks.holds(key):
                continue
            if not peer.blocks.holds(key):
                break
            num_wanted += 1
            num_keys = number
        return num_wanted, sequence.keys[:num_keys]

    def _finish(self, pull: _Pull) -> None:
        del self._pulls[pull]
        pull.to_peer.blocks.bring(pull.keys)
        self.num_pulled_tokens += pull.num_tokens
        peer, kept = pull.to_peer, 1 - _NEWEST_WEIGHT
        peer.recent_tokens = kept * peer.recent_tokens + pull.num_tokens
        peer.recent_s = kept * peer.recent_s + pull.took_s
        pull.on_done()
