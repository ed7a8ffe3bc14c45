"""Simulated batch that takes many equal steps at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from millrace.simulation.outcomes import InterTokenLatencies
from millrace.workers.simulated.batch import SimulatedBatch, StepOutputs
from millrace.workers.simulated.blocks import SimulatedSequence
from millrace.workers.simulated.latency_model import LatencyModel
from millrace.workers.simulated.tokens import SimulatedTokens

# Tolerance for equal times of the loop.
_SAME_S = 1e-9


class ConsecutiveTokens(SimulatedTokens):
    """Tokens of an answer: token ``i`` is its seed plus ``i`` (see ``traces.trace.Texts``)."""

    def __init__(self) -> None:
        super().__init__((0,))

    def draw(self, seed: int, index: int, banned: Collection[int] = ()) -> int:  # noqa: ARG002
        return seed + index


class LeapingBatch(SimulatedBatch):
    """Simulated batch that plans decode steps together.

    Steps that only decode, without admissions and with enough blocks, differ only in the KV tokens
    that each adds. They are planned together up to the step that ends a sequence, and take the time
    that they would take one by one.

    ``begin_at`` returns the end of the plan. Call ``finish`` at that time. Before adding or
    cancelling earlier, call ``interrupt``: the step under way becomes the last one, as a new
    request finds it in a real engine. Before reading counts, call ``settle``. The gaps between
    tokens go into ``inter_token``.
    """

    def __init__(
        self,
        latency: LatencyModel,
        *,
        max_num_sequences: int,
        max_batch_tokens: int,
        num_blocks: int,
        block_size_tokens: int,
        prefix_cache: bool,
        inter_token: InterTokenLatencies | None = None,
    ) -> None:
        super().__init__(
            latency,
            ConsecutiveTokens(),
            max_num_sequences=max_num_sequences,
            max_batch_tokens=max_batch_tokens,
            num_blocks=num_blocks,
            block_size_tokens=block_size_tokens,
            prefix_cache=prefix_cache,
        )
        self.inter_token = inter_token or InterTokenLatencies()
        self._num_left = 1
        self._begun_s = 0.0
        self._first_s = 0.0
        self._growth_s = 0.0

    def begin_at(self, now_s: float) -> float | None:
        """Plan one step or many equal ones; return their end, or None if there is nothing to do."""
        step_s = self.begin()
        if step_s is None:
            return None
        self._begun_s, self._first_s, self._growth_s = now_s, step_s, 0.0
        self._num_left = 1
        if self._is_plain:
            num_decodes = len(self.running)
            per_token_s = self._latency.decode_step_s(num_decodes, 1)
            per_token_s -= self._latency.decode_step_s(num_decodes, 0)
            self._growth_s = per_token_s * num_decodes
            self._num_left = self._num_like_steps()
        return self._end_s(self._num_left)

    def settle(self, now_s: float) -> None:
        """Apply the steps that are over. The step under way stays planned."""
        num_over = self._num_over(now_s)
        if not num_over:
            return
        begun_s = self._end_s(num_over)
        self.num_steps += num_over
        self.decode_tokens += num_over * len(self.running)
        growth_s = num_over * self._growth_s
        # The step under way was counted when it was planned, as the first of the plan.
        self.busy_s += begun_s - self._begun_s + growth_s
        self._note_tokens(self.running, self._end_s(1))
        if num_over > 1:
            second_s = self._first_s + self._growth_s
            self.inter_token.add_growing(second_s, self._growth_s, num_over - 1, len(self.running))
        for sequence in self.running:
            self._decode(sequence, num_over)
            sequence.last_token_s = begun_s
        self._first_s += growth_s
        self.decode_step_s = self._first_s
        self._begun_s = begun_s
        self._num_left -= num_over

    def interrupt(self, now_s: float) -> float:
        """Make the step under way the last one; return its end."""
        self.settle(now_s)
        self._num_left = 1
        return self._end_s(1)

    def finish(self) -> StepOutputs:
        """Finish the plan at the time that ``begin_at`` or ``interrupt`` returned."""
        self.settle(math.inf)
        end_s = self._end_s(1)
        outputs = super().finish()
        self._note_tokens(outputs.made, end_s)
        return outputs

    @property
    def is_stepping(self) -> bool:
        """True if a planned step is not finished."""
        return bool(self._plan)

    @property
    def _is_plain(self) -> bool:
        """True if every sequence decodes and no waiting one could preempt another."""
        if len(self._plan) != len(self.running) or self._started:
            return False
        if self.waiting and self.waiting[0].priority > self.running[-1].priority:
            return False
        return all(
            sequence.num_computed_tokens + 1 == len(sequence.token_ids) > sequence.num_prompt_tokens
            for sequence in self.running
        )

    def _num_like_steps(self) -> int:
        """Return the number of equal steps, including this one, until a sequence ends or blocks run
        out."""
        most = min(s.num_total_tokens - len(s.token_ids) for s in self.running)
        free = self.blocks.num_free
        if self._blocks_for(most) <= free:
            return most
        least = 1  # ``begin`` has found a block for each token of the first step
        while most - least > 1:
            middle = (least + most) // 2
            if self._blocks_for(middle) <= free:
                least = middle
            else:
                most = middle
        return least

    def _blocks_for(self, num_steps: int) -> int:
        size = self._size
        return sum(
            (s.num_computed_tokens + num_steps - 1) // size + 1 - s.num_blocks for s in self.running
        )

    def _decode(self, sequence: SimulatedSequence, num_steps: int) -> None:
        """Apply ``num_steps`` decode steps to a sequence, except the last of a plan."""
        start = sequence.seed + sequence.num_resumed + sequence.num_made
        sequence.token_ids.extend(range(start, start + num_steps))
        sequence.num_computed_tokens += num_steps
        num_full = sequence.num_computed_tokens // self._size
        if num_full >= sequence.num_blocks:
            self.blocks.allocate(sequence, num_full + 1 - sequence.num_blocks)
        if num_full > sequence.num_cached_blocks:
            self.blocks.cache_full_blocks(sequence, num_full)

    def _note_tokens(self, sequences: Sequence[SimulatedSequence], now_s: float) -> None:
        """Record the gaps of a step that began at ``_begun_s``, in which each sequence made a
        token."""
        num_usual = 0
        for sequence in sequences:
            last_s = sequence.last_token_s
            if last_s is not None:
                if abs(last_s - self._begun_s) < _SAME_S:
                    num_usual += 1
                else:
                    self.inter_token.add(now_s - last_s)
            sequence.last_token_s = now_s
        if num_usual:
            self.inter_token.add(now_s - self._begun_s, num_usual)

    def _end_s(self, num_steps: int) -> float:
        later_s = self._growth_s * num_steps * (num_steps - 1) / 2
        return self._begun_s + num_steps * self._first_s + later_s

    def _num_over(self, now_s: float) -> int:
        """Return the number of ended steps of the plan, without its last one."""
        most = self._num_left - 1
        if most <= 0 or self._end_s(most) <= now_s:
            return max(most, 0)
        # growth / 2 * n^2 + (first - growth / 2) * n = passed
        half_s, passed_s = self._growth_s / 2, now_s - self._begun_s
        slope_s = self._first_s - half_s
        root = math.sqrt(slope_s * slope_s + 4 * half_s * passed_s) + slope_s
        num_over = min(int(2 * passed_s / root), most) if root > 0 else 0
        while num_over and self._end_s(num_over) > now_s:
            num_over -= 1
        while num_over < most and self._end_s(num_over + 1) <= now_s:
            num_over += 1
        return num_over
