"""Suggestions of next tokens for one sequence, with their probabilities."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from millrace.engine.speculation.lookup import Lookup
from millrace.engine.step.sequence import Sequence

# Lower bounds of the classes of suggestions, by the number of tokens that matched before them. The
# last two classes are tokens that a grammar forces, and tokens of a draft.
_MATCHES = (0, 1, 3, 6, 12)
FORCED = len(_MATCHES)
DRAFTED = FORCED + 1
# Assumed acceptance rate of each class, and its weight in tokens.
_PRIORS = (0.3, 0.3, 0.5, 0.7, 0.85, 0.8, 0.7)
_PRIOR_WEIGHT = 8.0
# A sequence's own observations lose half of their weight in 8 tokens, those of all sequences in 90.
_OWN_DECAY, _DECAY = 0.917, 0.9923
# Weight of the acceptance rate of all sequences, in tokens of a sequence's own.
_OTHERS_WEIGHT = 3.0
# Share of the observations that is forgotten with each step that could not observe the class.
_FORGOTTEN = 0.01


def match_class(match: int) -> int:
    """Return the class of a token after ``match`` matching tokens."""
    return bisect_right(_MATCHES, match) - 1


class Acceptance:
    """Acceptance rates of suggested tokens by class, as EWMAs.

    ``others`` has those of all sequences.
    """

    __slots__ = ("_came", "_decay", "_others", "_weights")

    def __init__(self, others: Acceptance | None = None) -> None:
        self._others = others
        self._decay = _DECAY if others is None else _OWN_DECAY
        weight = _PRIOR_WEIGHT if others is None else 0.0
        self._weights = [weight] * len(_PRIORS)
        self._came = [weight * prior for prior in _PRIORS]

    def note(self, kind: int, *, came: bool) -> None:
        """Note whether a suggested token of a class was accepted."""
        self._weights[kind] = self._weights[kind] * self._decay + 1.0
        self._came[kind] = self._came[kind] * self._decay + came
        if self._others is not None:
            self._others.note(kind, came=came)

    def forget(self, kind: int) -> None:
        """Move the rate towards the assumed one, so that a class that did not pay is tried
        again."""
        assumed = self._weights[kind] * _PRIORS[kind]
        self._came[kind] += _FORGOTTEN * (assumed - self._came[kind])
        if self._others is not None:
            self._others.forget(kind)

    def chance(self, kind: int) -> float:
        """Return the probability that the next token of a class is accepted."""
        if self._others is None:
            return self._came[kind] / self._weights[kind]
        others = self._others.chance(kind)
        came = self._came[kind] + _OTHERS_WEIGHT * others
        return came / (self._weights[kind] + _OTHERS_WEIGHT)


# Maximum suggested tokens; the probability that more are accepted never pays for their rows.
MOST_AHEAD = 32


class Suggestions:
    """Suggestions for a decoding sequence: tokens that its grammar forces, else those of a lookup.

    ``drafted`` is the state of a draft. Each suggestion is compared with the actual tokens, even if
    it was not computed ahead. So the acceptance rate is learned without extra rows.
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
        """Return whether to skip the sequence in this step. Call it once a step."""
        if self._rests_left > 0:
            self._rests_left -= 1
            return True
        return self._has_given_up

    def rest(self, most: int) -> None:
        """Skip the sequence for twice as many steps as the last time, at most ``most``."""
        self._num_rests = self._rests_left = min(2 * self._num_rests + 1, most)

    def give_up(self) -> None:
        """Suggest nothing from now on."""
        self._has_given_up = True
        self.token_ids, self._kinds = [], []

    def renew(self, sequence: Sequence) -> None:
        """Suggest the next tokens."""
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
        """Return the probability that a token of a draft is accepted."""
        return self._acceptance.chance(DRAFTED)

    def draft(self, token_ids: list[int]) -> None:
        """Replace the suggestions by those of a draft."""
        self.token_ids, self._kinds = token_ids, [DRAFTED] * len(token_ids)

    def do_not_draft(self) -> None:
        """Note that this step cannot observe whether a draft's token is accepted."""
        self._acceptance.forget(DRAFTED)

    def chances(self) -> list[float]:
        """Return the probability that each suggested token is accepted, with all before it."""
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
        """Compare the last suggestions with the tokens since then."""
        came = token_ids[self._place : self._place + len(self.token_ids)]
        for kind, token, suggested in zip(self._kinds, came, self.token_ids, strict=False):
            self._acceptance.note(kind, came=token == suggested)
            if token != suggested:
                break
