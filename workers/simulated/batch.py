"""Continuous batch that computes nothing: its sequences, their blocks, and the duration of steps.

Pure: the caller owns the clock. The simulated engine sleeps for the time that ``begin`` returns;
the simulator advances its virtual time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from millrace.workers.simulated.blocks import SimulatedBlocks, SimulatedSequence, State
from millrace.workers.simulated.latency_model import LatencyModel
from millrace.workers.simulated.tokens import SimulatedTokens

# Share of blocks that admissions leave free for running sequences (watermark).
ADMISSION_WATERMARK = 0.05
# Maximum number of times that a sequence is preempted for a newcomer of higher priority.
MAX_PREEMPTIONS = 4

_rank = attrgetter("rank")


class StepOutputs(NamedTuple):
    """Results of a step.

    ``started`` are the sequences admitted for the first time. ``made`` are the sequences that made
    a token (the last of their ``token_ids``). ``finished`` are those of them that are over; their
    ``stopped`` tells whether a stop token ended them.
    """

    started: list[SimulatedSequence]
    made: list[SimulatedSequence]
    finished: list[SimulatedSequence]


class SimulatedBatch:
    """Batch with the rules of the real engine.

    Decodes come first, then chunks of prompts under a token budget (chunked prefill). Newcomers
    follow by priority and arrival, each with blocks for all its tokens so far. Without free blocks,
    the latest sequence of the lowest priority is preempted and computed again. A newcomer of higher
    priority takes slot and blocks of sequences below it.

    A step is ``begin``, which returns its duration, and ``finish`` when that time is over. A
    sequence cancelled in between makes no token. ``decode_step_s`` is the decode time of the last
    step that decoded.

    Raises:
        ValueError: a bound is below 1.
    """

    def __init__(
        self,
        latency: LatencyModel,
        tokens: SimulatedTokens,
        *,
        max_num_sequences: int,
        max_batch_tokens: int,
        num_blocks: int,
        block_size_tokens: int = 16,
        prefix_cache: bool = True,
    ) -> None:
        bounds = (max_num_sequences, max_batch_tokens, num_blocks, block_size_tokens)
        if min(bounds) < 1:
            raise ValueError(f"the bounds of a batch must be at least 1, got {bounds}")
        self.max_num_sequences = max_num_sequences
        self.max_batch_tokens = max_batch_tokens
        self.blocks = SimulatedBlocks(num_blocks, block_size_tokens, keep=prefix_cache)
        self.running: list[SimulatedSequence] = []
        self.waiting: list[SimulatedSequence] = []
        self.num_steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.busy_s = 0.0
        self.decode_step_s = 0.0
        self._latency = latency
        self._tokens = tokens
        self._size = block_size_tokens
        self._watermark = math.ceil(num_blocks * ADMISSION_WATERMARK)
        self._by_id: dict[str, SimulatedSequence] = {}
        self._num_arrived = 0
        self._plan: list[tuple[SimulatedSequence, int]] = []
        self._started: list[SimulatedSequence] = []

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self.blocks.num_blocks * self._size

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def outstanding_tokens(self) -> int:
        return sum(sequence.outstanding_tokens for sequence in self._by_id.values())

    @property
    def outstanding_prompt_tokens(self) -> int:
        """Number of outstanding tokens that exist already and are to be prefilled."""
        behind = (len(s.token_ids) - s.num_computed_tokens for s in self._by_id.values())
        return sum(tokens for tokens in behind if tokens > 1)

    @property
    def planned(self) -> Sequence[tuple[SimulatedSequence, int]]:
        """Work of the current step: sequences, and the number of tokens of each."""
        return self._plan

    def get(self, request_id: str) -> SimulatedSequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: SimulatedSequence) -> None:
        """Queue a sequence, and cancel one of the same id.

        Raises:
            ValueError: the sequence does not fit even alone, or has no token to make.
        """
        if sequence.num_total_tokens > self.capacity_tokens:
            raise ValueError(
                f"{sequence.num_total_tokens} tokens never fit into {self.capacity_tokens}"
            )
        if not 0 < sequence.num_prompt_tokens < sequence.num_total_tokens:
            raise ValueError("a sequence has a prompt and makes at least one token")
        self.cancel(sequence.request_id)
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        sequence.rank = (-sequence.priority, sequence.arrival)
        sequence.state = State.WAITING
        self._by_id[sequence.request_id] = sequence
        insort(self.waiting, sequence, key=_rank)

    def cancel(self, request_id: str) -> SimulatedSequence | None:
        """Forget a request in any state; its blocks are free at once."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            if sequence.state is State.RUNNING:
                self.blocks.release(sequence)
                self.running.remove(sequence)
            else:
                self.waiting.remove(sequence)
            self._end(sequence)
        return sequence

    def begin(self) -> float | None:
        """Plan the next step and return its duration in seconds; None if there is nothing to
        compute.
        """
        assert not self._plan, "the previous step has not been finished"
        decoding: list[SimulatedSequence] = []
        prefilling: list[SimulatedSequence] = []
        for sequence in self.running:
            behind = len(sequence.token_ids) - sequence.num_computed_tokens
            (decoding if behind == 1 else prefilling).append(sequence)
        budget = self.max_batch_tokens
        size = self._size
        for sequence in decoding:
            if not budget:
                break
            if sequence.state is State.RUNNING and (
                sequence.num_computed_tokens < sequence.num_blocks * size or self._grow(sequence)
            ):
                self._plan.append((sequence, 1))
                budget -= 1
        for sequence in prefilling:
            if budget and sequence.state is State.RUNNING:
                budget -= self._schedule(sequence, budget)
        while budget and self.waiting:
            newcomer = self.waiting[0]
            if not self._admit(newcomer):
                break
            budget -= self._schedule(newcomer, budget)
        return self._price() if self._plan else None

    def finish(self) -> StepOutputs:
        """Finish the step that ``begin`` planned, and return its results."""
        started = [sequence for sequence in self._started if sequence.state is not State.OVER]
        outputs = StepOutputs(started, [], [])
        plan, self._plan, self._started = self._plan, [], []
        for sequence, num_tokens in plan:
            if sequence.state is not State.RUNNING:
                continue
            computed = sequence.num_computed_tokens = sequence.num_computed_tokens + num_tokens
            num_full = computed // self._size
            if num_full > sequence.num_cached_blocks:
                self.blocks.cache_full_blocks(sequence, num_full)
            if computed == len(sequence.token_ids):
                outputs.made.append(sequence)
                if self._make_token(sequence):
                    outputs.finished.append(sequence)
        for sequence in outputs.finished:
            self.blocks.release(sequence)
            self.running.remove(sequence)
            self._end(sequence)
        return outputs

    def _schedule(self, sequence: SimulatedSequence, budget: int) -> int:
        behind = len(sequence.token_ids) - sequence.num_computed_tokens
        num_tokens = min(behind, budget)
        self._plan.append((sequence, num_tokens))
        return num_tokens

    def _price(self) -> float:
        """Count the planned work, and return its duration in seconds."""
        prefill_tokens = num_decodes = kv_tokens = 0
        for sequence, num_tokens in self._plan:
            num_known = len(sequence.token_ids)
            if sequence.num_computed_tokens + 1 == num_known > sequence.num_prompt_tokens:
                num_decodes += 1
                kv_tokens += num_known
            else:
                prefill_tokens += num_tokens
        if num_decodes:
            self.decode_step_s = self._latency.decode_step_s(num_decodes, kv_tokens)
        step_s = self._latency.step_s(prefill_tokens, num_decodes, kv_tokens)
        self.num_steps += 1
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += num_decodes
        self.busy_s += step_s
        return step_s

    def _make_token(self, sequence: SimulatedSequence) -> bool:
        """Append the next token, and return whether it is the last one."""
        token_ids, stops = sequence.token_ids, sequence.stop_token_ids
        index = sequence.num_resumed + len(token_ids) - sequence.num_prompt_tokens
        if stops:
            banned = stops if index < sequence.min_tokens else ()
            token_id = self._tokens.draw(sequence.seed, index, banned)
            sequence.stopped = token_id in stops
        else:
            token_id = self._tokens.draw(sequence.seed, index)
        token_ids.append(token_id)
        return sequence.stopped or len(token_ids) == sequence.num_total_tokens

    def _admit(self, newcomer: SimulatedSequence) -> bool:
        """Admit the first waiting sequence: give it a slot and blocks for its tokens, if
        available.
        """
        num_known = math.ceil(len(newcomer.token_ids) / self._size)
        while True:
            hit = self.blocks.match(newcomer)
            fresh = num_known - hit.num_blocks
            free = self.blocks.num_free - hit.num_idle
            spare = self._watermark if self.running else 0
            if len(self.running) < self.max_num_sequences and fresh + spare <= free:
                break
            if not self._make_way(newcomer, fresh + spare - free):
                return False
        del self.waiting[0]
        self.blocks.open(newcomer, hit, fresh)
        newcomer.state = State.RUNNING
        newcomer.num_computed_tokens = hit.num_blocks * self._size
        self.prefix_query_tokens += len(newcomer.token_ids) - 1
        self.prefix_hit_tokens += newcomer.num_computed_tokens
        if not newcomer.started:
            newcomer.started = True
            newcomer.num_cached_tokens = newcomer.num_computed_tokens
            self._started.append(newcomer)
        insort(self.running, newcomer, key=_rank)
        return True

    def _make_way(self, newcomer: SimulatedSequence, num_missing_blocks: int) -> bool:
        """Preempt the latest sequence of lower priority, if all such sequences have enough blocks
        together.
        """
        victims = [
            sequence
            for sequence in reversed(self.running)
            if sequence.priority < newcomer.priority and sequence.num_preemptions < MAX_PREEMPTIONS
        ]
        if not victims or sum(victim.num_blocks for victim in victims) < num_missing_blocks:
            return False
        self._preempt(victims[0])
        return True

    def _grow(self, sequence: SimulatedSequence) -> bool:
        """Give a running sequence another block, preempting sequences of lower rank. Return False
        if it is the lowest and has to wait.
        """
        while not self.blocks.num_free:
            victim = self.running[-1]
            if victim is sequence:
                return False
            self._preempt(victim)
        self.blocks.allocate(sequence, 1)
        return True

    def _preempt(self, sequence: SimulatedSequence) -> None:
        self.blocks.release(sequence)
        self.running.remove(sequence)
        self._plan = [entry for entry in self._plan if entry[0] is not sequence]
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_rank)

    def _end(self, sequence: SimulatedSequence) -> None:
        sequence.state = State.OVER
        del self._by_id[sequence.request_id]

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, states and blocks agree."""
        assert self.running == sorted(self.running, key=_rank)
        assert self.waiting == sorted(self.waiting, key=_rank)
        assert len(self.running) <= self.max_num_sequences
        assert {s.request_id for s in (*self.running, *self.waiting)} == set(self._by_id)
        for sequence in self.running:
            assert sequence.state is State.RUNNING
            assert sequence.num_computed_tokens <= sequence.num_blocks * self._size
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert not sequence.num_blocks
        self.blocks.check_integrity(self.running)
