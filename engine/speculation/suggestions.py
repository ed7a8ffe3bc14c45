"""What may come next in one sequence, and with what chance."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from millrace.engine.speculation.lookup import Lookup
from millrace.engine.step.sequence import Sequence

# Suggestions are told apart by how many tokens matched before them, from these on; the last classes
# are tokens that a grammar forces and those of a draft.
_MATCHES = (0, 1, 3, 6, 12)
FORCED = len(_MATCHES)
DRAFTED = FORCED + 1
# What is assumed of each class before anything was seen, as if of so many tokens.
_PRIORS = (0.3, 0.3, 0.5, 0.7, 0.85, 0.8, 0.7)
_PRIOR_WEIGHT = 8.0
# What a sequence has seen itself loses half of its weight in 8 tokens, what all have in 90.
_OWN_DECAY, _DECAY = 0.917, 0.9923
# Others' tokens count as so many of a sequence's own, at most.
_OTHERS_WEIGHT = 3.0
# What is forgotten with each step in which nobody could see whether a token would have come.
_FORGOTTEN = 0.01


def match_class(match: int) -> int:
    """The class of a token behind so many that matched."""
    return bisect_right(_MATCHES, match) - 1


class Acceptance:
    """Shares of suggested tokens that came, by class; ``others`` are what is known besides."""

    __slots__ = ("_came", "_decay", "_others", "_weights")

    def __init__(self, others: Acceptance | None = None) -> None:
        self._others = others
        self._decay = _DECAY if others is None else _OWN_DECAY
        weight = _PRIOR_WEIGHT if others is None else 0.0
        self._weights = [weight] * len(_PRIORS)
        self._came = [weight * prior for prior in _PRIORS]

    def note(self, kind: int, *, came: bool) -> None:
        """A suggested token of a class came or did not."""
        self._weights[kind] = self._weights[kind] * self._decay + 1.0
        self._came[kind] = self._came[kind] * self._decay + came
        if self._others is not None:
            self._others.note(kind, came=came)

    def forget(self, kind: int) -> None:
        """Come nearer to what is assumed, so that what did not pay is tried again."""
        assumed = self._weights[kind] * _PRIORS[kind]
        self._came[kind] += _FORGOTTEN * (assumed - self._came[kind])
        if self._others is not None:
            self._others.forget(kind)

    def chance(self, kind: int) -> float:
        """That the next token of a class comes."""
        if self._others is None:
            return self._came[kind] / self._weights[kind]
        others = self._others.chance(kind)
        came = self._came[kind] + _OTHERS_WEIGHT * others
        return came / (self._weights[kind] + _OTHERS_WEIGHT)


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
