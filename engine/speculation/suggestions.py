"""What may come next in one sequence, and with what chance."""

from __future__ import annotations

from typing import Any

from millrace.engine.speculation.acceptance import DRAFTED, FORCED, Acceptance, match_class
from millrace.engine.speculation.lookup import Lookup
from millrace.engine.step.sequence import Sequence

# More are never worth their rows: the chance that all come has fallen too far.
MOST_AHEAD = 32


class Suggestions:
    """Of a sequence that decodes. First come the tokens that its grammar forces; else what a lookup
    finds.

    ``drafted`` is what a draft keeps of it. Each suggestion is held against the tokens that come,
    whether or not these were computed ahead: so it costs no step to learn that a text cannot be
    guessed, or that it can again.
    """

    __slots__ = (
        "_acceptance",
        "_has_given_up",
        "_kinds",
        "_lookup",
        "_num_rests",
        "_place",
        "_rests_left",
        "drafted",
        "token_ids",
    )

    def __init__(self, sequence: Sequence, acceptance: Acceptance) -> None:
        self._acceptance = Acceptance(acceptance)
        self._lookup = Lookup(
            sequence.token_ids,
            sequence.request.prediction_token_ids,
            sequence.num_output_tokens,
            sequence.max_total_tokens,
        )
        self.drafted: Any = None
        self.token_ids: list[int] = []
        self._kinds: list[int] = []
        self._place = 0
        self._num_rests = self._rests_left = 0
        self._has_given_up = False

    def rests(self) -> bool:
        """Whether it is not to be renewed in this step; to be called once a step."""
        if self._rests_left > 0:
            self._rests_left -= 1
            return True
        return self._has_given_up

    def rest(self, most: int) -> None:
        """Nothing of it was worth to be proposed: it rests for twice as many steps as the last
        time, ``most`` at most."""
        self._num_rests = self._rests_left = min(2 * self._num_rests + 1, most)

    def give_up(self) -> None:
        """Suggest nothing from now on."""
        self._has_given_up = True
        self.token_ids, self._kinds = [], []

    def renew(self, sequence: Sequence) -> None:
        """Suggest what may come next, as of now."""
        self._learn(sequence.token_ids)
        self._lookup.extend(sequence.token_ids)
        matcher = sequence.matcher
        forced = [] if matcher is None else matcher.forced_tokens()[:MOST_AHEAD]
        if forced:
            self.token_ids, self._kinds = forced, [FORCED] * len(forced)
        else:
            found, match = self._lookup.suggest(MOST_AHEAD)
            if matcher is not None and found:
                del found[matcher.num_fitting(found) :]
            self.token_ids = found
            self._kinds = [match_class(match + ahead) for ahead in range(len(found))]
        self._place = len(sequence.token_ids)

    def draft_chance(self) -> float:
        """That a token of a draft comes."""
        return self._acceptance.chance(DRAFTED)

    def draft(self, token_ids: list[int]) -> None:
        """Suggest what a draft said in place of what was found."""
        self.token_ids, self._kinds = token_ids, [DRAFTED] * len(token_ids)

    def do_not_draft(self) -> None:
        """Nobody sees in this step whether a draft's token would have come."""
        self._acceptance.forget(DRAFTED)

    def chances(self) -> list[float]:
        """That each of the suggested tokens comes, and all before it."""
        chances: list[float] = []
        by_class: dict[int, float] = {}
        chance = 1.0
        for kind in self._kinds:
            own = by_class.get(kind)
            if own is None:
                own = by_class[kind] = self._acceptance.chance(kind)
            chance *= own
            chances.append(chance)
        return chances

    def _learn(self, token_ids: list[int]) -> None:
        """Hold the last suggestion against what has come since."""
        came = token_ids[self._place : self._place + len(self.token_ids)]
        for kind, token, suggested in zip(self._kinds, came, self.token_ids, strict=False):
            self._acceptance.note(kind, came=token == suggested)
            if token != suggested:
                break
