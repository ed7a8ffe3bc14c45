"""Which row of the device's state each running sequence has, and what of it the device lacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from millrace.engine.devices.cuda.device import Array
from millrace.engine.devices.cuda.steps import NO_TABLES
from millrace.engine.step.sequence import Sequence, SequenceState


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
        max_num_sequences: int,
        max_blocks: int,
    ) -> None:
        self._suits = suits
        self._max_blocks = max_blocks
        self._rows: dict[Sequence, StateRow] = {}
        self._free = list(range(max_num_sequences))
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
