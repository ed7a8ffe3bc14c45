"""Masks of the tokens that a step's grammars allow, filled while the model runs."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Sequence as Rows

import torch

from millrace.engine.grammar.library import Matcher
from millrace.engine.grammar.reasoning import ReasoningMatcher
from millrace.engine.step.sequence import Sequence
from millrace.engine.threads.tasks import TaskThreads
from millrace.schemas.errors import GrammarError

_MAX_THREADS = 4
_ROWS_AT_LEAST = 8
_ALL = -1
_log = logging.getLogger(__name__)
_NONE: frozenset[int] = frozenset()


class MaskFiller:
    """Filler of the masks of the sequences that a step will sample, on threads of its own.

    Call ``begin``, and ``take`` once the model has run; in between, the sequences' matchers belong
    to the threads. A mask is int32 [num_words]: bit i % 32 of word i // 32 allows token i. Tokens
    that a sequence ignores or may not end with yet are forbidden if other tokens are allowed;
    otherwise the matcher sets ``must_end``. A sequence has a mask for its next token, and one after
    each of its proposed tokens as long as its grammar allows them.
    """

    def __init__(self, num_words: int, eos_token_ids: Rows[int]) -> None:
        self._num_words = num_words
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._threads = TaskThreads("grammar-masks", self._num_threads)
        self._buffer = torch.empty((0, num_words), dtype=torch.int32)
        self._rows: dict[Sequence, int] = {}
        self._num_ahead: dict[Sequence, int] = {}
        self._must_end: dict[int, bool] = {}
        self._pending = _Countdown(0)

    def begin(self, sequences: Rows[Sequence]) -> None:
        """Start to fill the masks of sequences, all of which have a matcher."""
        self._pending.wait()
        self._rows, self._num_ahead, self._must_end = {}, {}, {}
        num_rows = 0
        for sequence in sequences:
            self._rows[sequence] = num_rows
            num_rows += 1 + len(sequence.proposed)
        if len(self._buffer) <= num_rows:
            # The last row allows everything, for sequences without a grammar.
            shape = num_rows + 1, self._num_words
            self._buffer = torch.full(shape, _ALL, dtype=torch.int32)
        share = max(_ROWS_AT_LEAST, -(-len(sequences) // self._num_threads))
        starts = range(0, len(sequences), share)
        self._pending = pending = _Countdown(len(starts))
        for start in starts:
            part = sequences[start : start + share]
            self._threads.submit(functools.partial(self._fill, part, pending))

    def take(self, sequences: Rows[Sequence], ahead: int = 0) -> torch.Tensor:
        """Wait for the masks after ``ahead`` proposed tokens of each sequence.

        Rows of sequences without a matcher allow everything. Sequences with a matcher must have
        been passed to ``begin``, and have that many masks.

        Returns:
            [len(sequences), num_words], valid until the next ``begin``.
        """
        free = len(self._buffer) - 1 - ahead
        rows = [self._rows.get(sequence, free) + ahead for sequence in sequences]
        self._pending.wait()
        for sequence, row in zip(sequences, rows, strict=True):
            if row in self._must_end:
                sequence.matcher.must_end = self._must_end[row]
        return self._buffer.index_select(0, torch.tensor(rows))

    def num_ahead(self, sequence: Sequence) -> int:
        """Return after how many of its proposed tokens a sequence has masks.

        Known after ``take``.
        """
        return self._num_ahead.get(sequence, 0)

    def _fill(self, sequences: Rows[Sequence], pending: _Countdown) -> None:
        first, last = self._rows[sequences[0]], sequences[-1]
        masks = self._buffer[first : self._rows[last] + 1 + len(last.proposed)]
        try:
            address, row_bytes = self._buffer.data_ptr(), 4 * self._num_words
            for sequence in sequences:
                matcher: Matcher | ReasoningMatcher = sequence.matcher
                row = self._rows[sequence]
                matcher.fill_mask(address + row * row_bytes, self._num_words)
                if sequence.proposed:
                    self._fill_ahead(sequence, row)
            self._withhold(sequences)
        except Exception:  # noqa: BLE001 (any error ends these sequences only)
            # All tokens are forbidden then, which ends these sequences when they are sampled.
            _log.exception("the masks of grammars could not be filled")
            masks.zero_()
        finally:
            pending.count_down()

    def _fill_ahead(self, sequence: Sequence, row: int) -> None:
        """Fill the masks after the proposed tokens of a sequence, from ``row`` on."""
        matcher: Matcher | ReasoningMatcher = sequence.matcher.copy()
        address, row_bytes = self._buffer.data_ptr(), 4 * self._num_words
        for ahead, token_id in enumerate(sequence.proposed):
            word = int(self._buffer[row + ahead, token_id // 32])
            if not word >> token_id % 32 & 1:
                return
            try:
                matcher.accept((token_id,))
            except GrammarError:
                return  # the error is raised when the sequence gets there
            if matcher.complete:
                return
            matcher.fill_mask(address + (row + ahead + 1) * row_bytes, self._num_words)
            if matcher.error is not None:
                return
            self._num_ahead[sequence] = ahead + 1

    def _withhold(self, sequences: Rows[Sequence]) -> None:
        """Forbid tokens that would end a sequence too early, if other tokens are allowed."""
        rows: list[int] = []
        kept: list[torch.Tensor] = []
        for sequence in sequences:
            sampling = sequence.request.sampling
            ignored = self._eos_token_ids if sampling.ignore_eos else _NONE
            for ahead in range(1 + self._num_ahead.get(sequence, 0)):
                withheld = ignored
                if sequence.num_output_tokens + ahead < sampling.min_tokens:
                    withheld |= sequence.stop_token_ids
                if withheld:
                    rows.append(self._rows[sequence] + ahead)
                    kept.append(_without(withheld, self._num_words))
        if not rows:
            return
        masks = self._buffer
        index = torch.tensor(rows)
        own = masks.index_select(0, index)
        others = own & torch.stack(kept)
        must_end = ~others.any(-1, keepdim=True)
        masks.index_copy_(0, index, torch.where(must_end, own, others))
        self._must_end.update(zip(rows, must_end[:, 0].tolist(), strict=True))


class _Countdown:
    """Event that is set when its count reaches 0."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        if count == 0:
            self._done.set()

    def count_down(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._done.set()

    def wait(self) -> None:
        self._done.wait()


@functools.lru_cache(maxsize=64)
def _without(token_ids: frozenset[int], num_words: int) -> torch.Tensor:
    """Return the mask that allows every token except these: int32 [num_words]."""
    words = [_ALL] * num_words
    for token_id in token_ids:
        if token_id >= 32 * num_words:
            continue
        word = (words[token_id // 32] & 0xFFFFFFFF) & ~(1 << token_id % 32)
        words[token_id // 32] = word - (1 << 32) if word >> 31 else word
    return torch.tensor(words, dtype=torch.int32)
