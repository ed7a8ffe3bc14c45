"""Embeddings and labels: a sequence's hidden states taken together, chunk by chunk as they are
computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from millrace.schemas.pooling import Pooling
from millrace.workers.engine.batch import PooledRows
from millrace.workers.engine.sequence import Sequence


class PooledChunk(NamedTuple):
    """What a step adds to a sequence's embedding: ``total``, float32 [hidden_size], the sum of its
    rows' hidden states, or [num_labels] of the last one. ``is_first`` if nothing went before it."""

    sequence: Sequence
    total: torch.Tensor
    is_first: bool


def pool_rows(
    ranges: Rows[PooledRows],
    states: torch.Tensor,
    labels: Callable[[torch.Tensor], torch.Tensor],
) -> list[PooledChunk]:
    """Sum the ranges' rows of ``states`` [num_tokens, hidden_size], which are normed; ``labels``
    makes [num_rows, num_labels] of such rows, for those that are classified."""
    return [_chunk(rows, states[rows.start : rows.end], labels) for rows in ranges]


def is_first(rows: PooledRows) -> bool:
    """Whether nothing goes into the embedding before these rows, of a step that was not counted
    yet."""
    sequence = rows.sequence
    return sequence.request.pooling is not Pooling.MEAN or sequence.num_computed_tokens == 0


def _chunk(
    rows: PooledRows, states: torch.Tensor, labels: Callable[[torch.Tensor], torch.Tensor]
) -> PooledChunk:
    if rows.sequence.request.pooling is Pooling.CLASSIFY:
        states = labels(states)
    return PooledChunk(rows.sequence, states.sum(0, dtype=torch.float32), is_first(rows))


def add_chunk(chunk: PooledChunk) -> tuple[float, ...] | None:
    """Take a chunk into its sequence, which has been advanced by it; the embedding if that was
    the last one. A chunk that is first starts over, as after a preemption."""
    sequence = chunk.sequence
    total = chunk.total if chunk.is_first else sequence.pooling_state + chunk.total
    if sequence.num_uncomputed_tokens:
        sequence.pooling_state = total
        return None
    if sequence.request.pooling is Pooling.MEAN:
        total = total / sequence.num_tokens
    embedding: list[float] = total.tolist()
    return tuple(embedding)
