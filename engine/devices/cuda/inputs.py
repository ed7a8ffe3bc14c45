"""Inputs of a step on a device: a packed vector, and the state rows of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.engine.devices.cuda.device import Array
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import BatchLayout
from millrace.engine.step.sequence import Sequence, SequenceState

_Longs = npt.NDArray[np.int64]
_PADDING_POSITION = -1
NO_TABLES: Array = np.empty((2, 0), dtype=np.int64)


class ToldStep(NamedTuple):
    """Description of a step for devices.

    ``packed`` is the vector of its ``shape``, see ``PackedInputs``. ``tables``, int64 [2, count],
    holds flat places in the block tables and their new blocks. ``adapters``, int32, is from
    ``AdapterTiling.pack``, or None if no row has an adapter. ``is_recorded`` is True if the step's
    shape was recorded. ``keeps_states`` is True if its hidden states are needed; a rank keeps them
    until some are asked for later.
    """

    shape: StepShape
    packed: Array
    tables: Array
    adapters: Array | None
    is_recorded: bool
    keeps_states: bool = False


class SampledRow(NamedTuple):
    """Row of the batch to sample: its index, its sequence's state row, and its token's number."""

    row: int
    state_row: int
    token_index: int


def exact_shape(layout: BatchLayout) -> StepShape:
    """Return the shape of a layout without padding."""
    return StepShape(
        num_single=layout.num_single,
        num_tokens=len(layout.token_ids),
        num_sequences=len(layout.ranges),
        num_sampled=len(layout.sampled) + len(layout.proposed_rows),
    )


def fits(shape: StepShape, into: StepShape) -> bool:
    """Return whether a step of one shape can be padded to another."""
    single, tokens, sequences, sampled = shape
    if single > into.num_single or sampled > into.num_sampled:
        return False
    padding = into.num_tokens - into.num_single - (tokens - single)
    free = into.num_sequences - into.num_single - (sequences - single)
    # Padding after the chunks is a sequence of its own.
    return padding == 0 <= free or (padding > 0 and free > 0)


def shifted(row: int, layout: BatchLayout, shape: StepShape) -> int:
    """Return the row of the padded step that holds a ``row`` of the layout."""
    return row if row < layout.num_single else row + shape.num_single - layout.num_single


def pack(
    layout: BatchLayout,
    state_rows: Rows[int],
    sampled: Rows[SampledRow],
    shape: StepShape,
    padding_row: int,
) -> _Longs:
    """Pack the vector of a step, padded to ``shape``, see ``PackedInputs``.

    ``state_rows`` are the rows of the layout's sequences.
    """
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
    # The remaining entries belong to the last sequence, which has no length.
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
    """Return for each item of a plan whether all its rows are finite, by the rows' flags.

    Rows of proposed tokens are left out, because the proposals may be rejected.
    """
    starts = [shifted(query.start, layout, shape) for query in layout.ranges]
    ends = [start + query.num_tokens for start, query in zip(starts, layout.ranges, strict=True)]
    totals = np.concatenate(([0], np.cumsum(~flags)))
    bad = (totals[ends] - totals[starts]).tolist()
    # A sequence with proposed tokens has a range for each row, its own token's first.
    by_sequence = dict(zip(reversed(layout.sequences), reversed(bad), strict=True))
    return [by_sequence[sequence] == 0 for sequence, _ in plan]


class StateRow:
    """Row of a sequence on the device.

    ``table`` is the block table whose first ``num_sent`` entries the device has; ``last_sent`` is
    the last of these. ``suits`` is True if the device's sampler can choose the sequence's tokens.
    ``begun`` is True if the sampler has the sequence and all its tokens.
    """

    __slots__ = ("begun", "last_sent", "num_sent", "number", "suits", "table")

    def __init__(self, number: int, *, suits: bool) -> None:
        self.number = number
        self.suits = suits
        self.table: list[int] | None = None
        self.num_sent = 0
        self.last_sent = -1
        self.begun = False


class DeviceState:
    """Rows of running sequences on the device, see ``StepState``.

    There is one row for each sequence that may run, and a sequence keeps its row while it runs.
    Rows of ended sequences are freed when a row is needed. ``suits`` returns whether the device can
    choose a sequence's tokens.
    """

    def __init__(
        self,
        suits: Callable[[Sequence], bool],
        *,
        num_rows: int,
        max_blocks: int,
    ) -> None:
        self._suits = suits
        self._max_blocks = max_blocks
        self._rows: dict[Sequence, StateRow] = {}
        self._free = list(range(num_rows))
        self._unsent: dict[int, int] = {}

    def row_of(self, sequence: Sequence) -> StateRow:
        """Return the row of a running sequence, and note the new blocks of its table."""
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = StateRow(self._take_free(), suits=self._suits(sequence))
        table = sequence.block_table
        if len(table) != row.num_sent or table is not row.table or table[-1] != row.last_sent:
            self._note(row, table)
        return row

    def _note(self, row: StateRow, table: list[int]) -> None:
        first = row.num_sent
        if table is not row.table or first > len(table):
            first = 0
        elif first and table[first - 1] != row.last_sent:
            first -= 1  # a shared last block was copied on write
        begin = row.number * self._max_blocks
        self._unsent.update(
            zip(range(begin + first, begin + len(table)), table[first:], strict=True)
        )
        row.table, row.num_sent, row.last_sent = table, len(table), table[-1]

    def forget_behind(self, sequence: Sequence, num_blocks: int) -> None:
        """Send the blocks after the first ``num_blocks`` of a sequence again with its next step.

        Until then they may be freed and replaced by others.
        """
        row = self._rows[sequence]
        if row.table is not None and row.num_sent > num_blocks:
            row.num_sent, row.last_sent = num_blocks, row.table[num_blocks - 1]

    def _take_free(self) -> int:
        if not self._free:
            for sequence in [s for s in self._rows if s.state is not SequenceState.RUNNING]:
                self._free.append(self._rows.pop(sequence).number)
        return self._free.pop()

    def distrust(self) -> None:
        """Assume after a failed launch or read that the device has no state of any sequence."""
        for row in self._rows.values():
            row.begun = False
            row.table = None

    def take_unsent(self) -> Array:
        """Return the block table entries noted since the last call, see ``ToldStep.tables``."""
        if not self._unsent:
            return NO_TABLES
        taken: Array = np.array([[*self._unsent.keys()], [*self._unsent.values()]], dtype=np.int64)
        self._unsent = {}
        return taken
