"""Lookup of earlier occurrences of a sequence's last tokens, to propose what followed them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

# Lengths of the n-grams that are looked up, the longest first.
_LENGTHS = (5, 2)
# Tokens of a long prompt that are indexed at a time, in about a millisecond.
_MOST_INDEXED = 1024
# Separator of prediction and prompt. It equals no token, so no match crosses it.
_GAP = -1
_MAX_MATCH = 16
_NOWHERE = -1
# Maximum size of a table, about a megabyte. In longer texts old entries are overwritten.
_MOST_BITS = 17


class Suggestion(NamedTuple):
    """Tokens that may come next, and the number of tokens before them that matched.

    A match of 0 means that the followed text has just diverged and may match again after the next
    token.
    """

    token_ids: list[int]
    match: int


class Lookup:
    """N-gram lookup in the prompt, the answer so far, and a prediction of the answer.

    The prediction is assumed to start with the first token. O(1) per token. The last positions of
    n-grams of two and of five tokens are in hash tables, where newer entries replace older ones. A
    match is followed while it continues; when it breaks, another is looked up.
    """

    __slots__ = ("_at", "_index", "_mask", "_match", "_num_indexed", "_num_tokens", "_tokens")

    def __init__(
        self,
        token_ids: list[int],
        prediction: tuple[int, ...],
        num_output: int,
        max_total_tokens: int,
    ) -> None:
        """Create a lookup.

        Args:
            token_ids: Prompt and answer so far.
            prediction: Expected answer; may be empty.
            num_output: Number of tokens of ``token_ids`` that are answer.
            max_total_tokens: Maximum length of ``token_ids``.
        """
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
        """Add the tokens since the last call. ``token_ids`` are all tokens."""
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
        """Return up to ``most`` tokens; none if there is no match."""
        tokens, at = self._tokens, self._at
        if at is None:
            return Suggestion([], 0)
        found = tokens[at : at + most]
        if _GAP in found:
            del found[found.index(_GAP) :]
        elif found:
            # If the followed text reaches the end of the sequence, the matched period repeats.
            while len(found) < most and at + len(found) >= len(tokens):
                found.append(found[len(found) - (len(tokens) - at)])
        return Suggestion(found, self._match)

    def _index_more(self) -> None:
        """Index the n-grams, except the last, whose next token is not known."""
        tokens, mask = self._tokens, self._mask
        end = min(len(tokens), self._num_indexed + _MOST_INDEXED)
        for length, table in zip(_LENGTHS, self._index, strict=True):
            for place in range(max(self._num_indexed, length), end):
                table[hash(tuple(tokens[place - length : place])) & mask] = place
        self._num_indexed = max(self._num_indexed, end)

    def _find(self) -> None:
        """Follow the latest occurrence of the last tokens, the longer n-gram first."""
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
