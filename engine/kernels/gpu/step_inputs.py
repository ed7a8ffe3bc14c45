"""Layout of the packed vector of a step, and the tensors unpacked from it."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Sections of a packed vector: numbers per token, per sequence and per sampled row.
_TOKEN_SECTIONS = 3
_SEQUENCE_SECTIONS = 3
_SAMPLED_SECTIONS = 3


class StepShape(NamedTuple):
    """Size of a step, padding included; the key of a recorded step.

    The first ``num_single`` sequences have one token each.
    """

    num_single: int
    num_tokens: int
    num_sequences: int
    num_sampled: int

    @property
    def num_packed(self) -> int:
        """Number of elements of a packed vector of this shape."""
        return (
            _TOKEN_SECTIONS * self.num_tokens
            + _SEQUENCE_SECTIONS * self.num_sequences
            + 1
            + _SAMPLED_SECTIONS * self.num_sampled
        )


class PackedInputs(NamedTuple):
    """Sections of a packed int64 vector, in order.

    Tokens: ``token_ids``, negative to use the token chosen last for the sequence; ``positions``,
    negative for padding; ``token_rows``, the state row of the token's sequence. Sequences:
    ``query_starts`` (one more than sequences), ``lengths`` and ``table_rows``, see ``DeviceBatch``.
    Samples: ``sampled_rows`` of the batch, the ``state_rows`` of their sequences, and the
    ``token_indices`` of the chosen tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    table_rows: torch.Tensor
    sampled_rows: torch.Tensor
    state_rows: torch.Tensor
    token_indices: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, shape: StepShape) -> PackedInputs:
        """Return views of ``packed`` [shape.num_packed]."""
        tokens, sequences, sampled = shape.num_tokens, shape.num_sequences, shape.num_sampled
        sizes = [tokens] * 3 + [sequences + 1, sequences, sequences] + [sampled] * 3
        return cls(*torch.split_with_sizes(packed, sizes))


class StepState(NamedTuple):
    """State kept on the device between steps: a row per running sequence, one for padding.

    ``last_tokens`` is int64 [num_rows], ``block_tables`` int32 [num_rows, max_blocks].
    """

    last_tokens: torch.Tensor
    block_tables: torch.Tensor


class StepInputs(NamedTuple):
    """Inputs unpacked by ``prepare_inputs``.

    Tokens: ``token_ids``, ``positions`` and ``slots``, int64 [num_tokens]. Sequences:
    ``query_starts`` int32 [num_sequences + 1], ``lengths`` and ``table_rows`` int32
    [num_sequences]. Samples: ``state_rows`` int32 [num_sampled].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    table_rows: torch.Tensor
    state_rows: torch.Tensor

    @classmethod
    def empty(cls, shape: StepShape, device: torch.device) -> StepInputs:
        """Allocate buffers for steps of up to this shape."""

        def longs(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        tokens, sequences = shape.num_tokens, shape.num_sequences
        return cls(
            *(longs(tokens), longs(tokens), longs(tokens)),
            *(ints(sequences + 1), ints(sequences), ints(sequences)),
            ints(shape.num_sampled),
        )

    def of_shape(self, shape: StepShape) -> StepInputs:
        """Return views of the first elements, as many as ``shape`` needs."""
        tokens, sequences = shape.num_tokens, shape.num_sequences
        sizes = (tokens, tokens, tokens, sequences + 1, sequences, sequences, shape.num_sampled)
        return StepInputs(*(part[:size] for part, size in zip(self, sizes, strict=True)))
