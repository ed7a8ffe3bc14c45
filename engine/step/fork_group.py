"""Fork group: sequences of one request that a client of the engine leads."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

from millrace.engine.step.sequence import UNREAD_TOKEN, Sequence
from millrace.engine.types import EngineRequest


class Candidate(NamedTuple):
    """Token that may come next, and its natural-log probability."""

    token: int
    logprob: float


class ForkGroup:
    """Fork group: sequences of one request that a client of the engine leads.

    After each token the client chooses which sequences continue, with which tokens, and which end.
    The group begins with one sequence, the prompt's, and never has more than ``width``. A computed
    sequence is held with its ``num_candidates`` likeliest next tokens, without the ``excluded``
    ones, until the candidates of all sequences are known. Then the group ``is_complete``, and its
    client calls ``LiveRequests.go_on`` or ``finish_group``. The planner may preempt each sequence
    by itself.

    ``device_s`` and ``num_preemptions`` are totals of all sequences that the group ever had.
    ``client_state`` belongs to the client.
    """

    def __init__(
        self,
        first: Sequence,
        *,
        width: int,
        num_candidates: int,
        excluded: Rows[int],
        client_state: Any,
    ) -> None:
        self.first = first
        self.width = width
        self.num_candidates = num_candidates
        self.excluded = excluded
        self.client_state = client_state
        self.members: list[Sequence] = [first]
        self.candidates: dict[Sequence, Rows[Candidate]] = {}
        self.has_advanced = False
        self._left_device_s = 0.0
        self._left_preemptions = 0

    @property
    def request(self) -> EngineRequest:
        return self.first.request

    @property
    def num_slots(self) -> int:
        """Number of sequences now, or after the prompt is computed."""
        return len(self.members) if self.has_advanced else self.width

    @property
    def is_complete(self) -> bool:
        """True if the candidates of all sequences are known."""
        return len(self.candidates) == len(self.members)

    @property
    def device_s(self) -> float:
        return self._left_device_s + sum(sequence.device_s for sequence in self.members)

    @property
    def num_preemptions(self) -> int:
        return self._left_preemptions + sum(s.num_preemptions for s in self.members)

    def hold(self, sequence: Sequence, candidates: Rows[Candidate]) -> None:
        """Hold a computed sequence until its client chooses among ``candidates``."""
        self.candidates[sequence] = candidates
        sequence.token_ids.append(UNREAD_TOKEN)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that ends, and add its device time and preemptions to the group's."""
        self.members.remove(sequence)
        self._left_device_s += sequence.device_s
        self._left_preemptions += sequence.num_preemptions

    def child_of(self, parent: Sequence, token: int) -> Sequence:
        """Add a sequence that continues ``parent`` with ``token``. It has no blocks yet."""
        taken = {sequence.choice for sequence in self.members}
        choice = next(number for number in range(self.width) if number not in taken)
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
        child.fork_group = self
        self.members.append(child)
        return child

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sequences have one length, and sequences with candidates
        are held."""
        members = set(self.members)
        assert len(members) == len(self.members) <= self.width
        assert members.issuperset(self.candidates)
        assert len({sequence.choice for sequence in members}) == len(members)
        assert not self.is_complete
        for sequence in members:
            assert sequence.fork_group is self
            assert sequence.is_held == (sequence in self.candidates)
        assert len({sequence.num_tokens - sequence.is_held for sequence in members}) == 1


def charged_together(sequence: Sequence) -> Rows[Sequence]:
    """Return all sequences of its fork group, which are charged as one; without a group, itself
    alone."""
    return (sequence,) if sequence.fork_group is None else sequence.fork_group.members
