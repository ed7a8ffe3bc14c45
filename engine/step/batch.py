"""Flat batch of a step: one row for each token to compute."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from operator import attrgetter
from typing import NamedTuple

import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.sequence import Sequence
from millrace.schemas.pooling import Pooling

_num_computed_tokens = attrgetter("num_computed_tokens")
_adapter_weights = attrgetter("adapter_weights")
_proposed = attrgetter("proposed")


class QueryRange(NamedTuple):
    """Rows ``start`` … ``start + num_tokens - 1`` of the batch: consecutive tokens of one sequence.

    The sequence's first ``num_context_tokens`` tokens are in the KV cache already, in
    ``block_table``.
    """

    start: int
    num_tokens: int
    num_context_tokens: int
    block_table: Rows[int]


class PooledRows(NamedTuple):
    """Rows ``start`` … ``end - 1`` of the batch, which are pooled into the sequence's embedding."""

    sequence: Sequence
    start: int
    end: int


class ScoredRows(NamedTuple):
    """Rows ``start`` … ``end - 1`` of the batch, which predict tokens of the sequence's prompt, the
    first of them its token ``first_target``."""

    sequence: Sequence
    start: int
    end: int
    first_target: int


class FlatBatch(NamedTuple):
    """Input of one step.

    Attributes:
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens].
        ranges: Rows of each sequence; a sequence with proposed tokens has several ranges.
        num_single: The number of ranges of one token each. They come first, by rising context
            length.
        sampled_rows: Rows whose logits are computed, int64, on the device: one row of each of
            ``sampled``, then the rows of their proposed tokens, both in that order.
        sampled: Sequences whose next token is chosen. Pooled sequences are not among them.
        pooled: Rows that go into embeddings.
        scored: Rows that give the log-probabilities of prompts.
        adapters: None if no row has an adapter.
        sequences: The sequence of each of ``ranges``.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    ranges: list[QueryRange]
    num_single: int
    sampled_rows: torch.Tensor
    sampled: list[Sequence]
    pooled: list[PooledRows]
    scored: list[ScoredRows]
    adapters: RowAdapters | None = None
    sequences: Rows[Sequence] = ()


class BatchLayout(NamedTuple):
    """Input of a step in lists, from which the tensors of ``FlatBatch`` are made.

    Fields have the names of ``FlatBatch``. ``sequences`` has the sequence of each of ``ranges``.
    ``proposed_rows`` are the rows of proposed tokens; ``FlatBatch.sampled_rows`` ends with them.
    """

    token_ids: list[int]
    positions: list[int]
    sequences: list[Sequence]
    ranges: list[QueryRange]
    num_single: int
    sampled: list[Sequence]
    sampled_rows: list[int]
    pooled: list[PooledRows]
    scored: list[ScoredRows]
    proposed_rows: list[int]


class _Span(NamedTuple):
    """Known tokens of a sequence, computed one per row, followed by its proposed tokens.

    ``num_tokens`` known tokens begin at ``begin``.
    """

    sequence: Sequence
    begin: int
    num_tokens: int


def lay_out(plan: Rows[ScheduledSequence], *, exact: bool = False) -> BatchLayout:
    """Lay out a plan. Rows of single tokens come first, so that attention computes them together.

    A chunk of several tokens uses another attention path than single tokens, with other bits in its
    results. With ``exact``, a completion's tokens are always single rows and a prompt's tokens
    never are. Then the bits of a token do not depend on how it was computed: token by token, or in
    one step after a preemption, a failover or a proposal.
    """
    single = [item.sequence for item in plan if item.num_tokens == 1]
    chunks = [item for item in plan if item.num_tokens > 1]
    spans: list[_Span] = []
    if exact and (chunks or any(map(_is_in_prompt, single))):
        single, chunks, spans = _by_part(plan)
    if spans or any(map(_proposed, single)):
        spans += [_Span(sequence, sequence.num_computed_tokens, 1) for sequence in single]
        num_single = sum([span.num_tokens + len(span.sequence.proposed) for span in spans])
        layout = BatchLayout([], [], [], [], num_single, [], [], [], [], [])
        _add_spans(spans, layout)
    else:
        single.sort(key=_num_computed_tokens)
        layout = BatchLayout([], [], single, [], len(single), [], [], [], [], [])
        _add_single_rows(single, layout)
    for sequence, num_tokens in chunks:
        layout.sequences.append(sequence)
        _add_chunk(sequence, num_tokens, layout)
    return layout


def _is_in_prompt(sequence: Sequence) -> bool:
    return sequence.num_computed_tokens < sequence.num_prompt_tokens


def _by_part(
    plan: Rows[ScheduledSequence],
) -> tuple[list[Sequence], list[ScheduledSequence], list[_Span]]:
    """Split a plan into single tokens of completions, chunks of prompts, and spans of several
    tokens of completions."""
    single: list[Sequence] = []
    chunks: list[ScheduledSequence] = []
    spans: list[_Span] = []
    for sequence, num_tokens in plan:
        begin = sequence.num_computed_tokens
        num_of_prompt = min(num_tokens, max(0, sequence.num_prompt_tokens - begin))
        if num_of_prompt:
            chunks.append(ScheduledSequence(sequence, num_of_prompt))
        elif num_tokens == 1:
            single.append(sequence)
            continue
        if num_tokens > num_of_prompt:
            spans.append(_Span(sequence, begin + num_of_prompt, num_tokens - num_of_prompt))
    return single, chunks, spans


def build_batch(
    plan: Rows[ScheduledSequence], device: torch.device, *, exact: bool = False
) -> FlatBatch:
    """Build the flat batch of a plan. See ``lay_out`` for ``exact``."""
    layout = lay_out(plan, exact=exact)
    return FlatBatch(
        token_ids=torch.tensor(layout.token_ids, device=device),
        positions=torch.tensor(layout.positions, device=device),
        ranges=layout.ranges,
        num_single=layout.num_single,
        sampled_rows=torch.tensor(
            layout.sampled_rows + layout.proposed_rows, dtype=torch.int64, device=device
        ),
        sampled=layout.sampled,
        pooled=layout.pooled,
        scored=layout.scored,
        adapters=_row_adapters(layout),
        sequences=layout.sequences,
    )


def _row_adapters(layout: BatchLayout) -> RowAdapters | None:
    if not any(map(_adapter_weights, layout.sequences)):
        return None
    weights: list[AdapterWeights] = []
    places: dict[int, int] = {}
    of_rows: list[int] = []
    for sequence, rows in zip(layout.sequences, layout.ranges, strict=True):
        place = -1
        if sequence.adapter_weights is not None:
            place = places.setdefault(id(sequence.adapter_weights), len(weights))
            if place == len(weights):
                weights.append(sequence.adapter_weights)
        of_rows += [place] * rows.num_tokens
    return RowAdapters(weights, torch.tensor(of_rows, dtype=torch.int32))


def _add_single_rows(sequences: list[Sequence], layout: BatchLayout) -> None:
    """Add one row for each sequence, the first rows of a layout.

    Most rows are decodes, so this takes less than 1 us a row.
    """
    positions = list(map(_num_computed_tokens, sequences))
    layout.positions.extend(positions)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        token_ids = sequence.token_ids
        layout.token_ids.append(token_ids[position])
        layout.ranges.append(QueryRange(row, 1, position, sequence.block_table))
        plain = sequence.prompt_logprobs is None and sequence.request.pooling is None
        if plain and position + 1 == len(token_ids):
            layout.sampled.append(sequence)
            layout.sampled_rows.append(row)
        else:
            _add_wanted_rows(sequence, 1, layout)


def _add_spans(spans: list[_Span], layout: BatchLayout) -> None:
    """Add the rows of spans: each token is a row of its own."""
    places = [
        (span.begin + ahead, index, ahead)
        for index, span in enumerate(spans)
        for ahead in range(span.num_tokens + len(span.sequence.proposed))
    ]
    places.sort()
    proposed: dict[Sequence, list[int]] = {}
    for row, (position, index, ahead) in enumerate(places):
        sequence, _, num_tokens = spans[index]
        layout.sequences.append(sequence)
        layout.positions.append(position)
        layout.ranges.append(QueryRange(row, 1, position, sequence.block_table))
        if ahead >= num_tokens:
            layout.token_ids.append(sequence.proposed[ahead - num_tokens])
            proposed.setdefault(sequence, []).append(row)
            continue
        layout.token_ids.append(sequence.token_ids[position])
        if position < sequence.num_prompt_tokens:  # a prompt's tokens can be single rows, too
            _add_wanted_rows(sequence, 1, layout)
        elif position + 1 == len(sequence.token_ids):
            layout.sampled.append(sequence)
            layout.sampled_rows.append(row)
    for sequence in layout.sampled:
        layout.proposed_rows.extend(proposed.get(sequence, ()))


def _add_chunk(sequence: Sequence, num_tokens: int, layout: BatchLayout) -> None:
    begin = sequence.num_computed_tokens
    end = begin + num_tokens
    layout.ranges.append(QueryRange(len(layout.token_ids), num_tokens, begin, sequence.block_table))
    layout.token_ids.extend(sequence.token_ids[begin:end])
    layout.positions.extend(range(begin, end))
    _add_wanted_rows(sequence, num_tokens, layout)


def _add_wanted_rows(sequence: Sequence, num_tokens: int, layout: BatchLayout) -> None:
    """Add the sampled, scored or pooled rows among the sequence's last ``num_tokens`` rows."""
    end_row = len(layout.token_ids)
    if sequence.prompt_logprobs is not None:
        layout.scored.extend(_scored_rows(sequence, num_tokens, end_row))
    if sequence.request.pooling is not None:
        layout.pooled.extend(_pooled_rows(sequence, num_tokens, end_row))
    elif sequence.num_computed_tokens + num_tokens == len(sequence.token_ids):
        layout.sampled.append(sequence)
        layout.sampled_rows.append(end_row - 1)


def _pooled_rows(sequence: Sequence, num_tokens: int, end_row: int) -> list[PooledRows]:
    """Return the rows that the sequence's pooling uses, of its ``num_tokens`` rows before
    ``end_row``."""
    if sequence.request.pooling is Pooling.MEAN:
        return [PooledRows(sequence, end_row - num_tokens, end_row)]
    if sequence.num_computed_tokens + num_tokens < sequence.num_tokens:
        return []
    return [PooledRows(sequence, end_row - 1, end_row)]


def _scored_rows(sequence: Sequence, num_tokens: int, end_row: int) -> list[ScoredRows]:
    """Return the rows that predict prompt tokens without a log-probability yet, of the sequence's
    ``num_tokens`` rows before ``end_row``."""
    assert sequence.prompt_logprobs is not None
    begin = sequence.num_computed_tokens
    first = max(begin + 1, len(sequence.prompt_logprobs))
    end = min(begin + 1 + num_tokens, sequence.num_prompt_tokens)
    if first >= end:
        return []
    start = end_row - num_tokens + first - begin - 1
    return [ScoredRows(sequence, start, start + end - first, first)]
