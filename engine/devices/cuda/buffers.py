"""The memory that steps share, of a size that the largest of them has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.step_inputs import StepInputs, StepShape


class Bounds(NamedTuple):
    """The most that a step has: sequences, tokens, and blocks of one sequence."""

    num_sequences: int
    num_tokens: int
    num_blocks: int


class Buffers(NamedTuple):
    """What steps read and leave, always in the same place: the packed vector and what is made of
    it, logits and tokens of what is sampled, and which rows are finite."""

    packed: torch.Tensor
    inputs: StepInputs
    logits: torch.Tensor
    tokens: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def make(
        cls, bounds: Bounds, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        sequences = bounds.num_sequences
        # Padding may be a sequence more than there are.
        largest = StepShape(sequences, bounds.num_tokens, 2 * sequences + 1, sequences)
        return cls(
            packed=torch.zeros(largest.num_packed, dtype=torch.int64, device=device),
            inputs=StepInputs.empty(largest, device),
            logits=torch.zeros(sequences, vocab_size, dtype=dtype, device=device),
            tokens=torch.zeros(sequences, dtype=torch.int64, device=device),
            finite=torch.ones(bounds.num_tokens, dtype=torch.bool, device=device),
        )
