"""Sampler on the device: the state of its rows and the kernels that choose tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from millrace.engine.kernels.gpu.sampler_state import (
    IN_PROMPT,
    MOST_COUNTED,
    RECORD,
    RECORD_WORDS,
    new_state,
)
from millrace.engine.sampling.logits_processors import has_penalties
from millrace.engine.step.sequence import Sequence
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.sampling import SamplingParams

# Asynchronous copy of an array to a tensor of the same shape and dtype on the device.
Copy = Callable[[npt.NDArray[Any]], torch.Tensor]


class LogprobBuffers(NamedTuple):
    """Log-probabilities on their way to the host.

    ``values`` is float64 [num_rows, 1 + 2 * num_top] on the device, to be copied to the host for
    ``entries``. Row i belongs to row ``row_indices[i]`` of the logits, of which ``counts[i]``
    alternatives are reported.
    """

    values: torch.Tensor
    row_indices: list[int]
    counts: list[int]

    def entries(self, values: torch.Tensor, tokens: Rows[int]) -> list[TokenLogprob | None]:
        """Return the report for each of ``tokens``, chosen from *all* rows of the logits.

        ``values`` are the buffers' values on the host. The report is None for rows that did not ask
        for log-probabilities or have no token.
        """
        entries: list[TokenLogprob | None] = [None] * len(tokens)
        num_top = values.shape[1] // 2
        rows: list[list[float]] = values.tolist()
        for numbers, index, count in zip(rows, self.row_indices, self.counts, strict=True):
            if tokens[index] >= 0:
                ids = map(int, numbers[1 : 1 + min(count, num_top)])
                top = tuple(zip(ids, numbers[1 + num_top :], strict=False))
                entries[index] = TokenLogprob(tokens[index], numbers[0], top)
        return entries


class DeviceSampler:
    """Sampler on the device that chooses the same tokens as ``Sampler`` from the same logits.

    A running sequence has one of ``num_rows`` rows of state. The last row is for padding; its
    tokens are greedy and ignored. ``add`` notes a row's new content, ``upload`` copies it to the
    device, ``sample`` and ``logprobs`` launch kernels and do not wait. All are called from one
    thread, and their work is done in order on one stream.

    Uses 48 bytes a row, and two bytes for each row and token of the vocabulary for penalties.
    ``kernels`` is "triton" or "reference", which is plain torch.
    """

    def __init__(
        self, vocab_size: int, num_rows: int, device: torch.device, *, kernels: str = "triton"
    ) -> None:
        self._vocab_size = vocab_size
        self._state = new_state(num_rows, vocab_size, device)
        self._choose_tokens, self._token_logprobs = _functions(kernels)
        # Rows begun since the last upload: their records, and the counts of penalised sequences.
        self._records: dict[int, npt.NDArray[np.void]] = {}
        self._entries: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    @staticmethod
    def suits(sampling: SamplingParams) -> bool:
        """Return whether the device can choose the tokens of a sequence with these parameters."""
        return (
            not sampling.is_guided
            and not sampling.bad_words
            and not sampling.logit_bias
            and not sampling.allowed_token_ids
            and not sampling.min_tokens
            and sampling.typical_p == 1
        )

    def add(self, row: int, sequence: Sequence) -> None:
        """Assign ``row`` to ``sequence`` with its current tokens, from the next upload on.

        All of the sequence's tokens must have been read. Call this again if a token of a penalised
        sequence was not chosen by this sampler.
        """
        sampling = sequence.request.sampling
        assert self.suits(sampling)
        limited = 0 < sampling.top_k < self._vocab_size
        record = np.zeros((), dtype=RECORD)
        record["key"] = sequence.key
        record["temperature"] = sampling.temperature
        record["top_k"] = sampling.top_k if limited else self._vocab_size
        record["top_p"] = sampling.top_p
        record["log_min_p"] = log(sampling.min_p) if sampling.min_p else -inf
        record["repetition"] = sampling.repetition_penalty
        record["presence"] = sampling.presence_penalty
        record["frequency"] = sampling.frequency_penalty
        self._records[row] = record
        self._entries.pop(row, None)
        if has_penalties(sampling):
            self._entries[row] = self._counted(sequence)

    def upload(self, copy: Copy) -> None:
        """Copy the begun rows to the device by one ``copy``, if there are any.

        Must run before the next ``sample`` of these rows, on the same stream.
        """
        if not self._records:
            return
        rows = np.array(list(self._records), dtype=np.int64)
        records = np.stack(list(self._records.values())).view(np.int64)
        penalised = np.array(list(self._entries), dtype=np.int64)
        places = [row * self._vocab_size + ids for row, (ids, _) in self._entries.items()]
        entries = [counts for _, counts in self._entries.values()]
        parts = [rows, records, penalised, *places, *entries]
        sent = copy(np.concatenate(parts))
        num_entries = sum(map(len, entries))
        sizes = [len(rows), len(records), len(penalised), num_entries, num_entries]
        row, record, cleared, place, entry = torch.split(sent, sizes)
        params, counts = self._state
        params.index_copy_(0, row, record.view(-1, RECORD_WORDS))
        if len(penalised):
            counts.index_fill_(0, cleared, 0)
            counts.view(-1).index_copy_(0, place, entry.to(torch.int16))
        self._records.clear()
        self._entries.clear()

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        token_indices: torch.Tensor,
        tokens_out: torch.Tensor,
    ) -> None:
        """Choose a token from each row of ``logits``, which stay unchanged.

        Launches kernels only, so that a CUDA graph can hold it.

        Args:
            logits: float32 [num_rows, vocab_size].
            rows: int32 [num_rows], the rows of state.
            token_indices: int64 [num_rows], the number of output tokens of each row's sequence,
            which
                selects the number that it draws from its stream.
            tokens_out: int64 [num_rows], written; ``NOT_FINITE`` where the logits have NaN or +inf
            or
                are all -inf.
        """
        self._choose_tokens(logits, rows, token_indices, self._state, tokens_out)

    def logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        row_indices: list[int],
        counts: list[int],
        copy: Copy,
    ) -> LogprobBuffers:
        """Launch the log-probabilities of some rows of the model's raw logits.

        ``logits`` is [num_rows, vocab_size]. ``tokens``, int64 [num_rows], are the chosen tokens on
        the device. ``counts`` gives the number of alternatives of each row.
        """
        num_top = min(max(counts, default=0), self._vocab_size)
        picked = copy(np.array(row_indices, dtype=np.int64))
        values = self._token_logprobs(logits, picked, tokens, num_top)
        return LogprobBuffers(values, list(row_indices), list(counts))

    def _counted(self, sequence: Sequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens of a penalised sequence and their entries of the counts."""
        ids = np.array(sequence.token_ids, dtype=np.int64)
        num_prompt_tokens = sequence.num_prompt_tokens
        output = np.bincount(ids[num_prompt_tokens:], minlength=self._vocab_size)
        entries = output.clip(max=MOST_COUNTED)
        if sequence.request.sampling.repetition_penalty != 1:
            entries[ids[:num_prompt_tokens]] += IN_PROMPT
        tokens = entries.nonzero()[0]
        return tokens, entries[tokens]


def _functions(kernels: str) -> tuple[Callable[..., None], Callable[..., torch.Tensor]]:
    """Return the sampling functions; Triton is imported only if it is used."""
    if kernels == "triton":
        from millrace.engine.kernels.gpu import sampling

        return sampling.choose_tokens, sampling.token_logprobs
    from millrace.engine.kernels.gpu.reference import sampling as reference

    return reference.choose_tokens, reference.token_logprobs
