"""Speculator: proposes as many tokens for decoding sequences as save time."""

from __future__ import annotations

import logging
from typing import NamedTuple

from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.scheduling.cost_model import CostModel, StepWork
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.speculation.draft import Draft
from millrace.engine.speculation.suggestions import Acceptance, Suggestions
from millrace.engine.step.sequence import Sequence

# Assumed time of another row as a share of a step of one row, before the first measurement.
_ASSUMED_SHARE = 0.06
# Minimum ratio of a proposed token's predicted value to its cost, since predictions are inexact.
_MARGIN = 1.1
# Seconds to look at a sequence, and the maximum share of a step for looking where proposing does
# not pay.
_LOOK_S, _LOOK_SHARE = 10e-6, 0.005

# Maximum drafted tokens of a sequence per step; more are never worth the draft's steps.
MOST_DRAFTED = 8

_log = logging.getLogger(__name__)


class _Rates(NamedTuple):
    """Prediction for the decoding part of a step: its seconds, the seconds of another row, and the
    tokens that it makes, with present proposals."""

    step_s: float
    row_s: float
    num_tokens: float


class Speculator:
    """Speculator that proposes tokens for decoding sequences.

    Proposed tokens are computed in the same step, one row each, and accepted as long as the drawn
    tokens are the same. A row adds time to the step, and adds a token with the probability that all
    proposed tokens up to it are accepted. It is proposed if it makes tokens faster than the step
    does without it: the rate is ``tokens / seconds`` of the decoding part, as ``costs`` predicts
    it. Where many rows already share the reading of the weights, another row pays less, so at high
    load nothing is proposed.

    The rows use the rest of a step's budget, and free blocks that no sequence needs. With
    ``itl_bound_s``, proposals make no step longer than that. If a device draws tokens itself, the
    host draws those after proposed ones; then a step has at most ``max_drawn_rows`` rows to draw
    from.
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
        """Set the ``proposed`` tokens of the sequences of a plan; allocate their slots."""
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
                break  # even a certain token would not pay
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
        """Propose tokens of a draft where they pay. Return the sequences where they do not."""
        counts = self._draft_counts(sequences, rates, budget)
        wanted = [
            (sequence, self._tables.allocate_ahead(sequence, count))
            for sequence, count in zip(sequences, counts, strict=True)
            if count
        ]
        if self._draft is not None and wanted:
            try:
                proposals = self._draft.draft(wanted)
            except Exception:  # noqa: BLE001 (the sequences go on without proposals)
                _log.exception("the draft failed")
                proposals = [[] for _ in wanted]
            for (sequence, _), token_ids in zip(wanted, proposals, strict=True):
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
        """Return the number of tokens to draft for each sequence.

        One step of the draft makes one more token for each sequence that is still likely to accept
        it.
        """
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
        """Return whether the host may draw for the sequence in place of a device.

        Not with log-probabilities, whose last digits may differ between host and device.
        """
        return self._max_drawn_rows is None or sequence.request.sampling.logprobs is None

    def _budget(self, plan: list[ScheduledSequence], row_s: float) -> int:
        """Return how many rows may be added to a step."""
        budget = self._max_batch_tokens - sum([num_tokens for _, num_tokens in plan])
        if self._max_drawn_rows is not None:
            budget = min(budget, self._max_drawn_rows - len(plan))
        if self._itl_bound_s is None or not self._costs.is_warm or row_s <= 0:
            return budget
        left_s = self._itl_bound_s - self._costs.step_s(StepWork.of(plan))
        return min(budget, max(0, int(left_s / row_s)))

    def _times(self, decoding: list[Sequence]) -> tuple[float, float]:
        """Predict the seconds of the decoding part of a step, and of another row."""
        num_rows = len(decoding)
        if not self._costs.is_warm:
            return 1.0 + _ASSUMED_SHARE * (num_rows - 1), _ASSUMED_SHARE
        context = sum([sequence.num_computed_tokens for sequence in decoding])
        step_s = self._costs.step_s(StepWork(0, num_rows, context))
        more = StepWork(0, num_rows + 1, context + context // num_rows)
        return step_s, self._costs.step_s(more) - step_s

    def _chances(self, sequence: Sequence) -> list[float] | None:
        """Return for each suggested token the estimated probability that it and all before it
        are accepted.

        Returns None for a sequence that proposes no tokens in this step.
        """
        suggestions: Suggestions | None = sequence.suggestions
        if suggestions is None:
            if not _may_speculate(sequence) or not self._suits(sequence):
                return None
            suggestions = sequence.suggestions = Suggestions(sequence, self._acceptance)
        if suggestions.rests():
            return None
        try:
            suggestions.renew(sequence)
        except Exception:  # noqa: BLE001 (the sequence goes on without proposals)
            _log.exception("suggesting tokens for a sequence failed")
            suggestions.give_up()
        return suggestions.chances()


def _may_speculate(sequence: Sequence) -> bool:
    """Return whether a sequence draws tokens one by one, and has drawn one in this engine.

    The first token has other outputs with it.
    """
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
    """Return how many tokens may follow the next one."""
    return sequence.max_total_tokens - sequence.num_tokens - 1


# After this many steps in a row without proposals, steps overlap again, for this many steps.
_PATIENCE, _REST = 4, 8


class Pace:
    """Pace of steps that may have proposals.

    Tokens can only be proposed after known tokens. So the step before must be read first, and the
    device waits for the host. This continues while tokens are proposed. After ``_PATIENCE`` steps
    in a row without proposals, ``_REST`` steps overlap for each step that looks for proposals.
    """

    def __init__(self) -> None:
        self._num_without_proposals = 0
        self._num_overlapped = 0

    def note(self, *, proposed: bool) -> None:
        """Note whether a step that looked for proposals made any."""
        self._num_without_proposals = 0 if proposed else self._num_without_proposals + 1

    def waits(self) -> bool:
        """Return whether to read the launched step before the next launch.

        Call it once for each step that could overlap.
        """
        if self._num_without_proposals < _PATIENCE:
            return True
        self._num_overlapped += 1
        if self._num_overlapped <= _REST:
            return False
        self._num_overlapped = 0
        return True
