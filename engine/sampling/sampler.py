"""Sampler of the next token of every sequence of a batch, vectorised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from math import inf, isfinite
from operator import is_
from typing import NamedTuple

import torch

from millrace.engine.sampling.bad_words import bad_words_reader
from millrace.engine.sampling.drawing import Draws, draw, draws_of
from millrace.engine.sampling.groups import GROUP_TOKENS, GroupedLogits, largest, num_groups
from millrace.engine.sampling.logits_processors import (
    LogitsProcessorBatch,
    RowLogitsProcessor,
    needs_logits_processor,
)
from millrace.engine.sampling.logprobs import LogprobTable, tabulate
from millrace.engine.step.outputs import as_millrace_error
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import NonFiniteLogitsError
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.sampling import SamplingParams

_BITS_PER_BYTE = 8
_log = logging.getLogger(__name__)

# Finds the first of the largest logits of each row; -1 where that is not finite.
Likeliest = Callable[[torch.Tensor], list[int]]

# Rows are processed in chunks of about this many logits, which stay in the CPU's cache from one
# pass to the next.
_CHUNK_LOGITS = 1 << 20


class NoTokenAllowedError(MillraceError, code="no_token_allowed", http_status=400):
    """Error of a sequence whose parameters forbid every next token."""

    def __init__(self, token_index: int) -> None:
        super().__init__(
            f"No token is allowed as token {token_index} of the completion: bad_words, min_tokens, "
            f"logit_bias, allowed_token_ids and the grammar together forbid all. Relax one of them."
        )
        self.token_index = token_index


class TokenMasks:
    """Applies packed masks: a word is 32 tokens, the lowest bit the first of them; 1 means allowed.

    Each byte of a mask is looked up in a table of what it adds to eight logits: 0 or -inf.
    """

    def __init__(self, device: torch.device) -> None:
        values = torch.arange(1 << _BITS_PER_BYTE, device=device)
        bits = (values[:, None] >> torch.arange(_BITS_PER_BYTE, device=device)) & 1
        self._added = torch.zeros(bits.shape, device=device).masked_fill_(bits == 0, -inf)

    def apply_(self, logits: torch.Tensor, rows: list[int], masks: torch.Tensor) -> None:
        """Forbid tokens in the ``rows`` of ``logits`` in place.

        Args:
            logits: [num_rows, num_tokens].
            rows: The rows with a mask.
            masks: int32 [num_rows, num_words], the mask of a row in the same row. Tokens past the
                mask are forbidden.
        """
        words = masks[torch.tensor(rows)].contiguous().to(logits.device)
        chosen = words.view(torch.uint8).view(len(rows), -1).int()
        num_tokens = logits.shape[1]
        added = self._added.index_select(0, chosen.view(-1)).view(len(rows), -1)
        width = min(num_tokens, added.shape[1])
        for place, row in enumerate(rows):
            logits[row, :width] += added[place, :width]
            logits[row, width:] = -inf


class Sampled(NamedTuple):
    """Result of sampling: ``outcomes[i]`` is the token of row i, or its error.

    ``logprobs[i]`` is None unless asked for.
    """

    outcomes: list[int | MillraceError]
    logprobs: list[TokenLogprob | None]


class SamplingState(NamedTuple):
    """State of the sampler for a sequence: parameters, the key of its random stream, and its logits
    processor, None without one."""

    sampling: SamplingParams
    key: int
    logits_processor: RowLogitsProcessor | None


class _Layout(NamedTuple):
    """Layout of a chunk of a batch. It is reused while the chunk has the same sequences.

    Attributes:
        draws: None if all rows are greedy.
        logprob_rows, logprob_counts: Rows that report log-probabilities, and how many.
        processed_rows: Rows with a logits processor.
        masked_rows: Rows with a grammar.
        only_likeliest: True if each row needs only its likeliest token.
    """

    states: list[SamplingState]
    drawn_rows: list[int]
    draws: Draws | None
    logprob_rows: list[int]
    logprob_counts: list[int]
    processed_rows: list[int]
    masked_rows: list[int]
    only_likeliest: bool


class Sampler:
    """Sampler that applies temperature, top-k, top-p, min-p and typical sampling, in this order.

    The logits are processed before: repetition penalty, then presence and frequency penalties, then
    biases, then forbidden tokens. A row's token depends only on its logits, its sequence's
    parameters and tokens, and its position in the sequence's random stream. The state of a sequence
    is in ``sequence.sampling_state``, from ``add`` until the sequence ends.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
        likeliest: Likeliest | None = None,
    ) -> None:
        self._likeliest = likeliest
        self._vocab_size = vocab_size
        self._device = device
        self._read_bad_words = bad_words_reader(tokenizer, vocab_size)
        self._masks = TokenMasks(device)
        self._num_groups = num_groups(vocab_size)
        self._stride = self._num_groups * GROUP_TOKENS
        self._chunk_rows = max(1, _CHUNK_LOGITS // self._stride)
        self._scratch = torch.empty(0, self._stride, device=device)
        self._layouts: list[_Layout] = []

    def add(self, sequence: Sequence) -> None:
        """Prepare a sequence with its present tokens.

        Raises ParameterError for parameters that this model cannot apply.
        """
        sampling = sequence.request.sampling
        for name in ("logit_bias", "allowed_token_ids"):
            for token in getattr(sampling, name):
                if token >= self._vocab_size:
                    raise ParameterError(
                        name,
                        f"Token id {token} is not in the vocabulary of {self._vocab_size} tokens.",
                    )
        logits_processor = None
        if needs_logits_processor(sampling):
            words = self._read_bad_words(sampling.bad_words) if sampling.bad_words else None
            logits_processor = RowLogitsProcessor(sequence, words, self._vocab_size)
        sequence.sampling_state = SamplingState(sampling, sequence.key, logits_processor)

    def sample_ahead(
        self, sequences: Rows[Sequence], logits: torch.Tensor, ahead: Rows[int]
    ) -> Sampled:
        """Sample tokens after proposed ones, for sequences without logits processors and grammars.

        As ``sample``, but a sequence may occur several times: ``ahead`` is the number of tokens
        between its next token and the sampled one.
        """
        sampled = Sampled([], [])
        with torch.inference_mode():
            for start in range(0, len(sequences), self._chunk_rows):
                rows = slice(start, start + self._chunk_rows)
                layout = self._laid_out([one.sampling_state for one in sequences[rows]])
                chosen = self._sample_rows(sequences[rows], logits[rows], None, layout, ahead[rows])
                sampled.outcomes.extend(chosen.outcomes)
                sampled.logprobs.extend(chosen.logprobs)
        return sampled

    def sample(
        self, sequences: Rows[Sequence], logits: torch.Tensor, masks: torch.Tensor | None = None
    ) -> Sampled:
        """Choose the next token of each sequence. An error of a row is that row's outcome only.

        Args:
            sequences: The sequences.
            logits: Their rows, [num_sequences, vocab_size]; not changed.
            masks: int32 [num_sequences, num_words], one bit per token, the lowest first. Used for
                sequences with a grammar.
        """
        sampled = Sampled([], [])
        with torch.inference_mode():
            for index, start in enumerate(range(0, len(sequences), self._chunk_rows)):
                rows = slice(start, start + self._chunk_rows)
                own = None if masks is None else masks[rows]
                self._sample_safely(sequences[rows], logits[rows], own, index, sampled)
            # Drop layouts of chunks that no longer exist, which hold the state of their sequences.
            del self._layouts[-(-len(sequences) // self._chunk_rows) :]
        return sampled

    def _sample_safely(
        self,
        sequences: Rows[Sequence],
        logits: torch.Tensor,
        masks: torch.Tensor | None,
        index: int,
        sampled: Sampled,
    ) -> None:
        """Sample a chunk; if that fails, halve it until each failing sequence is alone."""
        try:
            layout = self._layout(sequences, index)
            outcomes, logprobs = self._sample_rows(sequences, logits, masks, layout)
        except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
            if len(sequences) > 1:
                middle = len(sequences) // 2
                for half in (slice(middle), slice(middle, None)):
                    own = None if masks is None else masks[half]
                    self._sample_safely(sequences[half], logits[half], own, index, sampled)
                return
            _log.exception("sampling failed on one sequence")
            outcomes, logprobs = [as_millrace_error(error)], [None]
        sampled.outcomes.extend(outcomes)
        sampled.logprobs.extend(logprobs)

    def _sample_rows(
        self,
        sequences: Rows[Sequence],
        raw: torch.Tensor,
        masks: torch.Tensor | None,
        layout: _Layout,
        ahead: Rows[int] | None = None,
    ) -> Sampled:
        if layout.only_likeliest and self._likeliest is not None:
            best = self._likeliest(raw)
            if min(best) >= 0:
                return Sampled([*best], [None] * len(best))
        logits = largest(self._copy(raw))
        outcomes: dict[int, MillraceError] = {}
        for row in _not_finite(logits.best):
            outcomes[row] = NonFiniteLogitsError(sequences[row].num_output_tokens)
            _neutralise(logits, row)
        table = self._table(logits, layout)
        if layout.processed_rows or (masks is not None and layout.masked_rows):
            logits = self._edited(logits, sequences, layout, masks)
            for row in _not_finite(logits.best):
                outcomes[row] = NoTokenAllowedError(sequences[row].num_output_tokens)
                _neutralise(logits, row)
        tokens = self._choose(logits, sequences, layout, ahead)
        logprobs = _report(raw, layout, table, tokens)
        for row in outcomes:
            logprobs[row] = None
        return Sampled([outcomes.get(row, token) for row, token in enumerate(tokens)], logprobs)

    def _choose(
        self,
        logits: GroupedLogits,
        sequences: Rows[Sequence],
        layout: _Layout,
        ahead: Rows[int] | None,
    ) -> list[int]:
        if layout.draws is None:
            chosen = logits.likeliest()
        else:
            indices = [sequences[row].num_output_tokens for row in layout.drawn_rows]
            if ahead is not None:
                indices = [
                    i + ahead[row] for i, row in zip(indices, layout.drawn_rows, strict=True)
                ]
            token_indices = torch.tensor(indices, device=self._device)
            chosen = draw(logits, layout.draws, token_indices)
            if len(indices) < len(sequences):
                chosen = logits.likeliest().index_copy_(0, layout.draws.rows, chosen)
        tokens: list[int] = chosen.tolist()
        return tokens

    def _copy(self, raw: torch.Tensor) -> torch.Tensor:
        """Copy ``raw`` to float32 groups, in scratch memory that is valid until the next copy."""
        if len(raw) > len(self._scratch):
            self._scratch = torch.full((len(raw), self._stride), -inf, device=self._device)
        rows = self._scratch[: len(raw)]
        rows[:, : self._vocab_size] = raw
        return rows.view(len(raw), self._num_groups, GROUP_TOKENS)

    def _layout(self, sequences: Rows[Sequence], index: int) -> _Layout:
        """Return the layout of chunk ``index``, that of the last step if the sequences are the
        same."""
        states: list[SamplingState] = [sequence.sampling_state for sequence in sequences]
        if index < len(self._layouts):
            known = self._layouts[index].states
            if len(known) == len(states) and all(map(is_, known, states)):
                return self._layouts[index]
        layout = self._laid_out(states)
        self._layouts[index:] = [layout, *self._layouts[index + 1 :]]
        return layout

    def _laid_out(self, states: list[SamplingState]) -> _Layout:
        drawn = [i for i, s in enumerate(states) if s.sampling.temperature > 0]
        reported = [i for i, s in enumerate(states) if s.sampling.logprobs is not None]
        processed = [i for i, s in enumerate(states) if s.logits_processor is not None]
        masked = [i for i, s in enumerate(states) if s.sampling.is_guided]
        return _Layout(
            states=states,
            drawn_rows=drawn,
            draws=draws_of(
                drawn,
                [states[i].sampling for i in drawn],
                [states[i].key for i in drawn],
                self._vocab_size,
                self._device,
            )
            if drawn
            else None,
            logprob_rows=reported,
            logprob_counts=[states[i].sampling.logprobs or 0 for i in reported],
            processed_rows=processed,
            masked_rows=masked,
            only_likeliest=not (drawn or reported or processed or masked),
        )

    def _table(self, logits: GroupedLogits, layout: _Layout) -> LogprobTable | None:
        if not layout.logprob_rows:
            return None
        rows = torch.tensor(layout.logprob_rows, device=self._device)
        return tabulate(logits, rows, max(layout.logprob_counts), self._vocab_size)

    def _edited(
        self,
        logits: GroupedLogits,
        sequences: Rows[Sequence],
        layout: _Layout,
        masks: torch.Tensor | None,
    ) -> GroupedLogits:
        """Process the logits in place, and find their largest."""
        batch = LogitsProcessorBatch(self._stride)
        for row in layout.processed_rows:
            processor = layout.states[row].logits_processor
            assert processor is not None
            processor.add_to(batch, row, sequences[row])
        rows = logits.members.view(-1, self._stride)
        batch.apply_(rows)
        touched = batch.rows
        if masks is not None and layout.masked_rows:
            self._masks.apply_(rows[:, : self._vocab_size], layout.masked_rows, masks)
            touched = touched.union(layout.masked_rows)
        if 2 * len(touched) > len(sequences):
            return largest(logits.members)
        for row in touched:
            torch.amax(logits.members[row], -1, out=logits.tops[row])
        return GroupedLogits(logits.members, logits.tops, logits.tops.amax(-1))


def _not_finite(values: torch.Tensor) -> list[int]:
    listed: list[float] = values.tolist()
    if isfinite(sum(listed)):
        return []
    return [row for row, value in enumerate(listed) if not isfinite(value)]


def _neutralise(logits: GroupedLogits, row: int) -> None:
    """Neutralise a row without a token, so that it does not disturb other rows: its token is 0."""
    logits.members[row] = -inf
    logits.tops[row] = -inf
    logits.members[row, 0, 0] = logits.tops[row, 0] = logits.best[row] = 0.0


def _report(
    raw: torch.Tensor, layout: _Layout, table: LogprobTable | None, tokens: list[int]
) -> list[TokenLogprob | None]:
    logprobs: list[TokenLogprob | None] = [None] * len(tokens)
    if table is not None:
        chosen = [tokens[row] for row in layout.logprob_rows]
        own = raw[layout.logprob_rows, chosen]
        entries = table.entries(own, chosen, layout.logprob_counts)
        for row, entry in zip(layout.logprob_rows, entries, strict=True):
            logprobs[row] = entry
    return logprobs
