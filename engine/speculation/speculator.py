"""Proposes tokens for those who decode in a step, as many as pay."""

from __future__ import annotations

import logging
from typing import NamedTuple

from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.scheduling.cost_model import CostModel, StepWork
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.speculation.draft import Draft
from millrace.engine.speculation.suggestions import Acceptance, Suggestions
from millrace.engine.step.sequence import Sequence

# What a row adds to a step of one, as a share of it, before steps have told.
_ASSUMED_SHARE = 0.06
# A proposed token has to be worth so many times what it costs: what is predicted is not exact.
_MARGIN = 1.1
# To look at a sequence takes so long, and where nothing pays, this share of a step at most.
_LOOK_S, _LOOK_SHARE = 10e-6, 0.005

# More of a draft's tokens in a step are never worth its own steps.
MOST_DRAFTED = 8

_log = logging.getLogger(__name__)


class _Rates(NamedTuple):
    """What the decoding part of a step takes, what a row adds to it, and how many tokens it makes,
    with what is proposed already."""

    step_s: float
    row_s: float
    num_tokens: float


class Speculator:
    """Proposes tokens for sequences that decode: they are computed in the same step, one row each,
    and are kept as far as the tokens drawn are the same.

    A row adds some time to the step, and a token with the chance that all proposed tokens up to it
    come. It is worth its time if it makes tokens faster than the step does without it, which is
    ``tokens / seconds`` of the part of the step that decodes, as ``costs`` predicts it: far from it
    where many rows share the reading of the weights, so that at high load nothing is proposed. The
    rows come out of what a step's budget leaves, and their blocks of those that nobody needs; with
    an ``itl_bound_s`` no step becomes longer than that for them. Where a device draws
    tokens by itself, the host does behind proposed ones: a step has at most ``max_drawn_rows`` rows
    then that tokens are drawn from.
    """

    def __init__(
        self,
        tables: BlockTables,
        costs: CostModel,
        max_batch_tokens: int,
        itl_bound_s: float | None = None,
        draft: Draft | None = None,
        *,
        max_drawn_rows: int | None = None,
    ) -> None:
        self._draft = draft
        self._tables = tables
        self._costs = costs
        self._max_batch_tokens = max_batch_tokens
        self._itl_bound_s = itl_bound_s
        self._max_drawn_rows = max_drawn_rows
        self._acceptance = Acceptance()

    def propose(self, plan: list[ScheduledSequence]) -> None:
        """Set what is ``proposed`` for the sequences of a plan; the slots are allocated."""
        decoding = [sequence for sequence, num_tokens in plan if num_tokens == 1]
        if not decoding:
            return
        step_s, row_s = self._times(decoding)
        budget = self._budget(plan, row_s)
        num_tokens = float(len(decoding))
        most_rests = int(len(decoding) * _LOOK_S / (_LOOK_SHARE * step_s))
        others: list[Sequence] = []
        for sequence in decoding:
            if row_s * _MARGIN * num_tokens >= step_s or budget <= 0:
                break  # not even for a token that is sure to come
            chances = self._chances(sequence)
            num_taken = 0
            for chance in (chances or [])[: min(budget, _room(sequence))]:
                if chance * step_s < row_s * _MARGIN * num_tokens:
                    break
                num_tokens += chance
                step_s += row_s
                num_taken += 1
            if num_taken:
                num_taken = self._tables.allocate_ahead(sequence, num_taken)
                sequence.proposed = sequence.suggestions.token_ids[:num_taken]
                budget -= num_taken
            elif chances is not None:
                others.append(sequence)
        rates = _Rates(step_s, row_s, num_tokens)
        for sequence in self._propose_drafts(others, rates, budget):
            sequence.suggestions.rest(most_rests)

    def _propose_drafts(
        self, sequences: list[Sequence], rates: _Rates, budget: int
    ) -> list[Sequence]:
        """Have a draft say what comes next, as far as that pays; those for which it does not."""
        counts = self._draft_counts(sequences, rates, budget)
        wanted = [
            (sequence, self._tables.allocate_ahead(sequence, count))
            for sequence, count in zip(sequences, counts, strict=True)
            if count
        ]
        if self._draft is not None and wanted:
            try:
                said = self._draft.draft(wanted)
            except Exception:  # noqa: BLE001 (whatever it is, the sequences go on without)
                _log.exception("the draft failed")
                said = [[] for _ in wanted]
            for (sequence, _), token_ids in zip(wanted, said, strict=True):
                if sequence.matcher is not None:
                    del token_ids[sequence.matcher.num_fitting(token_ids) :]
                self._tables.free_ahead(sequence, 1 + len(token_ids))
                sequence.suggestions.draft(token_ids)
                sequence.proposed = list(token_ids)
        elif self._draft is not None and sequences:
            self._draft.note_unused()
        left = [one for one, count in zip(sequences, counts, strict=True) if not count]
        for sequence in left:
            sequence.suggestions.do_not_draft()
        return left

    def _draft_counts(self, sequences: list[Sequence], rates: _Rates, budget: int) -> list[int]:
        """How many tokens to draft for each: a step of the draft makes one more for all those for
        whom it may come."""
        counts = [0] * len(sequences)
        if self._draft is None:
            return counts
        step_s, row_s, num_tokens = rates
        chances = [sequence.suggestions.draft_chance() for sequence in sequences]
        levels = [1.0] * len(sequences)
        alive = list(range(len(sequences)))
        for count in range(1, MOST_DRAFTED + 1):
            alive = [i for i in alive if _room(sequences[i]) >= count][:budget]
            for i in alive:
                levels[i] *= chances[i]
            alive = [i for i in alive if levels[i] * step_s >= row_s * _MARGIN * num_tokens]
            context = sum([sequences[i].num_computed_tokens for i in alive])
            gained = sum([levels[i] for i in alive])
            taken_s = self._draft.step_s(len(alive), context) + row_s * len(alive)
            if not alive or gained * step_s < taken_s * _MARGIN * num_tokens:
                break
            budget -= len(alive)
            num_tokens += gained
            step_s += taken_s
            for i in alive:
                counts[i] = count
        return counts

    def _suits(self, sequence: Sequence) -> bool:
        """Whether host and device say the same of it, where the host draws in place of a device:
        its log-probabilities may be others in the last digit."""
        return self._max_drawn_rows is None or sequence.request.sampling.logprobs is None

    def _budget(self, plan: list[ScheduledSequence], row_s: float) -> int:
        """How many rows more a step may have."""
        budget = self._max_batch_tokens - sum([num_tokens for _, num_tokens in plan])
        if self._max_drawn_rows is not None:
            budget = min(budget, self._max_drawn_rows - len(plan))
        if self._itl_bound_s is None or not self._costs.is_warm or row_s <= 0:
            return budget
        left_s = self._itl_bound_s - self._costs.step_s(StepWork.of(plan))
        return min(budget, max(0, int(left_s / row_s)))

    def _times(self, decoding: list[Sequence]) -> tuple[float, float]:
        """What the part of a step takes that decodes, and what another row adds to it."""
        num_rows = len(decoding)
        if not self._costs.is_warm:
            return 1.0 + _ASSUMED_SHARE * (num_rows - 1), _ASSUMED_SHARE
        context = sum([sequence.num_computed_tokens for sequence in decoding])
        step_s = self._costs.step_s(StepWork(0, num_rows, context))
        more = StepWork(0, num_rows + 1, context + context // num_rows)
        return step_s, self._costs.step_s(more) - step_s

    def _chances(self, sequence: Sequence) -> list[float] | None:
        """That each of the tokens suggested for a sequence comes, with all before it; None if it is
        not looked at."""
        suggestions: Suggestions | None = sequence.suggestions
        if suggestions is None:
            if not _may_speculate(sequence) or not self._suits(sequence):
                return None
            suggestions = sequence.suggestions = Suggestions(sequence, self._acceptance)
        if suggestions.rests():
            return None
        try:
            suggestions.renew(sequence)
        except Exception:  # noqa: BLE001 (whatever it is, the sequence goes on without)
            _log.exception("no tokens could be suggested for a sequence")
            suggestions.give_up()
        return suggestions.chances()


def _may_speculate(sequence: Sequence) -> bool:
    """Whether it draws its tokens one by one, and has drawn one already: the first brings more
    with it than a token."""
    request = sequence.request
    return (
        sequence.started
        and sequence.fork_group is None
        and not sequence.forks
        and request.pooling is None
        and sequence.prompt_logprobs is None
        and sequence.num_output_tokens > len(request.output_token_ids)
    )


def _room(sequence: Sequence) -> int:
    """How many tokens may come besides the next."""
    return sequence.max_total_tokens - sequence.num_tokens - 1


# So many times in a row nothing is proposed before steps overlap again, and for so many steps.
_PATIENCE, _REST = 4, 8


class Pace:
    """Tokens are proposed behind tokens that are known, so before a step that may have proposals
    the one before it is read, and the device waits for the host meanwhile.

    That goes on as long as something is proposed. Once it was not ``_PATIENCE`` times in a row,
    ``_REST`` steps overlap for each one that is looked at.
    """

    def __init__(self) -> None:
        self._num_vain = 0
        self._num_overlapped = 0

    def note(self, *, proposed: bool) -> None:
        """Proposals were looked for, and some made or none."""
        self._num_vain = 0 if proposed else self._num_vain + 1

    def waits(self) -> bool:
        """Whether to read the step that was launched before the next one; to be called once for
        each that could overlap."""
        if self._num_vain < _PATIENCE:
            return True
        self._num_overlapped += 1
        if self._num_overlapped <= _REST:
            return False
        self._num_overlapped = 0
        return True
