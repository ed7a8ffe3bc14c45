"""The requests that are in the engine, and how they leave it."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.errors import MillraceError
from workers.engine.outputs import error_output
from workers.engine.sampling.sampler import Sampler
from workers.engine.scheduling.planner import Planner
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.types import EngineOutput


class LiveRequests:
    """The choices of each request that are not over. Whoever leaves is taken out of planner and
    sampler too, so that nothing of it is left, but for what ``take_ended`` and
    ``cancel`` give."""

    def __init__(self, planner: Planner, sampler: Sampler) -> None:
        self._planner = planner
        self._sampler = sampler
        self._choices: dict[str, list[Sequence]] = {}
        self._ended: list[tuple[int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Sequence]:
        for choices in self._choices.values():
            yield from choices

    def add(self, choices: list[Sequence]) -> None:
        """Take the choices of a request; the first of them is planned for."""
        self._choices[choices[0].request_id] = list(choices)
        self._planner.add(choices[0])

    def cancel(self, request_id: str) -> list[Sequence]:
        """Forget a request, in whatever state; the choices of it that were here."""
        choices = self._choices.pop(request_id, [])
        for sequence in choices:
            self._leave(sequence)
        return choices

    def end(self, sequence: Sequence, outputs: list[EngineOutput]) -> None:
        """It is over; the last of ``outputs``, which are those of this step, is its last one."""
        self._ended.append((len(outputs) - 1, sequence))
        choices = self._choices[sequence.request_id]
        choices.remove(sequence)
        if not choices:
            del self._choices[sequence.request_id]
        self._leave(sequence)

    def fail(self, sequence: Sequence, error: MillraceError, outputs: list[EngineOutput]) -> None:
        """End a sequence, and those that wait for its prompt, with an error."""
        sequence.contents_finite = False  # nobody has looked at what it computed last
        for ended in (sequence, *sequence.forks):
            outputs.append(error_output(ended, error))
            self.end(ended, outputs)

    def take_ended(self) -> list[tuple[int, Sequence]]:
        """Those that have ended in this step, and where among its outputs their last one is."""
        ended, self._ended = self._ended, []
        return ended

    def _leave(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        self._sampler.end(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless choices and planner agree about who lives."""
        self._planner.check_integrity()
        live = list(self)
        forming = {fork for sequence in live for fork in sequence.forks}
        assert self._planner.num_live == len(live) - len(forming)
        assert forming.issubset(live)
        for sequence in live:
            assert (sequence.state is SequenceState.FORMING) == (sequence in forming)
            assert sequence.state is not SequenceState.FINISHED
