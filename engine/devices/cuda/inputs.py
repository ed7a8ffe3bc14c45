"""From a laid-out step to the vector that the device makes its inputs of."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import BatchLayout

_Longs = npt.NDArray[np.int64]
_PADDING_POSITION = -1


class SampledRow(NamedTuple):
    """A row of the batch whose logits are wanted, the state row of its sequence, and the number of
    the token that is chosen from them."""

    row: int
    state_row: int
    token_index: int


def exact_shape(layout: BatchLayout) -> StepShape:
    """A shape without padding."""
    return StepShape(
        num_single=layout.num_single,
        num_tokens=len(layout.token_ids),
        num_sequences=len(layout.ranges),
        num_sampled=len(layout.sampled) + len(layout.proposed_rows),
    )


def fits(shape: StepShape, into: StepShape) -> bool:
    """Whether a step of one shape can be padded to another."""
    single, tokens, sequences, sampled = shape
    if single > into.num_single or sampled > into.num_sampled:
        return False
    padding = into.num_tokens - into.num_single - (tokens - single)
    free = into.num_sequences - into.num_single - (sequences - single)
    # Padding behind the chunks is a sequence of its own.
    return padding == 0 <= free or (padding > 0 and free > 0)


def shifted(row: int, layout: BatchLayout, shape: StepShape) -> int:
    """Where a row of the layout is in a step padded to ``shape``."""
    return row if row < layout.num_single else row + shape.num_single - layout.num_single


def pack(
    layout: BatchLayout,
    state_rows: Rows[int],
    sampled: Rows[SampledRow],
    shape: StepShape,
    padding_row: int,
) -> _Longs:
    """The vector of a step, see ``PackedInputs``, padded to ``shape``. ``state_rows`` are those of
    the layout's sequences."""
    exact = exact_shape(layout)
    packed: _Longs = np.empty(shape.num_packed, dtype=np.int64)
    single, chunks = layout.num_single, exact.num_tokens - layout.num_single
    # Rows of single tokens, padding, rows of chunks, padding.
    tokens = packed[: 3 * shape.num_tokens].reshape(3, shape.num_tokens)
    tokens[0] = 0
    tokens[1] = _PADDING_POSITION
    tokens[2] = padding_row
    counts = [query.num_tokens for query in layout.ranges]
    owners = state_rows if chunks == 0 else np.repeat(np.array(state_rows, np.int64), counts)
    for section, values in zip(tokens, (layout.token_ids, layout.positions, owners), strict=True):
        section[:single] = values[:single]
        if chunks:
            section[shape.num_single : shape.num_single + chunks] = values[single:]
    _pack_sequences(packed[3 * shape.num_tokens :], layout, state_rows, shape, padding_row)
    _pack_sampled(packed[len(packed) - 3 * shape.num_sampled :], sampled, shape, padding_row)
    return packed


def _pack_sequences(
    packed: _Longs,
    layout: BatchLayout,
    state_rows: Rows[int],
    shape: StepShape,
    padding_row: int,
) -> None:
    count, padded = layout.num_single, shape.num_single
    total = shape.num_sequences
    starts = packed[: total + 1]
    lengths = packed[total + 1 : 2 * total + 1]
    rows = packed[2 * total + 1 : 3 * total + 1]
    starts[: padded + 1] = np.arange(padded + 1)
    lengths[:] = 0
    rows[:] = padding_row
    ends = [query.num_context_tokens + query.num_tokens for query in layout.ranges]
    lengths[:count] = ends[:count]
    rows[:count] = state_rows[:count]
    num_chunks = len(ends) - count
    if num_chunks:
        chunks = slice(padded, padded + num_chunks)
        sizes = [query.num_tokens for query in layout.ranges[count:]]
        starts[padded + 1 : padded + 1 + num_chunks] = padded + np.cumsum(sizes)
        lengths[chunks] = ends[count:]
        rows[chunks] = state_rows[count:]
    # What is left over is the last sequence's, which has no length.
    starts[padded + 1 + num_chunks :] = starts[padded + num_chunks]
    starts[total] = shape.num_tokens


def _pack_sampled(
    packed: _Longs, sampled: Rows[SampledRow], shape: StepShape, padding_row: int
) -> None:
    sections = packed.reshape(3, shape.num_sampled)
    count = len(sampled)
    if count:
        sections[:, :count] = np.array(sampled, dtype=np.int64).T
    sections[0, count:] = 0
    sections[1, count:] = padding_row
    sections[2, count:] = 0


def finite_items(
    flags: npt.NDArray[np.bool_],
    plan: Rows[ScheduledSequence],
    layout: BatchLayout,
    shape: StepShape,
) -> list[bool]:
    """Whether all rows of each item of a plan are finite, by the flags of a step's rows; those of
    proposed tokens, which may never come, are left out."""
    starts = [shifted(query.start, layout, shape) for query in layout.ranges]
    ends = [start + query.num_tokens for start, query in zip(starts, layout.ranges, strict=True)]
    totals = np.concatenate(([0], np.cumsum(~flags)))
    bad = (totals[ends] - totals[starts]).tolist()
    # The rows of a sequence with proposed tokens are one range each, that of its own token first.
    by_sequence = dict(zip(reversed(layout.sequences), reversed(bad), strict=True))
    return [by_sequence[sequence] == 0 for sequence, _ in plan]
