"""Two texts as one prompt, as a checkpoint's tokenizer puts them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millrace.schemas.errors import CheckpointError

# What the places of special tokens are found by: texts that differ, of a token or a few each.
_FIRST, _SECOND = "a", "b"


class AroundPair(NamedTuple):
    """The special tokens before, between and behind the texts of a pair."""

    before: list[int]
    between: list[int]
    behind: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)


def around_pair(
    encode_bare: Callable[[str], list[int]], encode_pair: Callable[[str, str], list[int]]
) -> AroundPair:
    """By the token ids of texts and of a pair. Raises CheckpointError if what is special cannot be
    told from the texts."""
    first, second = encode_bare(_FIRST), encode_bare(_SECOND)
    whole = encode_pair(_FIRST, _SECOND)
    found = [
        AroundPair(whole[:begin], whole[begin + len(first) : middle], whole[middle + len(second) :])
        for begin in _places_of(first, whole)
        for middle in _places_of(second, whole)
        if middle >= begin + len(first)
    ]
    if len(found) != 1:
        raise CheckpointError("tokenizer.json: what it puts around two texts cannot be known.")
    return found[0]


def _places_of(part: list[int], whole: list[int]) -> list[int]:
    return [at for at in range(len(whole)) if part and whole[at : at + len(part)] == part]


def cut_pair(num_first: int, num_second: int, max_tokens: int) -> tuple[int, int]:
    """How many tokens of each text stay of ``max_tokens`` in all: the longer one is cut until both
    are alike, as transformers does it by default."""
    num_short = min(num_first, num_second, max_tokens // 2)
    num_long = min(max(num_first, num_second), max_tokens - num_short)
    return (num_short, num_long) if num_first <= num_second else (num_long, num_short)
