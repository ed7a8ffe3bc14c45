"""Blocks of a simulated KV cache: how many are used, and which prefixes they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from millrace.schemas.prefix import extend_keys, root_key

_root = lru_cache(maxsize=4_096)(root_key)


class State(Enum):
    """State of a sequence: WAITING when added or preempted, RUNNING when admitted, OVER
    otherwise.
    """

    WAITING = auto()
    RUNNING = auto()
    OVER = auto()


class GenerationLimits(NamedTuple):
    """Limits of a run: at most ``num_to_make`` tokens. A token of ``stop_token_ids`` ends it after
    ``min_tokens``.
    """

    num_to_make: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """Request in the batch.

    ``token_ids`` are the tokens of the prompt and of the completion so far. The first
    ``num_prompt_tokens`` are the prompt, followed by the tokens of an earlier run, which have the
    indices 0 to ``num_resumed - 1``.

    ``tag`` is for the caller's use. The caller adds the sequence's share of step times to
    ``device_s``, and notes in ``last_token_s`` when the last token was made, by this run or an
    earlier one (None: no token yet).
    """

    request_id: str
    prompt_token_ids: InitVar[Sequence[int]]
    _: KW_ONLY
    limits: InitVar[GenerationLimits]
    seed: int
    num_resumed: int = 0
    priority: int = 0
    salt: str = ""
    tag: object = None
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_total_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    min_tokens: int = field(init=False)
    state: State = field(default=State.OVER, init=False)
    arrival: int = field(default=0, init=False)
    rank: tuple[int, int] = field(default=(0, 0), init=False)
    keys: list[bytes] = field(default_factory=list, init=False)
    num_blocks: int = field(default=0, init=False)
    num_cached_blocks: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    device_s: float = field(default=0.0, init=False)
    last_token_s: float | None = field(default=None, init=False)
    started: bool = field(default=False, init=False)
    stopped: bool = field(default=False, init=False)

    def __post_init__(self, prompt_token_ids: Sequence[int], limits: GenerationLimits) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_total_tokens = self.num_prompt_tokens + limits.num_to_make
        self.stop_token_ids = limits.stop_token_ids
        self.min_tokens = limits.min_tokens

    @property
    def num_made(self) -> int:
        """Number of tokens that this run has made."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def outstanding_tokens(self) -> int:
        """Number of tokens still to compute if nothing stops early; the last token never is
        computed.
        """
        return max(0, self.num_total_tokens - 1 - self.num_computed_tokens)


class Hit(NamedTuple):
    """Found blocks; ``num_idle`` of them are idle, and still count as free."""

    num_blocks: int = 0
    num_idle: int = 0


class SimulatedPrefixChanges(NamedTuple):
    """Changes of cached keys: ``kept`` in order of use (most recent last), and ``gone``.

    ``whole``: the kept keys are all that there are.
    """

    kept: list[bytes]
    gone: list[bytes]
    whole: bool


