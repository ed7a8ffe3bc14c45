"""Draft: a second, smaller model that proposes tokens for the target model."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows

import msgspec

from millrace.engine.sampling.sampler import Sampler, SamplingState
from millrace.engine.scheduling.cost_model import CostModel, StepWork
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.runner import DraftRunner
from millrace.engine.step.sequence import Sequence


class Followed:
    """Draft's copy of a target's sequence.

    ``copy`` has the target's tokens and blocks. The draft has keys and values of its own for the
    first ``copy.num_computed_tokens``. It has none for the tokens before ``start``; its first ones
    are at the beginning of the target's block ``first_block``. With ``keeps_own``, it keeps the
    keys and values of its own proposals that were accepted.
    """

    __slots__ = (
        "_blocks",
        "_first_block",
        "_keeps_own",
        "_num_followed",
        "_num_preemptions",
        "_start",
        "copy",
    )

    def __init__(
        self, sequence: Sequence, *, start: int = 0, first_block: int = 0, keeps_own: bool = True
    ) -> None:
        sampling = msgspec.structs.replace(
            sequence.request.sampling, logprobs=None, prompt_logprobs=None
        )
        request = msgspec.structs.replace(
            sequence.request, adapter=None, output_token_ids=(), sampling=sampling
        )
        self.copy = Sequence(
            request,
            arrival=sequence.arrival,
            key=sequence.key,
            max_total_tokens=sequence.max_total_tokens,
        )
        self.copy.sampling_state = SamplingState(sampling, sequence.key, None)
        self.copy.token_ids = list(sequence.token_ids)
        self.copy.num_computed_tokens = start
        self._start = start
        self._first_block = first_block
        self._keeps_own = keeps_own
        self._num_followed = len(sequence.token_ids)
        self._blocks: list[int] = []
        self._num_preemptions = sequence.num_preemptions

    def follow(self, sequence: Sequence, block_size: int) -> None:
        """Update the copy to the target's present tokens and blocks."""
        copy, tokens = self.copy, sequence.token_ids
        valid = copy.num_computed_tokens
        if self._num_preemptions != sequence.num_preemptions:
            self._num_preemptions, valid = sequence.num_preemptions, self._start
        num_blocks = max(0, _num_equal(self._blocks, sequence.block_table) - self._first_block)
        valid = min(valid, self._start + num_blocks * block_size)
        # Count the draft's own proposals that were accepted.
        begin, end = self._num_followed, min(len(copy.token_ids), len(tokens))
        while self._keeps_own and begin < end and copy.token_ids[begin] == tokens[begin]:
            begin += 1
        copy.num_computed_tokens = min(valid, begin, len(tokens) - 1)
        copy.token_ids[self._num_followed :] = tokens[self._num_followed :]
        self._num_followed = len(tokens)
        copy.block_table = sequence.block_table[self._first_block :]
        self._blocks = list(sequence.block_table)


