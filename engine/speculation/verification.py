"""Verification of proposed tokens: draws the tokens of a step while they equal the proposed
ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch

from millrace.engine.grammar.grammars import Grammars
from millrace.engine.sampling.sampler import Sampled
from millrace.engine.scheduling.planner import Planner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.output_processor import OutputProcessor
from millrace.engine.step.runner import InFlightStep
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import EngineOutput

_log = logging.getLogger(__name__)


class Verified(NamedTuple):
    """Numbers of proposed and of accepted tokens of a step."""

    num_proposed: int = 0
    num_accepted: int = 0


class _Span(NamedTuple):
    """Sequence with proposed tokens: the first of its rows of logits, and the number of proposed
    tokens after which a token may be drawn."""

    sequence: Sequence
    row: int
    num_usable: int

    @property
    def is_plain(self) -> bool:
        """True if its rows have no grammar or logits processor, which depend on the tokens
        before."""
        sequence = self.sequence
        return sequence.matcher is None and sequence.sampling_state.logits_processor is None


class Verification:
    """Sampling of a step's sequences, with verification of proposed tokens.

    If the drawn token equals the proposed one, the next row was computed from the right token, and
    the next token is drawn from it at once. Each draw uses the same sampler, with the random
    numbers of its position, and with grammar and penalties in the state after the tokens before it.
    So it equals the draw without proposals, as long as a row's logits are batch-invariant.
    Sequences without grammar and penalties draw from all their rows at once. Blocks of rejected
    tokens are freed here.
    """

    def __init__(
        self, planner: Planner, output_processor: OutputProcessor, grammars: Grammars
    ) -> None:
        self._planner = planner
        self._output_processor = output_processor
        self._grammars = grammars

    def apply(self, step: InFlightStep, outputs: list[EngineOutput]) -> Verified:
        """Draw all tokens that can be drawn from a step's logits."""
        sequences, logits = step.by_host, step.logits
        num_first = len(sequences)
        spans = _spans(sequences, logits) if len(logits) > num_first else []
        self._output_processor.sample(sequences, logits[:num_first], outputs)
        if not spans:
            return Verified()
        num_accepted = ahead = 0
        alive = [span for span in spans if self._is_accepted(span, 0)]
        chosen = self._choose_ahead([span for span in alive if span.is_plain], logits)
        while alive:
            edited = [span for span in alive if span.row not in chosen]
            own = _select(logits, [span.row + ahead for span in edited]) if edited else None
            if edited and own is None:
                alive = [span for span in alive if span.row in chosen]
                edited = []
            ahead += 1
            num_accepted += len(alive)
            self._planner.advance([ScheduledSequence(span.sequence, 1) for span in alive])
            for span in alive:
                if span.row in chosen:
                    self._accept(span, chosen[span.row], outputs, ahead)
            if own is not None:
                self._output_processor.sample([s.sequence for s in edited], own, outputs, ahead)
            alive = [span for span in alive if self._is_accepted(span, ahead)]
        for span in spans:
            span.sequence.proposed = []
            if span.sequence.state is SequenceState.RUNNING:
                self._planner.tables.free_ahead(span.sequence)
        return Verified(len(logits) - num_first, num_accepted)

    def _choose_ahead(self, spans: list[_Span], logits: torch.Tensor) -> dict[int, Sampled]:
        """Draw from all rows of spans at once; return the results by the spans' first rows.

        Returns {} if that fails; the tokens are then drawn row by row.
        """
        if not spans:
            return {}
        places = [(span, ahead) for span in spans for ahead in range(span.num_usable)]
        own = _select(logits, [span.row + ahead for span, ahead in places])
        if own is None:
            return {}
        sequences, ahead = [span.sequence for span, _ in places], [ahead for _, ahead in places]
        try:
            sampled = self._output_processor.sampler.sample_ahead(sequences, own, ahead)
        except Exception:  # noqa: BLE001 (tokens are then drawn one by one)
            _log.exception("drawing proposed tokens at once failed")
            return {}
        chosen: dict[int, Sampled] = {}
        begin = 0
        for span in spans:
            end = begin + span.num_usable
            chosen[span.row] = Sampled(sampled.outcomes[begin:end], sampled.logprobs[begin:end])
            begin = end
        return chosen

    def _accept(
        self, span: _Span, sampled: Sampled, outputs: list[EngineOutput], ahead: int
    ) -> None:
        place = slice(ahead - 1, ahead)
        one = Sampled(sampled.outcomes[place], sampled.logprobs[place])
        self._output_processor.accept([span.sequence], one, outputs, ahead)

    def drop(self, plan: Iterable[ScheduledSequence]) -> None:
        """Drop the proposed tokens of a plan that is not computed yet."""
        for sequence, _ in plan:
            if sequence.proposed:
                sequence.proposed = []
                self._planner.tables.free_ahead(sequence, 1)

    def _is_accepted(self, span: _Span, ahead: int) -> bool:
        """Return whether the last drawn token is the proposed one number ``ahead``, and another can
        be drawn after it."""
        sequence = span.sequence
        if ahead >= span.num_usable or sequence.state is not SequenceState.RUNNING:
            return False
        if sequence.token_ids[-1] != sequence.proposed[ahead]:
            return False
        return sequence.matcher is None or ahead < self._grammars.num_ahead(sequence)


def _spans(sequences: list[Sequence], logits: torch.Tensor) -> list[_Span]:
    """Return the sequences with proposed tokens.

    Their rows of logits come after the sequences' own rows.
    """
    first = len(sequences)
    finite = _finite(logits[first:])
    spans: list[_Span] = []
    row = first
    for sequence in sequences:
        count = len(sequence.proposed)
        if count == 0:
            continue
        own = finite[row - first : row - first + count]
        if not all(own):
            # These rows may never be drawn from, but their keys and values are in the sequence's
            # blocks. If the sequence reaches this token, it computes it again and fails then.
            sequence.contents_finite = False
            count = own.index(False)
        spans.append(_Span(sequence, row, count))
        row += len(own)
    return spans


def _finite(logits: torch.Tensor) -> list[bool]:
    """Return for each row whether it is finite; all False if that fails."""
    try:
        with torch.inference_mode():
            finite: list[bool] = torch.isfinite(logits.amax(-1)).tolist()
    except Exception:  # noqa: BLE001 (tokens are then drawn one a step)
        _log.exception("checking the logits of proposed tokens failed")
        return [False] * len(logits)
    return finite


def _select(logits: torch.Tensor, rows: list[int]) -> torch.Tensor | None:
    """Select rows; None if there is no memory for them. The tokens are then drawn later."""
    try:
        with torch.inference_mode():
            return logits.index_select(0, torch.tensor(rows, device=logits.device))
    except Exception:  # noqa: BLE001 (tokens are then drawn one a step)
        _log.exception("selecting the logits of proposed tokens failed")
        return None
