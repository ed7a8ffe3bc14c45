"""Requests that are in the engine, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Rows

from millrace.engine.scheduling.planner import Planner
from millrace.engine.step.fork_group import Candidate, ForkGroup, charged_together
from millrace.engine.step.outputs import (
    as_millrace_error,
    error_output,
    group_failure,
    started_output,
    with_beginning,
)
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import EngineOutput
from millrace.schemas.errors import MillraceError

_log = logging.getLogger(__name__)


class LiveRequests:
    """Unfinished sequences of each request.

    A sequence that ends is removed from planner and sampler, too; only ``pop_ended`` and ``cancel``
    still return it.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._groups: dict[str, list[Sequence]] = {}
        self._ended: list[tuple[int, Sequence]] = []
        self.complete_groups: list[ForkGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Sequence]:
        for group in self._groups.values():
            yield from group

    def add(self, group: list[Sequence]) -> None:
        """Add the sequences of a request. The planner gets the first of them."""
        self._groups[group[0].request_id] = list(group)
        self._planner.add(group[0])

    def charged(self) -> Iterator[Sequence]:
        """Yield the sequences whose device times are reported.

        The first of a fork group stands for all of it.
        """
        for group in self._groups.values():
            yield from group if group[0].fork_group is None else group[:1]

    def hold(self, sequence: Sequence, candidates: Rows[Candidate]) -> None:
        """Hold a computed sequence of a fork group.

        ``pop_complete_groups`` returns the group once all of its sequences are held.
        """
        group: ForkGroup = sequence.fork_group
        group.hold(sequence, candidates)
        if group.is_complete:
            self.complete_groups.append(group)

    def pop_complete_groups(self) -> list[ForkGroup]:
        """Return the fork groups whose client has to choose how they continue.

        Their full blocks are put into the prefix cache, since all that was computed for them is
        finite.
        """
        complete, self.complete_groups = self.complete_groups, []
        for group in complete:
            for sequence in group.members:
                self._planner.tables.cache_full_blocks(sequence, sequence.num_computed_tokens)
        return complete

    def go_on(
        self,
        group: ForkGroup,
        ways: Rows[tuple[int, int]],
        excluded: Rows[int],
        outputs: list[EngineOutput],
    ) -> None:
        """Continue a complete group.

        Forks share their blocks; the first one to write copies the last block (copy-on-write).

        Args:
            group: The group, all of whose sequences are held.
            ways: The number of a member and its next token, for each continuation. A member
                with several is forked; a member without one ends.
            excluded: Tokens that may not follow that next token.
            outputs: The outputs of this step.
        """
        if not group.has_advanced:
            if not group.first.started:
                group.first.started = True
                outputs.append(started_output(group.first))
            outputs.append(EngineOutput(request_id=group.request.request_id))
        parents = list(group.members)
        going_on = {number for number, _ in ways}
        for number, sequence in enumerate(parents):
            if number not in going_on:
                group.leave(sequence)
                self._groups[sequence.request_id].remove(sequence)
                self._release(sequence)
        members: list[Sequence] = []
        for number, token in ways:
            sequence = parents[number]
            if sequence.is_held:
                sequence.token_ids[-1] = token
            else:
                parent, sequence = sequence, group.child_of(sequence, token)
                self._planner.fork(parent, sequence)
                self._groups[sequence.request_id].append(sequence)
            members.append(sequence)
        group.members, group.candidates = members, {}
        group.excluded, group.has_advanced = excluded, True

    def finish_group(
        self, group: ForkGroup, last: list[EngineOutput], outputs: list[EngineOutput]
    ) -> None:
        """End a fork group with its ``last`` outputs, one per choice.

        The first reports its device time.
        """
        self._ended.append((len(outputs), group.first))
        outputs += with_beginning(group, last)
        for sequence in self.cancel(group.request.request_id):
            assert sequence.fork_group is group

    def cancel(self, request_id: str) -> list[Sequence]:
        """Remove a request in any state, and return its sequences."""
        group = self._groups.pop(request_id, [])
        for sequence in group:
            self._release(sequence)
        return group

    def finish(self, sequence: Sequence, outputs: list[EngineOutput]) -> None:
        """End a sequence. Its last output is the last of ``outputs``, the outputs of this step."""
        self._ended.append((len(outputs) - 1, sequence))
        group = self._groups[sequence.request_id]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request_id]
        self._release(sequence)

    def fail(self, sequence: Sequence, error: Exception, outputs: list[EngineOutput]) -> None:
        """End a sequence, and the sequences that wait for its prompt, with an error.

        A fork group ends as a whole.
        """
        if not isinstance(error, MillraceError):
            _log.error("the engine failed on one sequence", exc_info=error)
        error = as_millrace_error(error)
        group: ForkGroup | None = sequence.fork_group
        # The latest results of this sequence and its group have not been checked.
        for one in charged_together(sequence):
            one.contents_finite = False
        if group is not None:
            self.finish_group(group, group_failure(group, error), outputs)
            return
        for ended in (sequence, *sequence.forks):
            outputs.append(error_output(ended, error))
            self.finish(ended, outputs)

    def pop_ended(self) -> list[tuple[int, Sequence]]:
        """Return the sequences that ended in this step, each with the index of its last output."""
        ended, self._ended = self._ended, []
        return ended

    def _release(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        sequence.sampling_state = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless groups and planner have the same live sequences."""
        self._planner.check_integrity()
        live = list(self)
        forming = {fork for sequence in live for fork in sequence.forks}
        assert self._planner.num_live == len(live) - len(forming)
        assert forming.issubset(live)
        for group in self._groups.values():
            forked: ForkGroup | None = group[0].fork_group
            if forked is not None:
                forked.check_integrity()
                assert set(group) == set(forked.members)
        for sequence in live:
            assert (sequence.state is SequenceState.FORMING) == (sequence in forming)
            assert sequence.state is not SequenceState.FINISHED
