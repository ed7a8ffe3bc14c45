"""Planner of the next step: ``{sequence: number of tokens}`` under a token budget."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.block_tables import BlockTables, PrefixHit
from millrace.engine.scheduling.cost_model import CostModel, StepWork
from millrace.engine.scheduling.running import (
    RunningSequences,
    is_background,
    non_preemptible,
    rank_of,
    work_of,
)
from millrace.engine.scheduling.schedule import Schedule, ScheduledSequence
from millrace.engine.scheduling.waiting import WaitingQueue
from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.sequence import Sequence, SequenceState

# Watermark: share of blocks that admissions leave free for running sequences. Without it every
# newcomer causes a preemption a few steps later.
ADMISSION_WATERMARK = 0.05
# After this many preemptions a sequence is admitted only when all blocks that it can ever need are
# free, and it is not preempted again.
MAX_PREEMPTIONS = 4
# Maximum newcomers that an admission skips because another sequence is computing their prefix.
_MAX_HELD = 16


class Planner:
    """Planner that owns the waiting and running sequences, and assigns and takes blocks.

    One rule covers every kind of work: a sequence has some tokens to compute, and gets as many of
    them as the budget allows. Sequences with one token to compute (decodes) come first, then
    prefills that are under way, then newcomers, each by rank.

    A rank never changes: it is the time of arrival, moved back by ``ageing_s`` for each level of
    priority. A waiting sequence gains one level in that time, so none starves. When blocks run out,
    running sequences of lower rank are preempted and wait to be computed again; if there is none,
    the sequence keeps what it has and waits. A newcomer of higher priority and rank takes slot and
    blocks from lower ones. After ``MAX_PREEMPTIONS`` preemptions a sequence gets its blocks for
    good. So the highest rank, or a sequence that has all its blocks, always proceeds, and every
    sequence ends.

    Background work has a priority below 0 and ranks below all other work, however long it waits. It
    gets the rest of a step's budget. A newcomer with a higher priority begins with the next step if
    it fits beside the other sequences of that kind. Some background work keeps its blocks for good,
    too: see ``non_preemptible``.

    With several ``num_stages`` of a pipeline, a step has only that fraction of the decoding
    sequences; those of the step before are awaited meanwhile.

    ``config.itl_bound_s`` bounds the chunks beside decoding sequences, so that the step is no
    longer, as ``costs`` predicts it; one block of prefill always proceeds.
    """

    def __init__(
        self,
        tables: BlockTables,
        config: ResolvedEngineConfig,
        *,
        costs: CostModel,
        monotonic: Callable[[], float],
        adapters: AdapterPool,
    ) -> None:
        self.max_batch_tokens = config.max_batch_tokens
        self.max_num_sequences = config.max_num_sequences
        self.num_preemptions = 0
        self.outstanding_tokens = 0
        self.running = RunningSequences(adapters)
        self.tables = tables
        self._pool = tables.pool
        self._ageing_s = config.ageing_s
        self._itl_bound_s = config.itl_bound_s
        self._costs = costs
        self._monotonic = monotonic
        self._adapters = adapters
        self.num_stages = 1
        self._waiting = WaitingQueue()
        self._now_s = monotonic()
        self._watermark_blocks = math.ceil(self._pool.num_blocks * ADMISSION_WATERMARK)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unready(self) -> int:
        """Number of waiting sequences that were not ready at the last plan."""
        return self._waiting.num_unready

    @property
    def num_live(self) -> int:
        return len(self._waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its maximum length must fit the pool."""
        assert self._pool.blocks_for(sequence.max_total_tokens) <= self._pool.num_blocks
        sequence.rank = rank_of(sequence, self._ageing_s)
        self._adapters.prepare(sequence)
        self._waiting.add(sequence)
        for live in (sequence, *sequence.forks):
            self.outstanding_tokens += live.outstanding_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` continue from what ``parent`` has computed.

        It runs at once if the parent runs and a slot is free; otherwise later, from the cache.
        """
        if child.fork_group is not None:  # choices that waited for the prompt were counted by add
            self.outstanding_tokens += child.outstanding_tokens
        child.rank = rank_of(child, self._ageing_s)
        if parent.state is SequenceState.RUNNING and not self._is_full:
            self.tables.fork(parent, child)
            self.outstanding_tokens -= child.num_computed_tokens
            self.running.enter(child)
        else:
            self._waiting.add(child)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its blocks are free at once."""
        if sequence.state is SequenceState.FINISHED:
            return
        self.outstanding_tokens -= sequence.outstanding_tokens
        if sequence.state is SequenceState.RUNNING:
            self.running.leave(sequence)
            self.tables.release(sequence, self._now_s)
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            self.tables.unpin(sequence)
        sequence.enter(SequenceState.FINISHED)
        self._adapters.forget(sequence)

    def advance(self, plan: Iterable[ScheduledSequence]) -> None:
        """Count the planned tokens as computed: they will be before anything that is planned from
        now on."""
        total = 0
        for sequence, num_tokens in plan:
            sequence.num_computed_tokens += num_tokens
            total += num_tokens
        self.outstanding_tokens -= total

    def retract(self, plan: Iterable[ScheduledSequence]) -> None:
        """Take back the last plan, which is not computed after all.

        Sequences that left the batch since then do not change.
        """
        for sequence, num_tokens in plan:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed_tokens -= num_tokens
                self.outstanding_tokens += num_tokens

    def plan(self) -> list[ScheduledSequence]:
        """Plan the next step: decodes first, with all blocks allocated.

        Return [] if there is no work. A sequence whose last token only has to be read gets no work.
        """
        self._now_s = self._monotonic()
        self._waiting.collect_ready()
        self.tables.cached.offload_idle(self._now_s)
        schedule = Schedule(self.max_batch_tokens)
        decoding, prefilling, schedule.ending, num_awaited = work_of(self.running)
        num_urgent = bisect_left(prefilling, True, key=is_background)
        kept_tokens = self.max_batch_tokens // 2 if num_urgent or self._has_urgent_newcomer else 0
        size = self._pool.block_size_tokens
        most_decoding = -(-(len(decoding) + num_awaited) // self.num_stages)
        for sequence in decoding[:most_decoding]:
            if schedule.budget <= kept_tokens and (schedule.budget == 0 or is_background(sequence)):
                break
            if sequence.num_computed_tokens % size == 0 or sequence.tail_shared:
                self._schedule(sequence, 1, schedule)
            elif sequence.state is SequenceState.RUNNING:
                schedule.add(sequence, 1)  # its last block has room
        if schedule.counts and (prefilling or self._waiting):
            self._bound_chunks(schedule, prefilling)
        self._continue_prefills(prefilling[:num_urgent], schedule)
        if num_urgent < len(prefilling):
            self._admit(schedule, background=False)
            self._continue_prefills(prefilling[num_urgent:], schedule)
        self._admit(schedule)
        if not schedule.counts and not schedule.ending and not num_awaited:
            self._displace_held(schedule)
        return list(map(ScheduledSequence._make, schedule.counts.items()))

    def _displace_held(self, schedule: Schedule) -> None:
        """Preempt held forks, the lowest rank first, until something can be computed.

        So a fork group proceeds even if only one of its sequences at a time fits the pool.
        """
        held = [sequence for sequence in self.running if sequence.is_held]
        while held and not schedule.counts:
            fork = held.pop()
            if fork.state is SequenceState.RUNNING:  # an earlier fork may have preempted it
                self._preempt(fork, schedule)
            schedule.short_of_blocks = False
            self._continue_prefills([s for s in self.running if not s.is_held], schedule)
            self._admit(schedule)

    @property
    def _has_urgent_newcomer(self) -> bool:
        first = self._waiting.first()
        return first is not None and not is_background(first)

    def _continue_prefills(self, prefilling: list[Sequence], schedule: Schedule) -> None:
        for sequence in prefilling:
            if schedule.budget == 0:
                break
            behind = len(sequence.token_ids) - sequence.num_computed_tokens
            self._schedule(sequence, min(behind, schedule.budget), schedule)

    def _schedule(self, sequence: Sequence, num_tokens: int, schedule: Schedule) -> None:
        """Plan a running sequence if there are blocks, or if preempting lower ranks frees them.

        If sequences are ending, it waits for their blocks and preempts none.
        """
        if sequence.state is not SequenceState.RUNNING:
            return  # preempted for a sequence that was planned before it
        while not self.tables.allocate_slots(sequence, num_tokens):
            schedule.short_of_blocks = True
            victim = None if schedule.ending else self._lowest_below(sequence)
            if victim is None:
                return
            self._preempt(victim, schedule)
        schedule.add(sequence, num_tokens)

    def _lowest_below(self, sequence: Sequence) -> Sequence | None:
        kept = self._kept_from(sequence)
        for other in reversed(self.running):
            if other is sequence:
                return None
            if other not in kept and not other.is_awaited:
                return other
        return None

    def _kept_from(self, sequence: Sequence) -> set[Sequence]:
        """Return the sequences that it may not preempt, of any rank."""
        if is_background(sequence):
            return {other for other in self.running if other.guaranteed}
        return non_preemptible(self.running, self.max_num_sequences, self._pool.num_blocks)

    def _bound_chunks(self, schedule: Schedule, prefilling: list[Sequence]) -> None:
        """Cut the budget so that the predicted step stays under the bound.

        Does nothing if only background work decodes.
        """
        if self._itl_bound_s is None or not self._costs.is_warm:
            return
        if is_background(next(iter(schedule.counts))):
            return
        beside = StepWork(
            decodes=len(schedule.counts),
            context_tokens=sum(s.num_computed_tokens for s in schedule.counts),
        )
        context = prefilling[0].num_computed_tokens if prefilling else 0
        chunk = self._costs.largest_chunk(self._itl_bound_s, beside, context)
        schedule.budget = min(schedule.budget, max(chunk, self._pool.block_size_tokens))

    def _admit(self, schedule: Schedule, *, background: bool = True) -> None:
        held: list[Sequence] = []
        while schedule.budget > 0 and len(held) < _MAX_HELD:
            sequence = self._waiting.pop()
            if sequence is None:
                break
            if not background and is_background(sequence):
                held.append(sequence)
                break
            if (self._is_full or schedule.short_of_blocks) and not self._may_displace(
                sequence, schedule
            ):
                held.append(sequence)  # no sequence can give way, so skip the look-up
                break
            if not self._adapters.admits(sequence):
                self._waiting.add(sequence)  # it waits until it is ready
                continue
            hit = self.tables.match(sequence)
            if hit.awaited:
                held.append(sequence)
                continue
            if not self._fits(sequence, hit):
                victims = self._victims_for(sequence, hit, schedule)
                if not victims:
                    held.append(sequence)
                    break
                for victim in victims:
                    self._preempt(victim, schedule)
                hit = self.tables.match(sequence)
            self._add_to_batch(sequence, hit)
            behind = sequence.num_tokens - sequence.num_computed_tokens
            self._schedule(sequence, min(behind, schedule.budget), schedule)
        for sequence in held:
            self._waiting.add(sequence)

    def _may_displace(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Return whether a running sequence may give way to a newcomer.

        If running sequences lack blocks, only background work gives way, to other work.
        """
        if not self.running or self.running[-1].rank < sequence.rank:
            return False
        return not schedule.short_of_blocks or (
            is_background(self.running[-1]) and not is_background(sequence)
        )

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.max_num_sequences

    def _add_to_batch(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Add a newcomer that fits to the batch."""
        self.tables.attach_prefix(sequence, hit)
        guaranteed = sequence.num_preemptions >= MAX_PREEMPTIONS
        self.tables.reserve(sequence, self._wanted_blocks(sequence), guaranteed=guaranteed)
        self.outstanding_tokens -= sequence.num_computed_tokens
        self.running.enter(sequence)

    def _wanted_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks to reserve at admission.

        They hold all present tokens, not only the first chunk, since a half-computed prompt would
        be lost with the next preemption. Once the sequence may not be preempted, they hold its
        maximum length.
        """
        if sequence.num_preemptions < MAX_PREEMPTIONS:
            return self._pool.blocks_for(sequence.num_tokens)
        # Choices share the last block of the prompt until they write to it.
        return self._pool.blocks_for(sequence.max_total_tokens) + bool(sequence.forks)

    def _fits(
        self, sequence: Sequence, hit: PrefixHit, num_slots: int = 0, num_blocks: int = 0
    ) -> bool:
        """Return whether a newcomer can be admitted once ``num_slots`` and ``num_blocks`` more are
        free."""
        if not self.running.has_slot(sequence, num_slots, self.max_num_sequences):
            return False
        needed = self._wanted_blocks(sequence) - hit.num_here + hit.num_idle
        if len(self.running) > num_slots and sequence.num_preemptions < MAX_PREEMPTIONS:
            needed += self._watermark_blocks
        free = self._pool.num_free_blocks - self.tables.num_reserved_blocks
        return needed <= free + num_blocks

    def _victims_for(
        self, sequence: Sequence, hit: PrefixHit, schedule: Schedule
    ) -> list[Sequence]:
        """Return the sequences to preempt, the lowest rank first, for a newcomer of higher
        priority.

        Returns [] if that does not make room, or if the newcomer will fit once the ending sequences
        have left.
        """
        kept = frozenset(block for block in hit.blocks if block is not None)
        if schedule.ending:
            num_blocks = sum(self.tables.num_exclusive_blocks(s, kept) for s in schedule.ending)
            if self._fits(sequence, hit, len(schedule.ending), num_blocks):
                return []
        victims: list[Sequence] = []
        num_blocks = 0
        spared = self._kept_from(sequence).union(schedule.ending)
        for other in reversed(self.running):
            if other.rank < sequence.rank:
                break
            if other.is_awaited or other in spared:
                continue
            if other.request.priority >= sequence.request.priority:
                continue
            victims.append(other)
            num_blocks += self.tables.num_exclusive_blocks(other, kept)
            num_blocks += other.num_reserved_blocks
            if self._fits(sequence, hit, len(victims), num_blocks):
                return victims
        return []

    def _preempt(self, sequence: Sequence, schedule: Schedule) -> None:
        schedule.remove(sequence)
        self.outstanding_tokens += sequence.num_computed_tokens
        self.running.leave(sequence)
        self.tables.preempt(sequence, self._now_s, self.recompute_s)
        # A guaranteed fork is preempted only while it is held, any number of times.
        if not sequence.is_held or sequence.num_preemptions < MAX_PREEMPTIONS:
            sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(sequence)

    def recompute_s(self, num_tokens: int) -> float:
        """Predict the seconds to compute ``num_tokens`` of a prompt; 0 if that is not known yet."""
        return self._costs.prefill_s(num_tokens) if self._costs.is_warm else 0.0

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, block tables and states agree."""
        self.tables.check_integrity(self.running, list(self._waiting))
        self._waiting.check_integrity()
        for sequence in self.running:
            assert sequence.state is SequenceState.RUNNING
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens + sequence.is_awaited
            assert sequence.num_tokens <= sequence.max_total_tokens
            assert sequence.num_preemptions <= MAX_PREEMPTIONS or is_background(sequence)
        self._adapters.check_integrity(self.running)
        assert (ranks := [s.rank for s in self.running]) == sorted(ranks)
        assert len(self.running) <= self.max_num_sequences
        live = [*self.running, *self._waiting]
        live += [fork for sequence in live for fork in sequence.forks]
        assert self.outstanding_tokens == sum(s.outstanding_tokens for s in live)
