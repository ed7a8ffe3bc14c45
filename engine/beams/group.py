"""The sequences that are the beams of a search."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from millrace.engine.beams.search import BeamHypothesis, BeamSearch, Candidate, Extension
from millrace.engine.step.sequence import UNREAD_TOKEN, Sequence
from millrace.engine.types import EngineRequest


def charged_together(sequence: Sequence) -> Rows[Sequence]:
    """All beams of its search, which are charged as one; or itself alone."""
    return (sequence,) if sequence.beams is None else sequence.beams.members


class BeamGroup:
    """The beams of one request, each a sequence, in the order of their log-probabilities.

    It begins with one beam, the prompt's. A beam whose next tokens are known from ``note`` on is
    held until those of all are: then the group ``is_complete``, and ``advance`` lets those go on
    that the search chooses. Blocks and slots are the planner's, who may preempt each beam by
    itself. ``device_s`` is what all beams that there ever were took of the device, and
    ``num_preemptions`` how often they were preempted.
    """

    def __init__(self, first: Sequence, search: BeamSearch) -> None:
        self.first = first
        self.search = search
        self.members: list[Sequence] = [first]
        self._logprobs: dict[Sequence, float] = {first: 0.0}
        self._candidates: dict[Sequence, Rows[Candidate]] = {}
        # Charged for the step that they left in only after that: they are added up with the next.
        self._left: list[Sequence] = []
        self._left_device_s = 0.0
        self._left_preemptions = 0
        self.has_advanced = False

    @property
    def request(self) -> EngineRequest:
        return self.first.request

    @property
    def num_beams(self) -> int:
        """How many there are, or will be once the prompt is computed."""
        return len(self.members) if self.has_advanced else self.search.width

    @property
    def is_complete(self) -> bool:
        """Whether the next tokens of all beams are known."""
        return len(self._candidates) == len(self.members)

    @property
    def device_s(self) -> float:
        return self._left_device_s + sum(s.device_s for s in (*self._left, *self.members))

    @property
    def num_preemptions(self) -> int:
        left = sum(sequence.num_preemptions for sequence in self._left)
        return self._left_preemptions + left + sum(s.num_preemptions for s in self.members)

    def note(self, sequence: Sequence, candidates: Rows[Candidate]) -> None:
        """A beam was computed, and may go on with ``candidates``: it is held from now on."""
        self._candidates[sequence] = candidates
        sequence.token_ids.append(UNREAD_TOKEN)

    def extend(self) -> list[Extension]:
        """What the search makes of a complete group, as ``BeamSearch.extend``."""
        num_prompt_tokens = self.first.num_prompt_tokens
        beams = [
            BeamHypothesis(sequence.token_ids[num_prompt_tokens:-1], self._logprobs[sequence])
            for sequence in self.members
        ]
        return self.search.extend(beams, [self._candidates[s] for s in self.members])

    def children(self, extensions: Rows[Extension]) -> list[list[Extension]]:
        """The extensions of each beam."""
        of_each: list[list[Extension]] = [[] for _ in self.members]
        for extension in extensions:
            of_each[extension.beam].append(extension)
        return of_each

    def child_of(self, parent: Sequence, token: int) -> Sequence:
        """A new beam that goes on from ``parent`` with ``token``; it has no blocks yet."""
        taken = {sequence.choice for sequence in self.members}
        choice = next(number for number in range(self.search.width) if number not in taken)
        child = Sequence(
            parent.request,
            arrival=self.first.arrival + choice,
            key=parent.key,
            max_total_tokens=parent.max_total_tokens,
            added_s=parent.added_s,
            choice=choice,
        )
        child.token_ids = [*parent.token_ids[:-1], token]
        child.started = True
        child.beams = self
        self.members.append(child)
        return child

    def leave(self, sequence: Sequence) -> None:
        """A beam does not go on."""
        self.members.remove(sequence)
        self._left.append(sequence)

    def advance(self, beams: Rows[tuple[Sequence, float]]) -> None:
        """These are the beams now, the likeliest first, each with its sum of log-probabilities."""
        self.members = [sequence for sequence, _ in beams]
        self._logprobs = dict(beams)
        self._candidates = {}
        self.has_advanced = True

    def add_up(self) -> None:
        """Forget those that left with an earlier step, but for what they took."""
        self._left_device_s += sum(sequence.device_s for sequence in self._left)
        self._left_preemptions += sum(sequence.num_preemptions for sequence in self._left)
        self._left = []

    def check_integrity(self) -> None:
        """Raise AssertionError unless the beams have one length, and those that are known are
        held."""
        members = set(self.members)
        assert len(members) == len(self.members) <= self.search.width
        assert members.issuperset(self._candidates)
        assert members == set(self._logprobs)
        assert len({sequence.choice for sequence in members}) == len(members)
        assert not self.is_complete
        for sequence in members:
            assert sequence.beams is self
            assert sequence.is_held == (sequence in self._candidates)
        assert len({sequence.num_tokens - sequence.is_held for sequence in members}) == 1
