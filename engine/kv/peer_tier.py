"""Tier of blocks that another worker's engine has."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from millrace.engine.kv.arrivals import Source, TierPart
from millrace.engine.kv.host_memory import SharedHostMemory
from millrace.engine.step.sequence import Sequence
from millrace.engine.threads.tasks import TaskThreads
from millrace.engine.transfer.client import PulledBlocks, PullTarget
from millrace.engine.transfer.peers import Peers
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.transfer import KvSource, TransferEndpoint

_log = logging.getLogger(__name__)

# Pull bandwidth from this machine and from others assumed before the first measurement, and weight
# of the latest measurement in the EWMA.
_ASSUMED_LOCAL_BYTES_PER_S, _ASSUMED_REMOTE_BYTES_PER_S = 5e9, 1e9
_ASSUMED_WAIT_S = 5e-3
_NEWEST_WEIGHT = 0.2
_NUM_THREADS = 4
# Time for which a peer that failed is not asked again.
_SHUNNED_S = 5.0
# Maximum blocks to ask a peer for beyond those reported, since it may have computed more.
_MAX_MORE_BLOCKS = 16


class _Speed:
    """Speed of a peer as EWMAs: the wait until blocks can be read, and the bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        self.wait_s = _ASSUMED_WAIT_S
        self.bytes_per_s = bytes_per_s

    def note(self, pulled: PulledBlocks, num_bytes: int) -> None:
        self.wait_s += _NEWEST_WEIGHT * (pulled.wait_s - self.wait_s)
        measured = num_bytes / max(pulled.copy_s, 1e-9)
        self.bytes_per_s += _NEWEST_WEIGHT * (measured - self.bytes_per_s)


class PeerTier:
    """Tier that pulls the blocks of sequences whose request names a source. See ``CacheTier``.

    Pulls run on threads of its own. ``own_token`` is the token of this engine's own endpoint, from
    which nothing is pulled.
    """

    source: Source = "peer"

    def __init__(
        self,
        peers: Peers,
        memory: SharedHostMemory,
        block_size_tokens: int,
        own_token: str,
        *,
        monotonic: Callable[[], float] = time.perf_counter,
        threads: TaskThreads | None = None,
    ) -> None:
        self._peers = peers
        self._memory = memory
        self._size = block_size_tokens
        self._own_token = own_token
        self._monotonic = monotonic
        self._threads = threads or TaskThreads("kv-pull", _NUM_THREADS)
        self._speeds = {
            True: _Speed(_ASSUMED_LOCAL_BYTES_PER_S),
            False: _Speed(_ASSUMED_REMOTE_BYTES_PER_S),
        }
        self._shunned_until_s: dict[TransferEndpoint, float] = {}
        self._outcomes: dict[TierPart, PulledBlocks | None] = {}
        self.num_pulled_blocks = 0
        self.num_pulled_bytes = 0
        self.num_failed_pulls = 0

    def has(self, sequence: Sequence, _key: bytes, index: int, /) -> bool:
        """Return whether the request's source is likely to have the block. See ``CacheTier``."""
        source = sequence.request.kv_source
        if source is None or (source.num_tokens and index >= self._most_blocks(source)):
            return False
        endpoint = source.endpoint
        return (
            self._peers.can_reach(endpoint)
            and endpoint.token != self._own_token
            and self._shunned_until_s.get(endpoint, 0.0) <= self._monotonic()
        )

    def _most_blocks(self, source: KvSource) -> int:
        return -(-source.num_tokens // self._size) + _MAX_MORE_BLOCKS

    def brings_s(self, sequence: Sequence, num_blocks: int, /) -> float:
        """Predict the seconds of a pull. See ``CacheTier``."""
        if sequence.request.kv_source is None:
            return math.inf
        speed = self._speed_of(sequence)
        return speed.wait_s + num_blocks * self._memory.block_bytes / speed.bytes_per_s

    def _speed_of(self, sequence: Sequence) -> _Speed:
        return self._speeds[self._peers.is_local(_endpoint_of(sequence))]

    def begin(self, part: TierPart, on_done: Callable[[TierPart], None]) -> None:
        """Start to pull a part. See ``CacheTier``."""
        self._threads.submit(partial(self._pull, part, on_done))

    def _pull(self, part: TierPart, on_done: Callable[[TierPart], None]) -> None:
        endpoint = _endpoint_of(part.sequence)
        target = PullTarget(self._memory.slots(), part.host_slots)
        outcome = None
        try:
            timeout_s = part.deadline_s - self._monotonic()
            outcome = self._peers.pull(endpoint, part.keys, target, timeout_s)
        except PeerError as error:
            _log.warning("pulling KV cache blocks from a peer failed: %s", error.message)
        finally:
            self._outcomes[part] = outcome
            on_done(part)

    def finish(self, part: TierPart, now_s: float) -> None:
        """Record the result of a pull. See ``CacheTier``."""
        pulled = self._outcomes.pop(part)
        endpoint = _endpoint_of(part.sequence)
        if pulled is None:
            self.num_failed_pulls += 1
            if not part.sequence.request.warms:
                self._shun(endpoint, now_s)
            return
        part.num_good = pulled.num_blocks
        num_bytes = pulled.num_blocks * self._memory.block_bytes
        self.num_pulled_blocks += pulled.num_blocks
        self.num_pulled_bytes += num_bytes
        if pulled.num_blocks:
            self._speed_of(part.sequence).note(pulled, num_bytes)

    def _shun(self, endpoint: TransferEndpoint, now_s: float) -> None:
        """Do not ask a peer again for 5 s.

        Not called for blocks that are pulled ahead, for which no client waits. A peer in a long
        step grants nothing before the step ends, and the request that comes then must be free to
        ask.
        """
        self._shunned_until_s = {
            peer: until_s for peer, until_s in self._shunned_until_s.items() if until_s > now_s
        } | {endpoint: now_s + _SHUNNED_S}


def _endpoint_of(sequence: Sequence) -> TransferEndpoint:
    """Return the endpoint of a sequence's source, which it must have."""
    source = sequence.request.kv_source
    assert source is not None
    return source.endpoint