class SimulatedBlocks:
    """Counter of blocks with LRU eviction.

    Full blocks are known by key and shared. They are kept as idle blocks until their room is
    needed; the block that was idle for longest is evicted first. With ``keep`` False no block is
    cached.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int, *, keep: bool) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._size = block_size_tokens
        self._keep = keep
        self._num_private = 0
        self._users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._noted: dict[bytes, None] = {}
        self._noted_too_much = False

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, idle blocks included."""
        return self.num_blocks - self._num_private - len(self._users)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def match(self, holder: SimulatedSequence) -> Hit:
        """Find the longest cached prefix that leaves at least one token to compute, without
        changes.
        """
        if not self._keep:
            return Hit()
        most = (len(holder.token_ids) - 1) // self._size
        self._extend_keys(holder, most)
        num_idle = found = 0
        for key in holder.keys[:most]:
            if key in self._idle:
                num_idle += 1
            elif key not in self._users:
                break
            found += 1
        return Hit(found, num_idle)

    def open(self, holder: SimulatedSequence, hit: Hit, num_fresh: int) -> None:
        """Give a holder without blocks the blocks of its hit, followed by ``num_fresh`` new
        ones.
        """
        for key in holder.keys[: hit.num_blocks]:
            self._idle.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
            self._note(key)
        holder.num_blocks = holder.num_cached_blocks = hit.num_blocks
        self.allocate(holder, num_fresh)

    def allocate(self, holder: SimulatedSequence, count: int) -> None:
        """Give a holder ``count`` more blocks; there must be enough free ones."""
        assert count <= self.num_free
        self._num_private += count
        holder.num_blocks += count
        self._evict()

    def bring(self, keys: Sequence[bytes]) -> int:
        """Cache the blocks of a prefix that came from elsewhere, as idle blocks.

        They replace the blocks that were idle for longest. If there is no room for all, only the
        first ones are cached.

        Returns:
            The number of blocks that are new here.
        """
        if not self._keep:
            return 0
        present = [key for key in keys if key in self._idle]
        missing = [key for key in keys if not self.holds(key)]
        missing = missing[: max(0, self.num_free - len(present))]
        fresh = set(missing)
        for key in reversed(keys):  # ends of prefixes are evicted before beginnings, as in release
            if key in self._idle:
                self._idle.move_to_end(key)
            elif key in fresh:
                self._idle[key] = None
                self._note(key)
        self._evict()
        return len(missing)

    def forget_idle(self) -> None:
        """Drop all idle blocks."""
        keys = list(self._idle)
        self._idle.clear()
        for key in keys:
            self._note(key)

    def _evict(self) -> None:
        while self._num_private + len(self._users) + len(self._idle) > self.num_blocks:
            key, _ = self._idle.popitem(last=False)
            self.num_evicted += 1
            self._note(key)

    def cache_full_blocks(self, holder: SimulatedSequence, num_full: int) -> None:
        """Cache the first ``num_full`` blocks of a holder, which are full. A block that another
        holder filled with the same tokens is shared from now on.
        """
        if not self._keep:
            return
        self._extend_keys(holder, num_full)
        for key in holder.keys[holder.num_cached_blocks : num_full]:
            self._num_private -= 1
            if key in self._users:
                self._users[key] += 1
                continue
            self._users[key] = 1
            if key in self._idle:
                del self._idle[key]
            else:
                self._note(key)
        holder.num_cached_blocks = num_full

    def release(self, holder: SimulatedSequence) -> None:
        """Take all blocks back; ends of prefixes are evicted before their beginnings."""
        self._num_private -= holder.num_blocks - holder.num_cached_blocks
        for key in reversed(holder.keys[: holder.num_cached_blocks]):
            left = self._users[key] - 1
            if left:
                self._users[key] = left
            else:
                del self._users[key]
                self._idle[key] = None
        holder.num_blocks = holder.num_cached_blocks = 0

    def take_changes(self) -> SimulatedPrefixChanges | None:
        """Return the keys that were added, used again or removed since the last call; None if there
        are none.
        """
        if self._noted_too_much:
            self._noted_too_much = False
            return SimulatedPrefixChanges([*self._idle, *self._users], [], whole=True)
        if not self._noted:
            return None
        noted, self._noted = self._noted, {}
        kept = [key for key in noted if self.holds(key)]
        gone = [key for key in noted if not self.holds(key)] if len(kept) < len(noted) else []
        return SimulatedPrefixChanges(kept, gone, whole=False)

    def holds(self, key: bytes) -> bool:
        """Return whether a block would be found."""
        return key in self._users or key in self._idle

    def _note(self, key: bytes) -> None:
        if self._noted_too_much:
            return
        noted = self._noted
        noted.pop(key, None)
        noted[key] = None
        if len(noted) > 2 * self.num_blocks:
            noted.clear()
            self._noted_too_much = True

    def _extend_keys(self, holder: SimulatedSequence, count: int) -> None:
        if len(holder.keys) < count:
            extend_keys(
                holder.keys,
                _root(holder.salt),
                holder.token_ids,
                num_blocks=count,
                block_size_tokens=self._size,
            )

    def check_integrity(self, holders: Sequence[SimulatedSequence]) -> None:
        """Raise AssertionError unless exactly these holders have the blocks in use."""
        users: dict[bytes, int] = {}
        for holder in holders:
            for key in holder.keys[: holder.num_cached_blocks]:
                users[key] = users.get(key, 0) + 1
        assert users == self._users, "cached blocks and their users do not agree"
        private = sum(holder.num_blocks - holder.num_cached_blocks for holder in holders)
        assert private == self._num_private, "private blocks were miscounted"
        assert not self._idle.keys() & self._users.keys(), "a block is used and idle"
        assert self._num_private + len(self._users) + len(self._idle) <= self.num_blocks
