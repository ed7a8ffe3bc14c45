"""Finds where the end of a sequence was met before, and so what may come next."""

from __future__ import annotations

from array import array
from typing import NamedTuple

# Ends of these lengths are looked for, the longest first.
_LENGTHS = (5, 2)
# So many tokens of a long prompt are indexed at a time, in about a millisecond.
_MOST_INDEXED = 1024
# Between a prediction and the prompt: no token, so that nothing is found across it.
_GAP = -1
_MAX_MATCH = 16
_NOWHERE = -1
# Of longer texts the tables forget some: they take a megabyte then.
_MOST_BITS = 17


class Suggestion(NamedTuple):
    """Tokens that may come next; the ``match`` tokens before them were the same there. A match of
    0: the one that was followed has just ended, and perhaps goes on behind the next token."""

    token_ids: list[int]
    match: int


class Lookup:
    """Suggests what followed the same tokens before, in the prompt, in the answer so far, or in a
    prediction of it, which is taken to begin with the first token. O(1) a token.

    Ends of two and of five tokens are kept by where they were met last, in tables by their hashes
    where a newer one takes the place of an older. Where a match goes on it is followed; where it
    breaks, another is looked for.
    """

    __slots__ = ("_at", "_index", "_mask", "_match", "_num_indexed", "_num_tokens", "_tokens")

    def __init__(
        self,
        token_ids: list[int],
        prediction: tuple[int, ...],
        num_output: int,
        max_total_tokens: int,
    ) -> None:
        """``token_ids``: prompt and answer so far, of which the last ``num_output`` are answer;
        they become ``max_total_tokens`` at most."""
        self._tokens = [*prediction, _GAP] if prediction else []
        size = 1 << min((max_total_tokens + len(prediction)).bit_length(), _MOST_BITS)
        self._mask = size - 1
        self._index = [array("i", [_NOWHERE]) * size for _ in _LENGTHS]
        self._num_indexed = 0
        self._num_tokens = 0
        self._at: int | None = None
        self._match = 0
        num_prompt = len(token_ids) - num_output
        self._tokens += token_ids[:num_prompt]
        self._num_tokens = num_prompt
        if prediction:
            self._at, self._match = 0, _MAX_MATCH
        self.extend(token_ids)

    def extend(self, token_ids: list[int]) -> None:
        """Take the tokens that came since the last call; ``token_ids`` are all there are."""
        tokens = self._tokens
        for token in token_ids[self._num_tokens :]:
            tokens.append(token)
            at = self._at
            if at is None:
                continue
            if tokens[at] == token:
                self._match = min(self._match + 1, _MAX_MATCH)
            else:
                self._match = 0
            self._at = None if tokens[at] == _GAP else at + 1
        self._num_tokens = len(token_ids)
        self._index_more()
        if self._at is None or self._match < _LENGTHS[-1]:
            self._find()

    def suggest(self, most: int) -> Suggestion:
        """Up to ``most`` tokens, none if nothing was found."""
        tokens, at = self._tokens, self._at
        if at is None:
            return Suggestion([], 0)
        found = tokens[at : at + most]
        if _GAP in found:
            del found[found.index(_GAP) :]
        elif found:
            # What is followed may be the end itself, which then goes round.
            while len(found) < most and at + len(found) >= len(tokens):
                found.append(found[len(found) - (len(tokens) - at)])
        return Suggestion(found, self._match)

    def _index_more(self) -> None:
        """Note where ends of known lengths are, but for the very last: what follows it is not
        known."""
        tokens, mask = self._tokens, self._mask
        end = min(len(tokens), self._num_indexed + _MOST_INDEXED)
        for length, table in zip(_LENGTHS, self._index, strict=True):
            for place in range(max(self._num_indexed, length), end):
                table[hash(tuple(tokens[place - length : place])) & mask] = place
        self._num_indexed = max(self._num_indexed, end)

    def _find(self) -> None:
        """Follow the last place where the last tokens were met, the longer end first."""
        tokens = self._tokens
        for length, table in zip(_LENGTHS, self._index, strict=True):
            last = tokens[-length:]
            place = table[hash(tuple(last)) & self._mask]
            if place == _NOWHERE or tokens[place - length : place] != last:
                continue
            match = length
            most = min(_MAX_MATCH, place)
            while match < most and tokens[place - match - 1] == tokens[-match - 1]:
                match += 1
            if self._at is None or match > self._match + 1:
                self._at, self._match = place, match
                return
