"""Pooling of a sequence's hidden states into an embedding or labels, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from millrace.engine.step.batch import PooledRows
from millrace.engine.step.sequence import Sequence
from millrace.schemas.pooling import Pooling


class ChunkPlace(NamedTuple):
    """Position of a chunk among the chunks of an embedding."""

    is_first: bool
    is_last: bool


class PooledChunk(NamedTuple):
    """Contribution of a step to a sequence's embedding.

    ``total`` is the sum of its rows' hidden states, float32 [hidden_size], or the [num_labels] of
    the last row.
    """

    sequence: Sequence
    total: torch.Tensor
    place: ChunkPlace


def places_of(ranges: Rows[PooledRows]) -> list[ChunkPlace]:
    """Return the place of each range of rows.

    Call it before the step's tokens count as computed.
    """
    return list(map(_place_of, ranges))


def pool_rows(
    ranges: Rows[PooledRows],
    states: torch.Tensor,
    labels: Callable[[torch.Tensor], torch.Tensor],
    places: Rows[ChunkPlace] | None = None,
) -> list[PooledChunk]:
    """Sum the ranges' rows of ``states``.

    Args:
        ranges: The rows of each sequence.
        states: Normed hidden states [num_tokens, hidden_size].
        labels: Computes [num_rows, num_labels] of such rows, for sequences that are classified.
        places: The places of the ranges, if the step's tokens count as computed already.
    """
    if places is None:
        places = places_of(ranges)
    return [
        PooledChunk(rows.sequence, _total(rows, states, labels), place)
        for rows, place in zip(ranges, places, strict=True)
    ]


def _place_of(rows: PooledRows) -> ChunkPlace:
    sequence = rows.sequence
    if sequence.request.pooling is not Pooling.MEAN:
        return ChunkPlace(is_first=True, is_last=True)
    begin = sequence.num_computed_tokens
    end = begin + rows.end - rows.start
    return ChunkPlace(is_first=begin == 0, is_last=end == sequence.num_tokens)


def _total(
    rows: PooledRows, states: torch.Tensor, labels: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    own = states[rows.start : rows.end]
    if rows.sequence.request.pooling is Pooling.CLASSIFY:
        own = labels(own)
    return own.sum(0, dtype=torch.float32)


def add_chunk(chunk: PooledChunk) -> tuple[float, ...] | None:
    """Add a chunk to its sequence; return the embedding if the chunk was the last.

    A first chunk starts over, as after a preemption.
    """
    sequence = chunk.sequence
    total = chunk.total if chunk.place.is_first else sequence.pooling_state + chunk.total
    if not chunk.place.is_last:
        sequence.pooling_state = total
        return None
    if sequence.request.pooling is Pooling.MEAN:
        total = total / sequence.num_tokens
    embedding: list[float] = total.tolist()
    return tuple(embedding)
