"""What a step brings the device: a packed vector, and the state rows of its sequences."""

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
    """What devices are told of a step: the vector ``packed`` of its ``shape``, see
    ``PackedInputs``; ``tables``, int64 [2, count]: places in the block tables, flat, and the blocks
    that are there from now on; ``adapters``, int32: ``AdapterTiling.pack``, None where no row has
    one. ``is_recorded``: whether it is one that was recorded. ``keeps_states``: whether its hidden
    states are wanted, of which some are asked for later where they are on another rank."""

    shape: StepShape
    packed: Array
    tables: Array
    adapters: Array | None
    is_recorded: bool
    keeps_states: bool = False


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


class StateRow:
    """A sequence's row. ``table`` is the block table whose first ``num_sent`` entries the device
    has, ``last_sent`` the last of them. ``suits``: whether the device's sampler can choose the
    sequence's tokens; ``begun``: whether it knows the sequence and all its tokens."""

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

    A sequence keeps its row as long as it runs. Rows of sequences that do not run any more are
    taken back when one is needed; there are as many as sequences may run. ``suits`` says whose
    tokens the device can choose.
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
        """The row of a running sequence; notes what its block table has gained."""
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
            first -= 1  # the last block was shared, and copied by its first writer
        begin = row.number * self._max_blocks
        self._unsent.update(
            zip(range(begin + first, begin + len(table)), table[first:], strict=True)
        )
        row.table, row.num_sent, row.last_sent = table, len(table), table[-1]

    def forget_behind(self, sequence: Sequence, num_blocks: int) -> None:
        """Send the blocks behind the first ``num_blocks`` of a sequence again with its next step:
        they may be given back until then, and others taken in their places."""
        row = self._rows[sequence]
        if row.table is not None and row.num_sent > num_blocks:
            row.num_sent, row.last_sent = num_blocks, row.table[num_blocks - 1]

    def _take_free(self) -> int:
        if not self._free:
            for sequence in [s for s in self._rows if s.state is not SequenceState.RUNNING]:
                self._free.append(self._rows.pop(sequence).number)
        return self._free.pop()

    def distrust(self) -> None:
        """A launch or a read has failed: who knows what the device has of anybody."""
        for row in self._rows.values():
            row.begun = False
            row.table = None

    def take_unsent(self) -> Array:
        """What was noted since the last time, see ``ToldStep.tables``."""
        if not self._unsent:
            return NO_TABLES
        taken: Array = np.array([[*self._unsent.keys()], [*self._unsent.values()]], dtype=np.int64)
        self._unsent = {}
        return taken
