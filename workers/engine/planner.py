"""What the next step computes: ``{sequence: number of tokens}`` under a token budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from workers.engine.block_pool import BlockPool
from workers.engine.sequence import Sequence, SequenceState

# Blocks that admissions leave free for those who already run: without it every newcomer preempts
# somebody a few steps later.
ADMISSION_WATERMARK = 0.05


class ScheduledSequence(NamedTuple):
    """Compute the next ``num_tokens`` tokens of ``sequence``; its blocks are there."""

    sequence: Sequence
    num_tokens: int


class Planner:
    """Holds the waiting and running sequences and is the only one to touch their blocks.

    One rule for every kind of work: a sequence is behind by some tokens, and gets as many of them
    as the budget allows. Those that are behind by one token (they decode) come first, then
    prefills that are under way, then newcomers by rank: priority, then arrival. When blocks run
    out, the running sequence of the lowest rank gives up its blocks and waits to be recomputed;
    the highest rank never does, so somebody always gets on and everybody ends. ``clear_blocks``
    is called with blocks that go back to the pool with contents that may not be finite.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_num_sequences: int,
        clear_blocks: Callable[[list[int]], None],
    ) -> None:
        if max_batch_tokens < 1 or max_num_sequences < 1:
            raise ValueError(
                f"max_batch_tokens and max_num_sequences must be at least 1, got "
                f"{max_batch_tokens} and {max_num_sequences}"
            )
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_num_sequences = max_num_sequences
        self.num_preemptions = 0
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._num_waiting = 0
        self._unready: list[Sequence] = []
        self._clear_blocks = clear_blocks
        self._watermark_blocks = math.ceil(pool.num_blocks * ADMISSION_WATERMARK)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting + len(self._unready)

    @property
    def num_unready(self) -> int:
        """Those of the waiting that were not ready at the last plan."""
        return len(self._unready)

    @property
    def num_live(self) -> int:
        return self.num_waiting + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it must fit the pool when it is alone in it."""
        assert self.pool.blocks_for(sequence.max_total_tokens) <= self.pool.num_blocks
        if sequence.ready:
            self._enqueue(sequence)
        else:
            self._unready.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever state it is; its blocks are free at once."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._free_blocks(sequence)
        elif sequence in self._unready:
            self._unready.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._num_waiting -= 1  # its heap entry is skipped when it comes up
        sequence.state = SequenceState.FINISHED

    def plan(self) -> list[ScheduledSequence]:
        """The next step's work, decodes first, with all blocks allocated; [] if there is none."""
        if self._unready:
            self._enqueue_ready()
        planned: dict[Sequence, int] = {}
        budget = self.max_batch_tokens
        num_preemptions = self.num_preemptions
        decoding = [s for s in self.running if s.num_uncomputed_tokens == 1]
        prefilling = [s for s in self.running if s.num_uncomputed_tokens > 1]
        for sequence in (*decoding, *prefilling):
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for one that was planned before it
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            given_back = self._make_room(sequence, num_tokens, planned)
            budget += given_back
            if sequence.state is SequenceState.RUNNING:
                planned[sequence] = num_tokens
                budget -= num_tokens
        if self.num_preemptions == num_preemptions:
            self._admit(planned, budget)
        return [ScheduledSequence(sequence, count) for sequence, count in planned.items()]

    def _admit(self, planned: dict[Sequence, int], budget: int) -> None:
        while budget > 0 and len(self.running) < self.max_num_sequences:
            sequence = self._peek()
            if sequence is None:
                return
            # Counted for all tokens at hand, not only for the first chunk: half an admitted prompt
            # is work that the next preemption throws away.
            needed = self.pool.blocks_for(sequence.num_tokens)
            reserve = self._watermark_blocks if self.running else 0
            if needed + reserve > self.pool.num_free_blocks - self._promised_blocks():
                return
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            sequence.state = SequenceState.RUNNING
            self._grow(sequence, num_tokens)
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.rank)
            planned[sequence] = num_tokens
            budget -= num_tokens

    def _promised_blocks(self) -> int:
        """Blocks that admitted prompts still need for tokens they already have."""
        return sum(
            self.pool.blocks_for(s.num_tokens) - len(s.block_table)
            for s in self.running
            if s.num_uncomputed_tokens > 1
        )

    def _make_room(self, sequence: Sequence, num_tokens: int, planned: dict[Sequence, int]) -> int:
        """Allocate, preempting lower ranks as needed, in the end the sequence itself.

        Returns the budget that preempted sequences give back.
        """
        given_back = 0
        while not self._grow(sequence, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            given_back += planned.pop(victim, 0)
            if victim is sequence:
                break
        return given_back

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        total = self.pool.blocks_for(sequence.num_computed_tokens + num_tokens)
        missing = total - len(sequence.block_table)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_table.extend(blocks)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        if not sequence.contents_finite:
            self._clear_blocks(sequence.block_table)
            sequence.contents_finite = True
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        self._num_waiting += 1

    def _enqueue_ready(self) -> None:
        """Queue those that have become ready; another thread may say so at any time."""
        still = []
        for sequence in self._unready:
            if sequence.ready:
                self._enqueue(sequence)
            else:
                still.append(sequence)
        self._unready = still

    def _peek(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.state is SequenceState.WAITING:
                return sequence
            heapq.heappop(self._waiting)
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, block tables and states agree."""
        self.pool.check_integrity()
        held: dict[int, int] = {}
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_tokens <= sequence.max_total_tokens
            capacity = len(sequence.block_table) * self.pool.block_size_tokens
            assert sequence.num_computed_tokens <= capacity, "computed tokens without blocks"
            for block in sequence.block_table:
                held[block] = held.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            assert self.pool.num_references(block) == held.get(block, 0), f"block {block} leaks"
        live = [s for _, s in self._waiting if s.state is SequenceState.WAITING]
        assert len(live) == self._num_waiting
        assert not any(s.block_table for s in (*live, *self._unready)), (
            "a waiting sequence holds blocks"
        )
        ranks = [s.rank for s in self.running]
        assert ranks == sorted(ranks)
        assert len(self.running) <= self.max_num_sequences
