"""Logits processors: changes to a request's logits before a token is chosen.

They change single tokens, few compared to the vocabulary. The edits of all rows of a batch are
therefore collected as flat indices and applied together.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millrace.engine.sampling.bad_words import BadWords
from millrace.engine.step.sequence import Sequence
from millrace.schemas.sampling import SamplingParams

_Ids = npt.NDArray[np.int64]
_Amounts = npt.NDArray[np.float32]


class Penalties:
    """Tokens of a sequence, and the penalties of each.

    ``repetition`` applies to the tokens of prompt and completion. Presence and frequency penalties,
    added up in ``amounts``, apply to those of the completion. There is one entry for each distinct
    token.
    """

    __slots__ = ("_amounts", "_counts", "_ids", "_num_taken", "_places", "_sampling", "repetition")

    def __init__(self, sampling: SamplingParams, prompt: list[int]) -> None:
        self._sampling = sampling
        self.repetition = sampling.repetition_penalty
        known = np.unique(np.array(prompt if self.repetition != 1 else [], dtype=np.int64))
        self._ids: _Ids = np.empty(len(known) + 64, dtype=np.int64)
        self._ids[: len(known)] = known
        self._amounts: _Amounts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(known.tolist())}
        self._counts = [0] * len(known)
        self._num_taken = len(prompt)

    def take(self, token_ids: list[int]) -> None:
        """Count the tokens since the last call.

        ``token_ids`` are all tokens of prompt and completion.
        """
        for token in token_ids[self._num_taken :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._counts):
                self._counts.append(0)
                if place == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * place)
                    self._amounts = np.resize(self._amounts, 2 * place)
                self._ids[place] = token
            self._counts[place] += 1
            self._amounts[place] = (
                self._sampling.presence_penalty
                + self._sampling.frequency_penalty * self._counts[place]
            )
        self._num_taken = len(token_ids)

    @property
    def ids(self) -> _Ids:
        return self._ids[: len(self._counts)]

    @property
    def amounts(self) -> _Amounts:
        return self._amounts[: len(self._counts)]


class RowLogitsProcessor:
    """Logits processor of one sequence. It reads the sequence's new tokens by itself."""

    def __init__(self, sequence: Sequence, bad_words: BadWords | None, vocab_size: int) -> None:
        sampling = sequence.request.sampling
        self._penalties: Penalties | None = None
        if has_penalties(sampling):
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            self._penalties = Penalties(sampling, prompt)
        self._biased: _Ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias: _Amounts = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self._bad_words = bad_words
        always = () if bad_words is None else bad_words.always
        self._forbidden: _Ids = np.array(always, dtype=np.int64)
        if sampling.allowed_token_ids:
            others = np.setdiff1d(np.arange(vocab_size), sampling.allowed_token_ids)
            self._forbidden = np.union1d(self._forbidden, others)
        self._min_tokens = sampling.min_tokens
        stops = sorted(t for t in sequence.stop_token_ids if t < vocab_size)
        self._stops: _Ids = np.array(stops, dtype=np.int64)

    def add_to(self, batch: LogitsProcessorBatch, row: int, sequence: Sequence) -> None:
        """Add the edits for the sequence's next token to those of its batch."""
        if self._penalties is not None:
            self._penalties.take(sequence.token_ids)
            batch.penalise(row, self._penalties)
        if len(self._biased):
            batch.bias(row, self._biased, self._bias)
        if len(self._forbidden):
            batch.forbid(row, self._forbidden)
        num_output_tokens = sequence.num_output_tokens
        grammar_ends = sequence.matcher is not None and sequence.matcher.must_end
        if num_output_tokens < self._min_tokens and len(self._stops) and not grammar_ends:
            batch.forbid(row, self._stops)
        if self._bad_words is not None:
            tokens = self._bad_words.completing(sequence.token_ids, num_output_tokens)
            if tokens:
                batch.forbid(row, np.array(tokens, dtype=np.int64))


def has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def needs_logits_processor(sampling: SamplingParams) -> bool:
    return bool(
        has_penalties(sampling)
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.allowed_token_ids
    )


class LogitsProcessorBatch:
    """Edits of a batch's rows, each ``stride`` logits long.

    Penalties are applied first, then biases, then forbidden tokens. ``rows`` are the rows with
    edits.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._penalised: list[_Ids] = []
        self._amounts: list[_Amounts] = []
        self._repetitions: list[float] = []
        self._biased: list[_Ids] = []
        self._biases: list[_Amounts] = []
        self._forbidden: list[_Ids] = []
        self.rows: set[int] = set()

    def penalise(self, row: int, penalties: Penalties) -> None:
        if len(penalties.ids):
            self._penalised.append(penalties.ids + row * self._stride)
            self._amounts.append(penalties.amounts)
            self._repetitions.append(penalties.repetition)
            self.rows.add(row)

    def bias(self, row: int, token_ids: _Ids, amounts: _Amounts) -> None:
        self._biased.append(token_ids + row * self._stride)
        self._biases.append(amounts)
        self.rows.add(row)

    def forbid(self, row: int, token_ids: _Ids) -> None:
        self._forbidden.append(token_ids + row * self._stride)
        self.rows.add(row)

    def apply_(self, logits: torch.Tensor) -> None:
        """Edit contiguous ``logits`` [num_rows, stride] in place."""
        flat = logits.view(-1)
        if self._penalised:
            places = self._joined(self._penalised, flat)
            values = flat.index_select(0, places)
            if any(repetition != 1 for repetition in self._repetitions):
                lengths = [len(ids) for ids in self._penalised]
                factors = np.repeat(np.array(self._repetitions, dtype=np.float32), lengths)
                factor = torch.from_numpy(factors).to(flat.device)
                values = torch.where(values > 0, values / factor, values * factor)
            flat.index_copy_(0, places, values.sub_(self._joined(self._amounts, flat)))
        if self._biased:
            places = self._joined(self._biased, flat)
            flat.index_add_(0, places, self._joined(self._biases, flat))
        if self._forbidden:
            flat.index_fill_(0, self._joined(self._forbidden, flat), -inf)

    @staticmethod
    def _joined(arrays: list[Any], like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(like.device)
