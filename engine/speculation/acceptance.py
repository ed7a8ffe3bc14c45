"""How likely a suggested token is the one that will be drawn, from how often it was of late."""

from __future__ import annotations

from bisect import bisect_right

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
