"""A second, smaller model that says what the first may say next."""

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
    """``copy`` is with the target's tokens and blocks, of which the draft has keys and values of
    its own for the first ``copy.num_computed_tokens``.

    It has nothing of the tokens before ``start``; the first of its keys and values is at the
    beginning of the block ``first_block`` of the target's. If it ``keeps_own``, it keeps what it
    computed of tokens that it said itself and that came.
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
        """Go on from the tokens and blocks that the target has now."""
        copy, tokens = self.copy, sequence.token_ids
        valid = copy.num_computed_tokens
        if self._num_preemptions != sequence.num_preemptions:
            self._num_preemptions, valid = sequence.num_preemptions, self._start
        num_blocks = max(0, _num_equal(self._blocks, sequence.block_table) - self._first_block)
        valid = min(valid, self._start + num_blocks * block_size)
        # Of what it said itself, that much came.
        begin, end = self._num_followed, min(len(copy.token_ids), len(tokens))
        while self._keeps_own and begin < end and copy.token_ids[begin] == tokens[begin]:
            begin += 1
        copy.num_computed_tokens = min(valid, begin, len(tokens) - 1)
        copy.token_ids[self._num_followed :] = tokens[self._num_followed :]
        self._num_followed = len(tokens)
        copy.block_table = sequence.block_table[self._first_block :]
        self._blocks = list(sequence.block_table)


def _num_equal(some: list[int], others: list[int]) -> int:
    """How many of the first are the same."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))


# Of a long prompt the draft computes so many tokens a step before it says anything.
_CATCH_UP_TOKENS = 256
# What a draft's step takes beside the target's, before one was measured.
_ASSUMED_SHARE = 0.3
# After so many steps in which it did not pay, what its steps take is measured anew, and from then
# on each time after twice as many.
_FIRST_PATIENCE, _MOST_PATIENCE = 64, 4096


class Draft:
    """Runs a second checkpoint of the same vocabulary on sequences that decode.

    Its keys and values are in a cache of as many blocks as the target's, by the same block tables,
    so nobody allocates or frees anything for it. It draws with the target's parameters and from the
    same random stream, without penalties and grammars: where both models think alike, they also
    draw alike, at any temperature. Whatever it says, or fails to say, changes no token.
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
        """Nobody was drafted for in a step in which somebody might have been. If it goes on so,
        what is known of its steps is forgotten: the machine may have been busy when they were
        measured, and they are not measured while nobody drafts."""
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
        """What it takes to draft one more token of each of so many sequences."""
        work = StepWork(0, num_rows, num_context_tokens)
        if self._costs.is_warm:
            return self._costs.step_s(work)
        return _ASSUMED_SHARE * (self._target_costs.step_s(work) or 1.0)

    def draft(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        """Up to so many tokens for each of the sequences, whose slots are allocated."""
        self._note_used()
        drafted = [self._followed(sequence) for sequence, _ in wanted]
        said: list[list[int]] = [[] for _ in wanted]
        alive = self._caught_up([one.copy for one in drafted])
        is_timed = True  # one step of each time tells enough, and to note it takes time
        while alive := [i for i in alive if len(said[i]) < wanted[i][1]]:
            copies = [drafted[i].copy for i in alive]
            tokens = self._next_tokens(copies, is_timed=is_timed)
            is_timed = False
            going = []
            for i, copy, token in zip(alive, copies, tokens, strict=True):
                if token is not None:
                    copy.token_ids.append(token)
                    said[i].append(token)
                    going.append(i)
            alive = going
        return said

    def _followed(self, sequence: Sequence) -> Followed:
        drafted: Followed | None = sequence.suggestions.drafted
        if drafted is None:
            drafted = sequence.suggestions.drafted = Followed(sequence)
        drafted.follow(sequence, self._block_size)
        return drafted

    def _caught_up(self, copies: list[Sequence]) -> list[int]:
        """Those that are near the end of what there is; others get nearer."""
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
        """The next token of each; None where none can be drawn."""
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
