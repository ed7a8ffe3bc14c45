"""The requests that are in the engine, and how they end."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.engine.beams.group import BeamGroup
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.scheduling.planner import Planner
from millrace.engine.step.outputs import beam_failure, beam_outputs, error_output
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import EngineOutput
from millrace.schemas.errors import MillraceError


class LiveRequests:
    """The unfinished sequences of each request. A sequence that ends is removed from planner and
    sampler too; only ``pop_ended`` and ``cancel`` still return it."""

    def __init__(self, planner: Planner, sampler: Sampler) -> None:
        self._planner = planner
        self._sampler = sampler
        self._groups: dict[str, list[Sequence]] = {}
        self._ended: list[tuple[int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Sequence]:
        for group in self._groups.values():
            yield from group

    def add(self, group: list[Sequence]) -> None:
        """Add the sequences of a request; the planner gets the first of them."""
        self._groups[group[0].request_id] = list(group)
        self._planner.add(group[0])

    def charged(self) -> Iterator[Sequence]:
        """Those whose device times are reported: the first beam stands for all of its search."""
        for group in self._groups.values():
            yield from group if group[0].beams is None else group[:1]

    def add_beam(self, sequence: Sequence) -> None:
        """A beam goes on as two; the planner has the new one."""
        self._groups[sequence.request_id].append(sequence)

    def drop_beam(self, sequence: Sequence) -> None:
        """A beam does not go on, but others of its search do."""
        self._groups[sequence.request_id].remove(sequence)
        self._release(sequence)

    def finish_search(self, group: BeamGroup, outputs: list[EngineOutput]) -> None:
        """A beam search ends with its answers."""
        self._end_search(group, beam_outputs(group), outputs)

    def _end_search(
        self, group: BeamGroup, last: list[EngineOutput], outputs: list[EngineOutput]
    ) -> None:
        """A beam search ends with its ``last`` outputs, of which the first says what it took."""
        self._ended.append((len(outputs), group.first))
        outputs += last
        for sequence in self.cancel(group.request.request_id):
            assert sequence.beams is group

    def cancel(self, request_id: str) -> list[Sequence]:
        """Remove a request in any state; returns its sequences."""
        group = self._groups.pop(request_id, [])
        for sequence in group:
            self._release(sequence)
        return group

    def finish(self, sequence: Sequence, outputs: list[EngineOutput]) -> None:
        """The sequence ends; its last output is the last of ``outputs``, those of this step."""
        self._ended.append((len(outputs) - 1, sequence))
        group = self._groups[sequence.request_id]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request_id]
        self._release(sequence)

    def fail(self, sequence: Sequence, error: MillraceError, outputs: list[EngineOutput]) -> None:
        """End a sequence, and those that wait for its prompt, with an error; a beam's whole search
        ends with it."""
        sequence.contents_finite = False  # nobody has looked at what it computed last
        if sequence.beams is not None:
            for beam in sequence.beams.members:  # nor at what the others did
                beam.contents_finite = False
            self._end_search(sequence.beams, beam_failure(sequence.beams, error), outputs)
            return
        for ended in (sequence, *sequence.forks):
            outputs.append(error_output(ended, error))
            self.finish(ended, outputs)

    def pop_ended(self) -> list[tuple[int, Sequence]]:
        """Sequences that ended in this step, each with the index of its last output."""
        ended, self._ended = self._ended, []
        return ended

    def _release(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        self._sampler.remove(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless groups and planner agree about live sequences."""
        self._planner.check_integrity()
        live = list(self)
        forming = {fork for sequence in live for fork in sequence.forks}
        assert self._planner.num_live == len(live) - len(forming)
        assert forming.issubset(live)
        for group in self._groups.values():
            beams = group[0].beams
            if beams is not None:
                beams.check_integrity()
                assert set(group) == set(beams.members)
        for sequence in live:
            assert (sequence.state is SequenceState.FORMING) == (sequence in forming)
            assert sequence.state is not SequenceState.FINISHED