def _num_equal(some: list[int], others: list[int]) -> int:
    """Return the length of the common prefix."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))


# Tokens of long prompts that the draft computes per step before it proposes any.
_CATCH_UP_TOKENS = 256
# Duration of a draft's step as a share of the target's, before the first measurement.
_ASSUMED_SHARE = 0.3
# After this many steps without drafting, the cost of a draft's step is measured again; then after
# twice as many each time.
_FIRST_PATIENCE, _MOST_PATIENCE = 64, 4096


class Draft:
    """Draft model: a second checkpoint of the same vocabulary that runs on decoding sequences.

    Its cache has as many blocks as the target's and uses the same block tables, so it allocates and
    frees nothing. It draws with the target's parameters and from the same random stream, without
    penalties and grammars: where both models agree, they draw the same tokens, at any temperature.
    Its proposals and its failures change no token.
    """

    def __init__(
        self,
        runner: DraftRunner,
        costs: CostModel,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._sampler = Sampler(
            runner.config.vocab_size, runner.host_device, likeliest=runner.likeliest
        )
        self._target_costs = costs
        self._costs = CostModel()
        self._monotonic = monotonic
        self._block_size = runner.cache.block_size_tokens
        self._patience = _FIRST_PATIENCE
        self._num_used = self._num_unused = 0

    def note_unused(self) -> None:
        """Note a step that could have drafted and did not.

        After many such steps the measured cost is forgotten, since it may come from a busy machine
        and is not measured while there is no drafting.
        """
        self._num_unused += 1
        if self._num_unused >= self._patience:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._num_used = self._num_unused = 0
            self._costs = CostModel()

    def _note_used(self) -> None:
        self._num_used += 1
        self._num_unused = 0
        if self._num_used > _FIRST_PATIENCE:
            self._patience = _FIRST_PATIENCE

    def step_s(self, num_rows: int, num_context_tokens: int) -> float:
        """Predict the seconds to draft one more token for each of ``num_rows`` sequences."""
        work = StepWork(0, num_rows, num_context_tokens)
        if self._costs.is_warm:
            return self._costs.step_s(work)
        return _ASSUMED_SHARE * (self._target_costs.step_s(work) or 1.0)

    def draft(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        """Draft up to the given number of tokens for each sequence. Their slots are allocated."""
        self._note_used()
        drafted = [self._followed(sequence) for sequence, _ in wanted]
        proposals: list[list[int]] = [[] for _ in wanted]
        alive = self._caught_up([one.copy for one in drafted])
        is_timed = True  # timing takes time, so only the first step is timed
        while alive := [i for i in alive if len(proposals[i]) < wanted[i][1]]:
            copies = [drafted[i].copy for i in alive]
            tokens = self._next_tokens(copies, is_timed=is_timed)
            is_timed = False
            going = []
            for i, copy, token in zip(alive, copies, tokens, strict=True):
                if token is not None:
                    copy.token_ids.append(token)
                    proposals[i].append(token)
                    going.append(i)
            alive = going
        return proposals

    def _followed(self, sequence: Sequence) -> Followed:
        drafted: Followed | None = sequence.suggestions.drafted
        if drafted is None:
            drafted = sequence.suggestions.drafted = Followed(sequence)
        drafted.follow(sequence, self._block_size)
        return drafted

    def _caught_up(self, copies: list[Sequence]) -> list[int]:
        """Return the sequences whose draft is near the end; compute a part of the others'
        tokens."""
        budget = _CATCH_UP_TOKENS
        near: list[int] = []
        plan: list[ScheduledSequence] = []
        for index, copy in enumerate(copies):
            behind = copy.num_uncomputed_tokens
            taken = min(behind - 1, budget)
            if behind <= self._block_size:
                near.append(index)
            elif taken > 0:
                plan.append(ScheduledSequence(copy, taken))
                budget -= taken
        if plan:
            self._runner.launch(plan)
            for copy, num_tokens in plan:
                copy.num_computed_tokens += num_tokens
        return near

    def _next_tokens(self, copies: list[Sequence], *, is_timed: bool) -> list[int | None]:
        """Return the next token of each sequence; None if none can be drawn."""
        plan = [ScheduledSequence(copy, copy.num_uncomputed_tokens) for copy in copies]
        begin_s = self._monotonic()
        step = self._runner.launch(plan)
        sampled = self._sampler.sample(step.by_host, step.logits)
        if is_timed:
            work = StepWork(
                decodes=sum([item.num_tokens for item in plan]),
                context_tokens=sum([copy.num_computed_tokens for copy in copies]),
            )
            self._costs.observe(work, self._monotonic() - begin_s)
        for copy, num_tokens in plan:
            copy.num_computed_tokens += num_tokens
        outcomes = dict(zip(map(id, step.by_host), sampled.outcomes, strict=True))
        return [token if isinstance(token := outcomes[id(copy)], int) else None for copy in copies]
